"""Everything that an optimizer must give back: its folder, its lock and its open stores.

Kept apart from the optimizer so that a forgotten optimizer can be collected while this
object still knows how to close. It is also the one place that sees all tables at once,
and so the one that commits, resumes and rolls back. What is promised stands in
:mod:`lowmem.dsa.journal`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from lowmem import interrupts
from lowmem.dsa import commits, recovery, transfer
from lowmem.dsa.busy import Busy, Changing, ClosedError
from lowmem.dsa.commits import Commit, Point
from lowmem.dsa.folder import Mode, StoreFolder
from lowmem.dsa.header import StoreError, read_header, require_fit, require_name
from lowmem.dsa.history import History
from lowmem.dsa.journal import Journal
from lowmem.dsa.residency import Prefetch
from lowmem.dsa.space import require_space
from lowmem.dsa.store import RowStore
from lowmem.dsa.table import Table, require_table, table_shape

log = logging.getLogger(__name__)

Durability = Literal["process", "power", "none"]


class Estate:
    """The folder and the tables of one optimizer.

    Attributes:
        tables: the parameters that have a row store.
        half_done: an error ended a step in its middle, so there is nothing to go on with.
        overwritten: identities of the stores that ``mode="overwrite"`` removed.
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
        self._ready = False
        self._busy = Busy()
        self.half_done = False
        self._mode = mode
        self._prefetch = prefetch
        self._pid = os.getpid()
        self._commit: Commit | None = None
        self.folder = StoreFolder(directory, mode)
        # A scratch folder does not outlive its process: there is nothing to come back to.
        self._journaled = durability != "none" and not self.folder.scratch
        self._sync = durability == "power"
        self.overwritten: set[str] = set()
        if mode == "overwrite":
            self._clear()

    # -- making and resuming -----------------------------------------------------------

    def _clear(self) -> None:
        for path in self.folder.stores().values():
            with contextlib.suppress(OSError):  # one that is damaged has no name, and goes, too
                self.overwritten.add(read_header(path)[0].identity)
        self.folder.clear()

    def adopt(self, numbers: Mapping[Tensor, int], labels: Mapping[Tensor, str]) -> None:
        """Resume: open each store in the folder for the parameter of its number."""
        if self._mode.startswith("resume"):
            self._resume(numbers, labels)
        else:
            self.folder.drop_journals()  # of stores that somebody removed by hand
        self._ready = True

    def _resume(self, numbers: Mapping[Tensor, int], labels: Mapping[Tensor, str]) -> None:
        params = {number: param for param, number in numbers.items()}
        going_on = []
        for number, path in self.folder.stores().items():
            if number not in params:
                raise StoreError(
                    f"{path} belongs to parameter {number}; this optimizer has {len(params)} "
                    "parameters. Pass the same parameters in the same order"
                )
            param, header = params[number], read_header(path)[0]
            require_fit(path, header, table_shape(param)[0], Table.layout(param))
            require_name(path, header, labels[param])
            if self._mode == "resume-unclean" and not header.clean:
                log.warning("%s was not closed cleanly; it is taken as it is", path)
            if header.clean and header.step:
                going_on.append(f"{labels[param]} at step {header.step:,}")
        if self._mode == "resume":
            self._commit = recovery.recover(self.folder, sync=self._sync)
        else:
            self.folder.drop_journals()
        for number, path in self.folder.stores().items():
            param = params[number]
            store = RowStore.open(path, recover=self._mode == "resume-unclean")
            table = self.tables[param] = Table(param, store, self._prefetch, labels[param])
            table.step = store.header.step
        if going_on:
            more = f" and {len(going_on) - 3} more" if len(going_on) > 3 else ""
            log.warning(
                "%s: going on with %s%s. Weights do not come back by themselves: load the "
                "checkpoint of that step",
                self.folder.path,
                ", ".join(going_on[:3]),
                more,
            )
        # From here on the rows may leave the folder's copies and checksums behind.
        self.folder.forget_manifest()
        if self._journaled:
            for table in self.tables.values():
                table.journal = Journal(table.store, sync=self._sync)
                commit, number = self._commit, self.folder.number(table.store.path)
                named = commit is not None and number in commit.tables
                table.journal.attach(commit.epoch if commit is not None and named else 0)
            if self._commit is None:
                self.commit()  # the clean end of the run before is the step to come back to
        else:
            self.folder.drop_journals()
            self._commit = None
        for table in self.tables.values():
            self._mark_used(table)

    def roll_back(self, table: Table, number: int) -> None:
        """Bring a sound store back to the last commit."""
        point = self.committed_point(number)
        if table.journal is None or point is None:
            raise StoreError(f"{table.label}: there is no commit to go back to")
        with interrupts.whole(), self.changing():
            rows = table.journal.roll_back()
            table.step = point.step
            table.store.history = History(point.history, point.step)
        log.warning(
            "%s: rolled %s rows back to the commit at step %s",
            table.label,
            f"{rows:,}",
            f"{point.step:,}",
        )

    def committed_point(self, number: int) -> Point | None:
        """What a table can come back to, or ``None``."""
        return None if self._commit is None else self._commit.tables.get(number)

    def made_after_commit(self, number: int) -> bool:
        """Whether going back to the last commit means that this store is not there."""
        return self._commit is not None and number not in self._commit.tables

    def remove(self, param: Tensor, number: int) -> None:
        """Close a table's store and remove it."""
        table = self.tables.pop(param)
        if table.journal is not None:
            table.journal.close()
        table.store.close()
        self.folder.remove(number)
        log.warning("%s: removed, it was made after the last commit", table.label)

    def create(self, param: Tensor, number: int, label: str) -> Table:
        """Make the store of a parameter; nothing is left of it when that fails."""
        require_table(param, label)
        store = RowStore.create(
            self.folder.table_path(number), table_shape(param)[0], Table.layout(param), name=label
        )
        journal = None
        try:
            table = Table(param, store, self._prefetch, label)
            if self._journaled:
                table.journal = journal = Journal(store, sync=self._sync, fresh=True)
                journal.attach(0)
            self._mark_used(table)
        except BaseException:
            if journal is not None:
                journal.close()
            store.close()
            self.folder.remove(number)
            raise
        self.tables[param] = table
        return table

    def _mark_used(self, table: Table) -> None:
        """From here on rows may change."""
        boot = "" if self._sync else recovery.this_boot()
        table.store.mark(clean=False, journaled=table.journal is not None, boot=boot)
        if self._sync:
            table.store.flush()

    @property
    def busy(self) -> Busy:
        """``with estate.busy:`` around whatever changes rows, journals or the commit.

        Another thread waits. A signal handler that interrupts the thread inside the block
        cannot wait for it: it gets a RuntimeError, and its ``close`` is done at the end.
        """
        return self._busy

    def changing(self) -> Changing:
        """While rows and weights change. What ends this half way leaves nothing to go on with."""
        return Changing(self)

    def require_whole(self) -> None:
        """Raise when a step was ended half way."""
        if self.half_done:
            raise RuntimeError(
                "a step of this DSA was ended half way by an error: weights and moments are not "
                'of one step. close() it, and go on from the last commit with mode="resume"'
            )

    # -- commit ------------------------------------------------------------------------

    def commit(self) -> Commit:
        """Make the tables' present steps the ones to come back to.

        Raises:
            OSError: the disk is full; the commit before still holds.
        """
        self.require_whole()
        with interrupts.whole():
            commit = self.next_commit()
            if self.journaled:
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
        # A commit that a failed rename left behind comes first.
        commits.settle(self.folder.path, sync=self._sync)
        tables = {}
        for table in self.tables.values():
            if table.journal is not None:
                table.journal.refresh_sums()
                if self._sync:
                    table.journal.flush()
                    table.store.flush()
            store = table.store
            tables[self.folder.number(store.path)] = Point(
                store.header.identity, table.step, store.history.at(table.step)
            )
        return Commit((self._commit.epoch if self._commit else 0) + 1, tables)

    def committed(self, commit: Commit) -> None:
        """The commit's record has its name: start new journals. Never fails."""
        self._commit = commit if self.journaled else None
        for table in self.tables.values():
            if table.journal is not None:
                table.journal.begin(commit.epoch)
        for table in self.tables.values():
            try:
                table.store.mark(step=table.step, committed_step=table.step)
            except OSError as error:
                log.warning("%s: the header could not be written: %s", table.store.path, error)

    def export(self, directory: Path) -> None:
        """Copy the stores as they are now into another folder."""
        self.require_whole()
        if directory == self.folder.path:
            raise ValueError(f"{directory} is the folder in use; export to another one")
        tables = [(table.store, table.journal, table.step) for table in self.tables.values()]
        transfer.export(tables, directory)

    @property
    def journaled(self) -> bool:
        """Whether there is a way back: without one, a commit leaves no record."""
        return self._journaled

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
        if self.closed or os.getpid() != self._pid:
            self.closed = True
            return  # a fork leaves its parent's files alone
        if self._busy.inside():
            self._busy.at_end = self.close
            return
        with contextlib.suppress(ClosedError), self._busy, interrupts.whole():
            self.closed = True
            try:
                # A folder whose resume failed, or a half-done step, is not a clean end.
                if self._ready and not self.tables and not self.folder.scratch:
                    log.warning(
                        "%s holds no store: no parameter had a sparse gradient. Embeddings need "
                        "sparse=True",
                        self.folder.path,
                    )
                if self._ready and self.tables and not (self.half_done or self.folder.scratch):
                    self._mark_clean()
            finally:
                self._busy.over = True  # a step that waits for its turn would find no rows
                for table in self.tables.values():
                    if table.journal is not None:
                        table.journal.close()
                    table.store.close()
                self.folder.release()

    def _mark_clean(self) -> None:
        if self._journaled and self._commit is None:
            try:
                self.commit()  # nothing to come back to yet, so this is it
            except OSError as error:
                log.warning("closed without a commit: %s", error)
        for table in self.tables.values():
            if table.journal is not None:
                table.journal.refresh_sums()
                if self._sync:
                    table.journal.flush()
            if self._sync:
                table.store.flush()
        for table in self.tables.values():
            history = table.store.history.at(table.step)
            table.store.mark(step=table.step, history=history, clean=True)
            if self._sync:
                table.store.flush()
