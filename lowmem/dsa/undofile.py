"""The file of an undo journal: a header, and records of rows as a commit left them.

The header counts the records that are known to be complete. A file is made aside and put in
place by one rename, so there is always a whole one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from lowmem.dsa.commits import sync_folder
from lowmem.dsa.header import StoreError
from lowmem.dsa.store import RowStore

_MAGIC = b"LMUNDO\0\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ32sI")  # magic, version, row bytes, epoch, identity, crc32
_COUNT = struct.Struct("<QI")  # complete records, crc32
_COUNT_AT = (64, 80)  # written in turn, so that a torn write leaves the other one
_HEADER_BYTES = 128
_CHUNK_BYTES = 16 << 20


class UndoFile:
    """The undo file of one store.

    Args:
        store: the open store; the file lies beside it.
        sync: wait for the disk after each append.

    Attributes:
        epoch: the commit that it leads back to; -1 while no file is open.
        records: complete records in it.
        chunk: records that are read or written at a time.
    """

    def __init__(self, store: RowStore, *, sync: bool) -> None:
        from lowmem.kernels import undo

        self.path = store.path.with_suffix(".undo")
        self.epoch = -1
        self.records = 0
        self.words = undo.RECORD_WORDS + store.layout.row_bytes // 8
        self.chunk = max(1, _CHUNK_BYTES // (self.words * 8))
        self._store = store
        self._sync = sync
        self._file = -1
        self._watched = False
        self._turn = 0

    # -- writing -----------------------------------------------------------------------

    def renew(self, epoch: int) -> None:
        """An empty file for commit ``epoch``."""
        aside = self.path.with_suffix(".undo.new")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        file = os.open(aside, flags, 0o666)
        try:
            head = _MAGIC, _VERSION, self._store.layout.row_bytes, epoch
            crc = zlib.crc32(_HEADER.pack(*head, self._identity, 0))
            page = _HEADER.pack(*head, self._identity, crc).ljust(_COUNT_AT[0], b"\0")
            page += _packed_count(0)
            write_all(file, memoryview(page.ljust(_HEADER_BYTES, b"\0")), 0)
            if self._sync:
                os.fsync(file)
            self.close()
            os.replace(aside, self.path)
            if self._sync:
                sync_folder(self.path.parent)
        except BaseException:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(aside)
            raise
        self._use(file, epoch)
        self.records = self._turn = 0

    def append(self, chunks: Iterator[NDArray[np.uint64]]) -> None:
        """Write records and then their count; what fails on the way leaves none of them."""
        at = _HEADER_BYTES + self.records * self.words * 8
        added = 0
        for records in chunks:
            write_all(self._file, records.data.cast("B"), at)
            at += records.nbytes
            added += len(records)
        if self._sync:
            getattr(os, "fdatasync", os.fsync)(self._file)
        self.records += added
        # Without a sync in between, a crash of the machine could keep the count and lose
        # the records. With one, the count is merely one step behind.
        self._turn = 1 - self._turn
        write_all(self._file, memoryview(_packed_count(self.records)), _COUNT_AT[self._turn])

    def require_there(self) -> None:
        """Raise ``StoreError`` when the open file has no name any more."""
        if self._watched and os.fstat(self._file).st_nlink == 0:
            raise StoreError(
                f"{self.path} was removed while it was in use: what is trained from here on "
                "would be lost. Start anew in a folder that stays"
            )

    # -- reading -----------------------------------------------------------------------

    def open(self, epoch: int) -> None:
        """Open what an earlier process left for commit ``epoch``, and find its sound records.

        Raises:
            StoreError: it is missing, damaged, of another store or of a later commit.
        """
        file_epoch, count = self._read_header()
        if file_epoch > epoch:
            raise StoreError(
                f"{self.path} belongs to commit {file_epoch}; the folder's last commit is "
                f"{epoch}. Parts of two folders were mixed"
            )
        if file_epoch < epoch:
            # The crash came after the commit and before the new file: nothing has changed.
            self.renew(epoch)
            return
        self._use(os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0)), file_epoch)
        self.records = self._count_sound(count)

    def read(self, count: int | None = None) -> Iterator[NDArray[np.uint64]]:
        """Whole records, some megabytes at a time, as uint64 ``(n, words)``."""
        left = self.records if count is None else count
        at = _HEADER_BYTES
        while left:
            data = os.pread(self._file, min(left, self.chunk) * self.words * 8, at)
            whole = len(data) // (self.words * 8)
            if not whole:
                return
            yield np.frombuffer(data, np.uint64, whole * self.words).reshape(whole, self.words)
            at += whole * self.words * 8
            left -= whole

    @property
    def salt(self) -> np.uint64:
        """What makes records of another store or commit unsound."""
        text = f"{self._store.header.identity}:{self.epoch}".encode()
        return np.uint64(zlib.crc32(text) << 32 | zlib.crc32(text[::-1]))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = self.epoch = -1
        self._watched = False

    @property
    def _identity(self) -> bytes:
        return self._store.header.identity.encode()[:32]

    def _use(self, file: int, epoch: int) -> None:
        self._file, self.epoch = file, epoch
        self._watched = os.fstat(file).st_nlink == 1  # some file systems always say 0

    def _read_header(self) -> tuple[int, int]:
        try:
            with open(self.path, "rb") as file:
                page = file.read(_HEADER_BYTES)
        except FileNotFoundError:
            raise StoreError(
                f"{self.path} is missing: without it {self._store.path} cannot go back to its "
                "last commit"
            ) from None
        damaged = StoreError(f"the header of {self.path} is damaged")
        if len(page) < _HEADER_BYTES:
            raise damaged
        magic, version, row_bytes, epoch, identity, crc = _HEADER.unpack_from(page)
        head = _HEADER.pack(magic, version, row_bytes, epoch, identity, 0)
        if magic != _MAGIC or crc != zlib.crc32(head):
            raise damaged
        if version != _VERSION:
            raise StoreError(
                f"{self.path} has format version {version}; this lowmem reads {_VERSION}"
            )
        if identity != self._identity:
            raise StoreError(f"{self.path} belongs to another store than {self._store.path}")
        if row_bytes != self._store.layout.row_bytes:
            raise StoreError(f"{self.path} has rows of {row_bytes} bytes")
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

        whole = (os.fstat(self._file).st_size - _HEADER_BYTES) // (self.words * 8)
        sound = 0
        for records in self.read(whole):
            good = undo.count_sound(records, self.salt, self._store.rows)
            sound += good
            if good < len(records):
                break
        if sound < complete:
            raise StoreError(
                f"record {sound:,} of {complete:,} in {self.path} is damaged or missing: "
                f"{self._store.path} cannot go back to its last commit"
            )
        return sound


def _packed_count(count: int) -> bytes:
    return _COUNT.pack(count, zlib.crc32(struct.pack("<Q", count)))


def write_all(file: int, data: memoryview, at: int) -> None:
    """``pwrite`` until everything is written; ``OSError`` when the disk is full."""
    while data:
        written = os.pwrite(file, data, at)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, at = data[written:], at + written
