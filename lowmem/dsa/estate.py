"""Everything that an optimizer must give back: its folder, its lock and its open stores.

Kept apart from the optimizer so that a forgotten optimizer can be collected while this
object still knows how to close.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor

from lowmem.dsa.folder import Mode, StoreFolder
from lowmem.dsa.residency import Prefetch
from lowmem.dsa.store import RowStore, StoreError, require_space
from lowmem.dsa.table import Table, table_shape


class Estate:
    """The folder and the tables of one optimizer.

    Attributes:
        tables: the parameters that have a row store.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, mode: Mode, prefetch: Prefetch
    ) -> None:
        self.tables: dict[Tensor, Table] = {}
        self.closed = False
        self._mode = mode
        self._prefetch = prefetch
        self._pid = os.getpid()
        self.folder = StoreFolder(directory, mode)

    def adopt(self, numbers: Mapping[Tensor, int], labels: Mapping[Tensor, str]) -> None:
        """Resume: open each store in the folder for the parameter of its number."""
        if self._mode != "resume":
            return
        params = {number: param for param, number in numbers.items()}
        for number, path in self.folder.stores().items():
            param = params.get(number)
            if param is None:
                raise StoreError(
                    f"{path} belongs to parameter {number}; this optimizer has {len(params)} "
                    "parameters. Pass the same parameters in the same order"
                )
            store = RowStore.open(path, rows=table_shape(param)[0], layout=Table.layout(param))
            table = Table(param, store, self._prefetch, labels[param])
            table.step = store.header.step
            self.tables[param] = table
            store.mark(clean=False)

    def create(self, param: Tensor, number: int, label: str) -> Table:
        """Make the store of a parameter."""
        store = RowStore.create(
            self.folder.table_path(number),
            table_shape(param)[0],
            Table.layout(param),
            name=label,
            overwrite=self._mode == "overwrite",
        )
        table = self.tables[param] = Table(param, store, self._prefetch, label)
        return table

    def require_space(self, likely_bytes: int) -> None:
        """Raise before training starts when the likely tables cannot fit on the disk."""
        there = sum(table.store.file_bytes for table in self.tables.values())
        require_space(self.folder.path, likely_bytes - there)

    def require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this DSA was made by process {self._pid} and this is its fork {os.getpid()}: two "
                "processes must not write one store. Make the optimizer in the process that trains"
            )

    def disk_bytes(self) -> int:
        return sum(table.store.disk_bytes for table in self.tables.values())

    def close(self) -> None:
        """Mark the stores clean at their step, close them, and give up the folder."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:
            return  # a fork leaves its parent's files alone
        try:
            for table in self.tables.values():
                if not self.folder.scratch:
                    table.store.mark(step=table.step, committed_step=table.step, clean=True)
                table.store.close()
        finally:
            self.folder.release()
