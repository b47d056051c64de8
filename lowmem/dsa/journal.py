"""Commit and roll back: what a store promises after a crash.

The promise
-----------
``opt.commit()`` (or ``opt.save_checkpoint``) marks a step as the one to come back to.

* ``durability="process"`` (default): if the process is killed or crashes at any moment
  after that, ``mode="resume"`` brings every row of every table back to the bytes of the
  last commit, and the run goes on bit for bit as if it had been stopped there. A machine
  that was started anew in between is noticed and refused.
* ``durability="power"``: the same when the machine is lost, for one sync a step that
  touches new rows.
* ``durability="none"``: no journal. A store that was not closed cleanly is refused, unless
  ``mode="resume-unclean"`` asks for it as it is.

Before the first commit there is nothing to come back to, and an unclean store is refused.
A table that was made after the last commit goes with the crash. A clean ``close`` keeps
both: the rows as they are and the way back to the last commit, so that a checkpoint of
either step can be loaded. What a disk changes by itself is noticed, not mended: damaged rows
are named. Scratch folders (``directory=None``) promise
nothing; they are removed.

How
---
The first time after a commit that a row is about to change, its old bytes go to an undo
journal, ``table-NNN.undo``: row, checksum, bytes. Only when all rows of a step are there
does the first one change. So the journal grows with the rows touched since the commit, not
with the table. ``table-NNN.sums`` holds a checksum a row as of the last commit; a row is
held to it when it is first touched, and by ``lowmem store verify``.

A journal belongs to one commit, by its epoch number. Records carry a checksum salted with
the epoch and the store's identity, and the header counts the records that are known to be
complete: a bad record below that count is damage and is reported, one above it is the torn
tail of an append whose step never began, and is ignored.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lowmem.dsa.header import StoreError
from lowmem.dsa.store import RowStore
from lowmem.dsa.sums import RowSums, slices
from lowmem.dsa.undofile import UndoFile
from lowmem.kernels.threads import run_parallel

log = logging.getLogger(__name__)

_ROWS = 1 << 16  # at a time, where all are looked at


class Journal:
    """The undo journal, the touched rows and the row checksums of one store.

    Args:
        store: the open store.
        sync: wait for the disk after each append (``durability="power"``).
        fresh: the store was made just now, so all its rows are zeros.

    Attributes:
        epoch: the commit that the journal leads back to; 0 while there is none, when
            touched rows are only remembered.
        touched_address: where the bitmap of rows touched since the commit lies, a bit a row.
    """

    def __init__(self, store: RowStore, *, sync: bool, fresh: bool = False) -> None:
        if store.layout.row_bytes % 8:
            raise ValueError(f"rows of {store.layout.row_bytes} bytes; a journal needs whole words")
        self.store = store
        self.epoch = 0
        self._touched = np.zeros((store.rows + 7) // 8, np.uint8)
        self.touched_address = int(self._touched.ctypes.data)
        self._words: NDArray[np.uint64] = store.raw.view(np.uint64)
        self._undo = UndoFile(store, sync=sync)
        self._sums = RowSums(store, fresh=fresh)

    @property
    def records(self) -> int:
        """Complete records in the journal."""
        return self._undo.records

    # -- while training ----------------------------------------------------------------

    def protect(self, rows: NDArray[np.int64]) -> None:
        """Keep the old bytes of those sorted ``rows`` that are touched for the first time.

        Raises:
            OSError: the disk is full; nothing has changed.
            StoreError: a row does not match its checksum, or the folder was removed; nothing
                has changed.
        """
        from lowmem.kernels import undo

        self._undo.require_there()
        found = np.empty(rows.size, np.int64)
        fresh = found[: undo.untouched(rows, self._touched, found)]
        if fresh.size == 0:
            return
        if self.epoch:
            if self._undo.epoch != self.epoch:
                self._undo.renew(self.epoch)
            self._undo.append(self._records(fresh))
        undo.mark(fresh, self._touched)

    def _records(self, rows: NDArray[np.int64]) -> Iterator[NDArray[np.uint64]]:
        """Records of the old bytes of ``rows``, each held to its checksum."""
        from lowmem.kernels import undo

        chunk, salt = self._undo.chunk, self._undo.salt
        sums, zero = self._sums.values, self._sums.zero
        buffer = np.empty((min(chunk, rows.size), self._undo.words), np.uint64)
        for start in range(0, rows.size, chunk):
            part = rows[start : start + chunk]
            records = buffer[: part.size]
            calls = [
                (part, lo, hi, self._words, sums, zero, salt, records)
                for lo, hi in slices(part.size)
            ]
            for bad in run_parallel(undo.make_records, calls):
                if bad >= 0:
                    raise StoreError(
                        f"row {bad:,} of {self.store.path} is damaged: its bytes do not match "
                        "their checksum. Run `lowmem store verify` on the folder"
                    )
            yield records

    # -- commit ------------------------------------------------------------------------

    def refresh_sums(self) -> None:
        """Bring the checksums of all rows touched since the last commit up to date."""
        for rows in self._touched_rows():
            self._sums.refresh(rows)

    def begin(self, epoch: int) -> None:
        """Start anew after commit ``epoch``: nothing is touched, the journal is empty.

        Never fails: the commit has happened. A file that cannot be made now is made before
        the next row changes, and until then the one before tells that nothing has changed.
        """
        self.epoch = epoch
        self._undo.records = 0
        self._touched[:] = 0
        try:
            self._undo.renew(epoch)
        except OSError as error:
            log.warning("%s cannot be made yet: %s", self._undo.path, error)

    # -- coming back -------------------------------------------------------------------

    def attach(self, epoch: int) -> None:
        """Open the journal that an earlier process left, for commit ``epoch``.

        ``epoch`` 0 starts one for a store that no commit names yet.

        Raises:
            StoreError: it is missing although rows may have changed, damaged, or of
                another store.
        """
        from lowmem.kernels import undo

        self.epoch = epoch
        if epoch == 0:  # no commit names this store, so there is nothing to come back to
            self._undo.renew(epoch)
            return
        self._undo.open(epoch)
        for records in self._undo.read():
            undo.mark(records[:, 0].astype(np.int64), self._touched)

    def roll_back(self) -> int:
        """Bring every touched row back to the last commit; return how many there were.

        May be interrupted and done again: it only ever writes the bytes of the commit. The
        journal stays until :meth:`begin` or until rows are touched again.
        """
        from lowmem.kernels import undo

        for records in self._undo.read():
            undo.restore(records, self._words, self._sums.values, self._sums.zero)
        return self.records

    # -- looking -----------------------------------------------------------------------

    def damaged_rows(
        self, limit: int = 100, on_progress: Callable[[int], None] | None = None
    ) -> tuple[int, list[int]]:
        """Rows that do not match their checksums: how many, and the first ``limit``.

        Rows touched since the last commit are left out while the store is unclean: a roll
        back restores those. ``on_progress`` gets the number of rows looked at since its
        last call.
        """
        from lowmem.kernels import undo

        total = 0
        named: list[int] = []
        for first in range(0, self.store.rows, _ROWS):
            last = min(self.store.rows, first + _ROWS)
            bad = self._sums.find_damaged(first, last)
            if not self.store.header.clean:
                fresh = np.empty(bad.size, np.int64)
                bad = fresh[: undo.untouched(bad, self._touched, fresh)]
            total += bad.size
            named += bad[: max(0, limit - len(named))].tolist()
            if on_progress is not None:
                on_progress(last - first)
        return total, named

    def sums_as_bytes(self) -> tuple[int, Callable[[int, int], bytes]]:
        """The checksums of the rows as they are: the file's length and a reader of it."""
        self.refresh_sums()
        return self._sums.as_bytes()

    def _touched_rows(self) -> Iterator[NDArray[np.int64]]:
        """The touched rows, sorted, some at a time."""
        from lowmem.kernels import undo

        found, start = np.empty(_ROWS, np.int64), 0
        while start < self._touched.size:
            count, start = undo.marked(self._touched, start, found)
            if count:
                yield found[:count]

    @property
    def disk_bytes(self) -> int:
        """What the journal and the checksums take on the disk."""
        total = 0
        for path in (self._undo.path, self._sums.path):
            with contextlib.suppress(OSError):
                status = path.stat()
                total += getattr(status, "st_blocks", status.st_size // 512) * 512
        return total

    # -- the end -----------------------------------------------------------------------

    def flush(self) -> None:
        """Return when the checksums are on the disk."""
        self._sums.flush()

    def close(self) -> None:
        self._undo.close()
        self._sums.close()
        self._words = np.empty((0, 0), np.uint64)
