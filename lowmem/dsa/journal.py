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
import errno
import logging
import os
import struct
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lowmem.dsa.commits import sync_folder
from lowmem.dsa.store import RowStore, StoreError, reserve
from lowmem.kernels.threads import run_parallel, thread_count

log = logging.getLogger(__name__)

_MAGIC = b"LMUNDO\0\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ32sI")  # magic, version, row bytes, epoch, identity, crc32
_COUNT = struct.Struct("<QI")  # complete records, crc32
_COUNT_AT = (64, 80)  # written in turn, so that a torn write leaves the other one
_HEADER_BYTES = 128
_CHUNK_BYTES = 16 << 20


class Journal:
    """The undo journal, the touched rows and the row checksums of one store.

    Args:
        store: the open store.
        sync: wait for the disk after each append (``durability="power"``).
        fresh: the store was made just now, so all its rows are zeros.

    Attributes:
        epoch: the commit that the journal leads back to; 0 while there is none, when
            touched rows are only remembered.
        records: complete records in the journal.
        touched_address: where the bitmap of rows touched since the commit lies, a bit a row.
    """

    def __init__(self, store: RowStore, *, sync: bool, fresh: bool = False) -> None:
        if store.layout.row_bytes % 8:
            raise ValueError(f"rows of {store.layout.row_bytes} bytes; a journal needs whole words")
        self.store = store
        self.epoch = 0
        self.records = 0
        self._sync = sync
        self._undo_path = store.path.with_suffix(".undo")
        self._sums_path = store.path.with_suffix(".sums")
        self._file = -1
        self._file_epoch = -1
        self._touched = np.zeros((store.rows + 7) // 8, np.uint8)
        self.touched_address = int(self._touched.ctypes.data)
        self._words: NDArray[np.uint64] = store.raw.view(np.uint64)
        self._zero = _zero_hash(store.layout.row_bytes)
        self._sums = self._open_sums(fresh)
        self._watched = False
        self._turn = 0

    # -- while training ----------------------------------------------------------------

    def protect(self, rows: NDArray[np.int64]) -> None:
        """Keep the old bytes of those sorted ``rows`` that are touched for the first time.

        Raises:
            OSError: the disk is full; nothing has changed.
            StoreError: a row does not match its checksum, or the folder was removed; nothing
                has changed.
        """
        from lowmem.kernels import undo

        if self._watched and os.fstat(self._file).st_nlink == 0:
            raise StoreError(
                f"{self._undo_path} was removed while it was in use: what is trained from here "
                "on would be lost. Start anew in a folder that stays"
            )
        found = np.empty(rows.size, np.int64)
        fresh = found[: undo.untouched(rows, self._touched, found)]
        if fresh.size == 0:
            return
        if self.epoch:
            if self._file_epoch != self.epoch:
                self._new_file()
            self._append(fresh)
        undo.mark(fresh, self._touched)

    def _append(self, rows: NDArray[np.int64]) -> None:
        from lowmem.kernels import undo

        words = undo.RECORD_WORDS + self._words.shape[1]
        chunk = max(1, _CHUNK_BYTES // (words * 8))
        buffer = np.empty((min(chunk, rows.size), words), np.uint64)
        at = _HEADER_BYTES + self.records * words * 8
        for start in range(0, rows.size, chunk):
            part = rows[start : start + chunk]
            records = buffer[: part.size]
            calls = [
                (part, lo, hi, self._words, self._sums, self._zero, self._salt, records)
                for lo, hi in _slices(part.size)
            ]
            for bad in run_parallel(undo.make_records, calls):
                if bad >= 0:
                    raise StoreError(
                        f"row {bad:,} of {self.store.path} is damaged: its bytes do not match "
                        "their checksum. Run `lowmem store verify` on the folder"
                    )
            write_all(self._file, records.data.cast("B"), at)
            at += records.nbytes
        if self._sync:
            _data_sync(self._file)
        self.records += rows.size
        # Without a sync in between, a crash of the machine could keep the count and lose
        # the records. With one, the count is merely one step behind.
        self._write_count()

    # -- commit ------------------------------------------------------------------------

    def refresh_sums(self) -> None:
        """Bring the checksums of all rows touched since the last commit up to date."""
        from lowmem.kernels import undo

        for rows in self._touched_rows():
            self.store.will_need(rows)
            calls = [
                (rows, lo, hi, self._words, self._zero, self._sums) for lo, hi in _slices(rows.size)
            ]
            run_parallel(undo.hash_rows, calls)

    def begin(self, epoch: int) -> None:
        """Start anew after commit ``epoch``: nothing is touched, the journal is empty.

        Never fails: the commit has happened. A file that cannot be made now is made before
        the next row changes, and until then the one before tells that nothing has changed.
        """
        self.epoch = epoch
        self.records = 0
        self._touched[:] = 0
        try:
            self._new_file()
        except OSError as error:
            log.warning("%s cannot be made yet: %s", self._undo_path, error)

    def _new_file(self) -> None:
        """An empty journal, put in place by one rename, so that there is always a whole one."""
        aside = self._undo_path.with_suffix(".undo.new")
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0))
        try:
            head = _MAGIC, _VERSION, self.store.layout.row_bytes, self.epoch
            identity = self.store.header.identity.encode()[:32]
            crc = zlib.crc32(_HEADER.pack(*head, identity, 0))
            page = _HEADER.pack(*head, identity, crc).ljust(_COUNT_AT[0], b"\0")
            page += _packed_count(0)
            write_all(file, memoryview(page.ljust(_HEADER_BYTES, b"\0")), 0)
            if self._sync:
                os.fsync(file)
            self._close_file()
            os.replace(aside, self._undo_path)
            if self._sync:
                sync_folder(self._undo_path.parent)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        self._use(file, self.epoch)
        self.records = self._turn = 0

    def _use(self, file: int, epoch: int) -> None:
        self._file, self._file_epoch = file, epoch
        self._watched = os.fstat(file).st_nlink == 1  # some file systems always say 0

    # -- coming back -------------------------------------------------------------------

    def attach(self, epoch: int) -> None:
        """Open the journal that an earlier process left, for commit ``epoch``.

        ``epoch`` 0 starts one for a store that no commit names yet.

        Raises:
            StoreError: it is missing although rows may have changed, damaged, or of
                another store.
        """
        self.epoch = epoch
        if epoch == 0:  # no commit names this store, so there is nothing to come back to
            self._new_file()
            return
        file_epoch, count = self._read_header()
        if file_epoch > epoch:
            raise StoreError(
                f"{self._undo_path} belongs to commit {file_epoch}; the folder's last commit is "
                f"{epoch}. Parts of two folders were mixed"
            )
        if file_epoch < epoch:
            # The crash came after the commit and before the new journal: nothing has changed.
            self._new_file()
            return
        self._use(os.open(self._undo_path, os.O_RDWR | getattr(os, "O_BINARY", 0)), file_epoch)
        self.records = self._count_sound(count)
        from lowmem.kernels import undo

        for records in self._read_records():
            undo.mark(records[:, 0].astype(np.int64), self._touched)

    def roll_back(self) -> int:
        """Bring every touched row back to the last commit; return how many there were.

        May be interrupted and done again: it only ever writes the bytes of the commit. The
        journal stays until :meth:`begin` or until rows are touched again.
        """
        from lowmem.kernels import undo

        for records in self._read_records():
            undo.restore(records, self._words, self._sums, self._zero)
        return self.records

    def _read_header(self) -> tuple[int, int]:
        try:
            with open(self._undo_path, "rb") as file:
                page = file.read(_HEADER_BYTES)
        except FileNotFoundError:
            raise StoreError(
                f"{self._undo_path} is missing: without it {self.store.path} cannot go back to "
                "its last commit"
            ) from None
        damaged = StoreError(f"the header of {self._undo_path} is damaged")
        if len(page) < _HEADER_BYTES:
            raise damaged
        magic, version, row_bytes, epoch, identity, crc = _HEADER.unpack_from(page)
        head = _HEADER.pack(magic, version, row_bytes, epoch, identity, 0)
        if magic != _MAGIC or crc != zlib.crc32(head):
            raise damaged
        if version != _VERSION:
            raise StoreError(
                f"{self._undo_path} has format version {version}; this lowmem reads {_VERSION}"
            )
        if identity != self.store.header.identity.encode()[:32]:
            raise StoreError(f"{self._undo_path} belongs to another store than {self.store.path}")
        if row_bytes != self.store.layout.row_bytes:
            raise StoreError(f"{self._undo_path} has rows of {row_bytes} bytes")
        counts = [_COUNT.unpack_from(page, at) for at in _COUNT_AT]
        sound = [
            (count, turn)
            for turn, (count, crc) in enumerate(counts)
            if _packed_count(count) == _COUNT.pack(count, crc)
        ]
        if not sound:
            raise damaged
        count, self._turn = max(sound)
        return epoch, count

    def _count_sound(self, complete: int) -> int:
        """Number of sound records; damage among the ``complete`` ones is an error."""
        from lowmem.kernels import undo

        words = undo.RECORD_WORDS + self._words.shape[1]
        whole = (os.fstat(self._file).st_size - _HEADER_BYTES) // (words * 8)
        sound = 0
        for records in self._read_records(whole):
            good = undo.count_sound(records, self._salt, self.store.rows)
            sound += good
            if good < len(records):
                break
        if sound < complete:
            raise StoreError(
                f"record {sound:,} of {complete:,} in {self._undo_path} is damaged or missing: "
                f"{self.store.path} cannot go back to its last commit"
            )
        return sound

    def _read_records(self, count: int | None = None):  # type: ignore[no-untyped-def]
        """Whole records from the file, some megabytes at a time, as uint64 ``(n, words)``."""
        from lowmem.kernels import undo

        words = undo.RECORD_WORDS + self._words.shape[1]
        left = self.records if count is None else count
        chunk = max(1, _CHUNK_BYTES // (words * 8))
        at = _HEADER_BYTES
        while left:
            take = min(left, chunk)
            data = os.pread(self._file, take * words * 8, at)
            records = np.frombuffer(data[: len(data) // (words * 8) * words * 8], np.uint64)
            if records.size == 0:
                return
            yield records.reshape(-1, words)
            at += records.nbytes
            left -= len(records.reshape(-1, words))

    # -- checksums ---------------------------------------------------------------------

    def damaged_rows(
        self, limit: int = 100, on_progress: Callable[[int], None] | None = None
    ) -> tuple[int, list[int]]:
        """Rows that do not match their checksums: how many, and the first ``limit``.

        Rows touched since the last commit are left out while the store is unclean: a roll
        back restores those. ``on_progress`` gets the number of rows looked at since its
        last call.
        """
        from lowmem.kernels import undo

        rows = self.store.rows
        found = np.empty(rows if rows < 1 << 16 else 1 << 16, np.int64)
        total = 0
        named: list[int] = []
        for first in range(0, rows, found.size):
            last = min(rows, first + found.size)
            count = undo.find_damaged(first, last, self._words, self._zero, self._sums, found)
            bad = found[:count]
            if not self.store.header.clean:
                fresh = np.empty(bad.size, np.int64)
                bad = fresh[: undo.untouched(bad, self._touched, fresh)]
            total += bad.size
            named += bad[: max(0, limit - len(named))].tolist()
            if on_progress is not None:
                on_progress(last - first)
        return total, named

    def _open_sums(self, fresh: bool) -> NDArray[np.uint64]:
        """The file of checksums, mapped; made of the rows as they are where there is none."""
        path, size, shape = self._sums_path, self.store.rows * 8, (self.store.rows,)
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists():
            if path.stat().st_size != size:
                raise StoreError(
                    f"{path} is {path.stat().st_size:,} bytes long, not {size:,}. "
                    'mode="resume-unclean" makes it anew from the rows as they are'
                )
            return np.memmap(path, np.uint64, "r+", shape=shape)
        aside = path.with_suffix(".sums.new")
        try:
            with open(aside, "wb") as file:
                reserve(file.fileno(), size, path.parent)
            sums = np.memmap(aside, np.uint64, "r+", shape=shape)
            if not fresh:
                self._hash_all(sums)
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        return sums

    def sums_as_bytes(self) -> tuple[int, Callable[[int, int], bytes]]:
        """The checksums of the rows as they are: the file's length and a reader of it."""
        self.refresh_sums()
        flat = self._sums.view(np.uint8)
        return flat.size, lambda start, size: flat[start : start + size].tobytes()

    def _hash_all(self, sums: NDArray[np.uint64]) -> None:
        from lowmem.kernels import undo

        for start in range(0, self.store.rows, 1 << 16):
            rows = np.arange(start, min(self.store.rows, start + (1 << 16)), dtype=np.int64)
            calls = [(rows, lo, hi, self._words, self._zero, sums) for lo, hi in _slices(rows.size)]
            run_parallel(undo.hash_rows, calls)

    def _touched_rows(self):  # type: ignore[no-untyped-def]
        """The touched rows, sorted, at most 512 Ki at a time."""
        step = 1 << 16
        for start in range(0, self._touched.size, step):
            part = self._touched[start : start + step]
            if part.any():
                bits = np.unpackbits(part, bitorder="little")
                yield np.flatnonzero(bits).astype(np.int64) + start * 8

    # -- the end -----------------------------------------------------------------------

    def flush(self) -> None:
        """Return when the checksums are on the disk."""
        if isinstance(self._sums, np.memmap):
            self._sums.flush()

    def close(self) -> None:
        self._close_file()
        self._words = np.empty((0, 0), np.uint64)
        self._sums = np.empty(0, np.uint64)

    @property
    def disk_bytes(self) -> int:
        """What the journal and the checksums take on the disk."""
        total = 0
        for path in (self._undo_path, self._sums_path):
            with contextlib.suppress(OSError):
                status = path.stat()
                total += getattr(status, "st_blocks", status.st_size // 512) * 512
        return total

    @property
    def _salt(self) -> np.uint64:
        text = f"{self.store.header.identity}:{self.epoch}".encode()
        return np.uint64(zlib.crc32(text) << 32 | zlib.crc32(text[::-1]))

    def _write_count(self) -> None:
        self._turn = 1 - self._turn
        write_all(self._file, memoryview(_packed_count(self.records)), _COUNT_AT[self._turn])

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = self._file_epoch = -1
        self._watched = False


def _packed_count(count: int) -> bytes:
    return _COUNT.pack(count, zlib.crc32(struct.pack("<Q", count)))


def _zero_hash(row_bytes: int) -> np.uint64:
    from lowmem.kernels import undo

    return np.uint64(undo.row_hash(np.zeros(row_bytes // 8, np.uint64)))


def _slices(size: int) -> list[tuple[int, int]]:
    parts = min(thread_count(), max(1, size // 256))
    return [(size * n // parts, size * (n + 1) // parts) for n in range(parts)]


def _data_sync(file: int) -> None:
    getattr(os, "fdatasync", os.fsync)(file)


def write_all(file: int, data: memoryview, at: int) -> None:
    """``pwrite`` until everything is written; ``OSError`` when the disk is full."""
    while data:
        written = os.pwrite(file, data, at)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, at = data[written:], at + written
