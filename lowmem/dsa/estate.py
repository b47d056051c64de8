"""Everything that an optimizer must give back: its folder, its lock and its open stores.

Kept apart from the optimizer so that a forgotten optimizer can be collected while this
object still knows how to close. It is also the one place that sees all tables at once,
and so the one that commits, resumes and rolls back. What is promised stands in
:mod:`lowmem.dsa.journal`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from lowmem.dsa import commits, interrupts
from lowmem.dsa.commits import Commit
from lowmem.dsa.folder import Mode, StoreFolder
from lowmem.dsa.journal import Journal
from lowmem.dsa.residency import Prefetch
from lowmem.dsa.store import RowStore, StoreError, read_header, require_space
from lowmem.dsa.table import Table, table_shape

log = logging.getLogger(__name__)

Durability = Literal["process", "power", "none"]


class Estate:
    """The folder and the tables of one optimizer.

    Attributes:
        tables: the parameters that have a row store.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        mode: Mode,
        prefetch: Prefetch,
        durability: Durability,
    ) -> None:
        self.tables: dict[Tensor, Table] = {}
        self.closed = False
        self._mode = mode
        self._prefetch = prefetch
        self._pid = os.getpid()
        self._commit: Commit | None = None
        self.folder = StoreFolder(directory, mode)
        # A scratch folder does not outlive its process: there is nothing to come back to.
        self._journaled = durability != "none" and not self.folder.scratch
        self._sync = durability == "power"
        if mode == "overwrite":
            self.folder.clear()

    # -- making and resuming -----------------------------------------------------------

    def adopt(self, numbers: Mapping[Tensor, int], labels: Mapping[Tensor, str]) -> None:
        """Resume: open each store in the folder for the parameter of its number."""
        if not self._mode.startswith("resume"):
            return
        folder = self.folder.path
        commits.settle(folder, sync=self._sync)
        self._commit = commits.read_commit(folder)
        params = {number: param for param, number in numbers.items()}
        opened: list[tuple[Table, int]] = []
        for number, path in self.folder.stores().items():
            param = params.get(number)
            if param is None:
                raise StoreError(
                    f"{path} belongs to parameter {number}; this optimizer has {len(params)} "
                    "parameters. Pass the same parameters in the same order"
                )
            store = self._open(path, number, param)
            if store is not None:
                table = self.tables[param] = Table(param, store, self._prefetch, labels[param])
                table.step = store.header.step
                opened.append((table, number))
        for table, number in opened:
            self._recover(table, number)
        for table, _ in opened:
            self._start(table)
        if not self._journaled:
            self.folder.drop_journals()
            self._commit = None
        elif self._commit is None:
            self.commit()  # the clean end of the run before is the step to come back to

    def _open(self, path: Path, number: int, param: Tensor) -> RowStore | None:
        header, _ = read_header(path)
        committed = self._commit is not None and number in self._commit.tables
        if self._commit is not None and not committed and not header.clean:
            log.warning("removed %s: it was made after the last commit", path)
            self.folder.remove(number)
            return None
        recover = (committed and header.journaled) or self._mode == "resume-unclean"
        return RowStore.open(
            path, rows=table_shape(param)[0], layout=Table.layout(param), recover=recover
        )

    def _recover(self, table: Table, number: int) -> None:
        """Attach the journal, and roll an unclean store back."""
        store, commit = table.store, self._commit
        if commit is None or number not in commit.tables:
            if not store.header.clean:
                log.warning("%s was not closed cleanly; it is taken as it is", store.path)
            return
        identity, step = commit.tables[number]
        if identity != store.header.identity:
            raise StoreError(
                f"{store.path} is store {store.header.identity}; the folder's last commit has "
                f"{identity}. Parts of two folders were mixed"
            )
        if self._mode == "resume-unclean" and not store.header.clean:
            log.warning("%s was not closed cleanly; it is taken as it is", store.path)
            return
        if not self._journaled:
            if not store.header.clean:
                self._roll_back(table, self._attached(store, commit.epoch), step)
            return
        table.journal = self._attached(store, commit.epoch)
        if not store.header.clean:
            self._roll_back(table, table.journal, step)

    def _attached(self, store: RowStore, epoch: int) -> Journal:
        journal = Journal(store, sync=self._sync)
        journal.attach(epoch)
        return journal

    def _roll_back(self, table: Table, journal: Journal, step: int) -> None:
        rows = journal.roll_back()
        if self._sync:
            journal.flush()
            table.store.flush()
        table.step = step
        table.store.mark(step=step, committed_step=step, clean=True)
        log.warning(
            "%s: rolled %s rows back to the commit at step %s",
            table.label,
            f"{rows:,}",
            f"{step:,}",
        )

    def roll_back(self, table: Table, number: int) -> None:
        """Bring a sound store back to the last commit."""
        if table.journal is None or self._commit is None:
            raise StoreError(f"{table.label}: there is no commit to go back to")
        self._roll_back(table, table.journal, self._commit.tables[number][1])
        self._start(table)

    def committed_step(self, number: int) -> int | None:
        """The step that a table can come back to, or ``None``."""
        if self._commit is None or number not in self._commit.tables:
            return None
        return self._commit.tables[number][1]

    def create(self, param: Tensor, number: int, label: str) -> Table:
        """Make the store of a parameter."""
        store = RowStore.create(
            self.folder.table_path(number), table_shape(param)[0], Table.layout(param), name=label
        )
        table = self.tables[param] = Table(param, store, self._prefetch, label)
        self._start(table)
        return table

    def _start(self, table: Table) -> None:
        """From here on rows may change."""
        if self._journaled and table.journal is None:
            table.journal = Journal(table.store, sync=self._sync)
        journaled = table.journal is not None and table.journal.epoch > 0
        table.store.mark(clean=False, journaled=journaled)
        if self._sync:
            table.store.flush()

    # -- commit ------------------------------------------------------------------------

    def commit(self, numbers: Mapping[Tensor, int] | None = None) -> Commit:
        """Make the tables' present steps the ones to come back to.

        Raises:
            OSError: the disk is full; the commit before still holds.
        """
        with interrupts.whole():
            commit = self.next_commit()
            commits.write_commit(self.folder.path, commit, sync=self._sync)
            self.committed(commit)
        return commit

    def next_commit(self) -> Commit:
        """What a commit now would record; everything that it needs is on its way to the disk."""
        if self.folder.scratch:
            raise ValueError(
                "a scratch folder is removed at exit, so there is nothing to come back to; give "
                "DSA a directory= to commit"
            )
        tables = {}
        for table in self.tables.values():
            if table.journal is not None:
                table.journal.refresh_sums()
                if self._sync:
                    table.journal.flush()
                    table.store.flush()
            tables[self.folder.number(table.store.path)] = (
                table.store.header.identity,
                table.step,
            )
        return Commit((self._commit.epoch if self._commit else 0) + 1, tables)

    def committed(self, commit: Commit) -> None:
        """The commit's record has its name: start new journals."""
        self._commit = commit
        for table in self.tables.values():
            if table.journal is not None:
                table.journal.begin(commit.epoch)
            table.store.mark(
                step=table.step, committed_step=table.step, journaled=table.journal is not None
            )

    @property
    def sync(self) -> bool:
        return self._sync

    # -- looking -----------------------------------------------------------------------

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
        total = 0
        for table in self.tables.values():
            total += table.store.disk_bytes
            if table.journal is not None:
                total += table.journal.disk_bytes
        return total

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Mark the stores clean at their step, close them, and give up the folder."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._pid:
            return  # a fork leaves its parent's files alone
        with interrupts.whole():
            try:
                if not self.folder.scratch and self.tables:
                    self._mark_clean()
            finally:
                for table in self.tables.values():
                    if table.journal is not None:
                        table.journal.close()
                    table.store.close()
                self.folder.release()

    def _mark_clean(self) -> None:
        if self._journaled and self._commit is None:
            self.commit()  # nothing to come back to yet, so this is it
        for table in self.tables.values():
            if table.journal is not None:
                table.journal.refresh_sums()
                if self._sync:
                    table.journal.flush()
            if self._sync:
                table.store.flush()
            table.store.mark(step=table.step, clean=True)
            if self._sync:
                table.store.flush()
