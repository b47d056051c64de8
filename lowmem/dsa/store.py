"""RowStore: a file of fixed-size rows, mapped into memory.

The file is one header page and then ``rows`` rows of ``layout.row_bytes`` bytes, from
byte 4,096 on.

The file is reserved in full when it is made, so that a full disk is an error at
construction and never a bus error in the middle of training.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import mmap
import os
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lowmem import interrupts
from lowmem.dsa.header import (
    HEADER_BYTES,
    SLOT_BYTES,
    Header,
    StoreError,
    read_header,
    require_fit,
    short_name,
    unclean,
)
from lowmem.dsa.history import History
from lowmem.dsa.layout import RowLayout
from lowmem.dsa.space import require_space, reserve
from lowmem.env import available_memory_bytes
from lowmem.kernels.threads import run_parallel, thread_count

log = logging.getLogger(__name__)

_POPULATE_SHARE = 0.1  # of the available memory; more dirty pages than that stall on the disk
# Of the available memory, for all stores of this process together. A step that changes one row
# in each huge page makes all of them dirty, and the system halts a writer that has more than
# its share (by default a fifth of the memory, and from half-way between a tenth and that on).
HUGE_SHARE = 0.12

_stores: weakref.WeakSet[RowStore] = weakref.WeakSet()


class RowStore:
    """An open row store; make one with :meth:`create` or :meth:`open`.

    Attributes:
        fields: ``{field name: array (rows, count)}``, views of the mapped file.
        raw: the rows as uint8, ``(rows, row_bytes)``.
        history: which training the rows come from.
    """

    def __init__(self, path: Path, file: int, header: Header, sequence: int) -> None:
        self.path = path
        self.header = header
        self.roomy = False
        # Rows that a crash left half way are like no others.
        self.history = History(header.history, header.step) if header.clean else History()
        self._sequence = sequence
        self._file = file
        self._map = mmap.mmap(file, self.file_bytes)
        data = np.frombuffer(self._map, np.uint8)[HEADER_BYTES:]
        self.raw = data.reshape(header.rows, header.layout.row_bytes)
        self.fields = header.layout.views(data, header.rows)
        self.address = int(data.ctypes.data)
        self._advise_by_memory()

    # -- making and opening ------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        rows: int,
        layout: RowLayout,
        *,
        name: str = "",
        overwrite: bool = False,
    ) -> RowStore:
        """Make a store of ``rows`` zeroed rows and reserve its whole size on the disk.

        Raises:
            FileExistsError: ``path`` exists and ``overwrite`` is false.
            OSError: too little space (needed and free bytes in the message; nothing is left
                behind), or a folder that cannot be written.
        """
        path = Path(path)
        if rows < 1:
            raise ValueError(f"a store needs at least one row, not {rows}")
        if path.exists() and not overwrite:
            raise FileExistsError(
                errno.EEXIST, 'a store is there already; open it with mode="resume"', str(path)
            )
        header = Header(uuid.uuid4().hex, rows, layout, name=short_name(name))
        size = HEADER_BYTES + rows * layout.row_bytes
        aside = path.with_name(path.name + ".new")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        file = os.open(aside, flags, 0o666)
        left = aside  # what to remove when something fails
        store = None
        try:
            require_space(path.parent, size)
            reserve(file, size, path.parent)
            os.pwrite(file, header.to_bytes(1) + bytes(SLOT_BYTES), 0)
            with interrupts.whole():
                os.replace(aside, path)
                left = path
            store = cls(path, file, header, 1)
            store._populate()
        except BaseException:
            if store is not None:
                store.close()
            else:
                os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(left)
            raise
        return store

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        rows: int | None = None,
        layout: RowLayout | None = None,
        recover: bool = False,
    ) -> RowStore:
        """Open an existing store and check that it is the expected one.

        Raises:
            FileNotFoundError: there is none.
            StoreError: damaged, truncated, of another shape or layout, or not closed
                cleanly (unless ``recover``).
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "there is no store to resume", str(path))
        header, sequence = read_header(path)
        require_fit(path, header, rows, layout)
        if not header.clean and not recover:
            raise unclean(path)
        file = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            return cls(path, file, header, sequence)
        except BaseException:
            os.close(file)
            raise

    # -- what it is --------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.header.rows

    @property
    def layout(self) -> RowLayout:
        return self.header.layout

    @property
    def file_bytes(self) -> int:
        """The file's length: one header page and the rows."""
        return HEADER_BYTES + self.header.rows * self.header.layout.row_bytes

    @property
    def disk_bytes(self) -> int:
        """What the file takes on the disk, as the file system counts it."""
        if self._file < 0:
            return 0
        status = os.fstat(self._file)
        return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size

    @property
    def closed(self) -> bool:
        return self._file < 0

    # -- header ------------------------------------------------------------------------

    def mark(self, **changes: Any) -> None:
        """Change fields of the header (``step``, ``committed_step``, ``clean``) on disk."""
        header = replace(self.header, **changes)
        sequence = self._sequence + 1
        os.pwrite(self._file, header.to_bytes(sequence), SLOT_BYTES * ((sequence + 1) % 2))
        self.header, self._sequence = header, sequence

    # -- rows --------------------------------------------------------------------------

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of the rows ``indices``, one array ``(len(indices), count)`` a field."""
        return {name: view[indices] for name, view in self.fields.items()}

    def read_bytes(self, start: int, size: int) -> bytes:
        """Bytes of the file, read past the map so that they do not count as this process's."""
        data = bytearray()
        while len(data) < size:
            part = os.pread(self._file, size - len(data), start + len(data))
            if not part:
                raise StoreError(f"{self.path} ends at byte {start + len(data):,}")
            data += part
        return bytes(data)

    def write(self, indices: np.ndarray | slice, values: Mapping[str, np.ndarray]) -> None:
        """Set whole fields of the rows ``indices``."""
        for name, array in values.items():
            self.fields[name][indices] = array

    # -- pages -------------------------------------------------------------------------

    def _advise_by_memory(self) -> None:
        """Huge pages where the store is small beside the free memory, else single pages.

        A small store will be resident anyway, and huge pages save most of the faults and
        TLB misses. A large one must not read megabytes around each row that it needs.
        """
        available = available_memory_bytes()
        others = sum(store.file_bytes for store in _stores if store.roomy and not store.closed)
        self.roomy = available is not None and others + self.file_bytes <= HUGE_SHARE * available
        _stores.add(self)
        if self.roomy:
            self._advise(getattr(mmap, "MADV_HUGEPAGE", None))
        else:
            self.advise_random()

    def _populate(self) -> None:
        """Map a new store's pages at once, where it is small and they would come one by one.

        Zeroing memory costs the same either way, as it does for a tensor of zeros; a fault
        a page on top of it makes the first steps several times slower than the later ones.
        Where the kernel maps huge pages of this file, faults are too few to matter.
        """
        from lowmem.kernels import pages

        available = available_memory_bytes()
        small = available is not None and self.file_bytes <= _POPULATE_SHARE * available
        if not (pages.AVAILABLE and self.roomy and small) or self._huge_pages_work():
            return
        size = self.raw.size
        step = 1 << 22
        parts = thread_count()
        calls = [
            (self.address, size * part // parts, size * (part + 1) // parts, step, pages.PAGE)
            for part in range(parts)
        ]
        run_parallel(pages.populate, calls)

    def _huge_pages_work(self) -> bool:
        """Whether touching pages of one aligned stretch of 2 MiB takes fewer faults than pages."""
        import resource

        huge, touches = 1 << 21, 16
        start = -self.address % huge
        if start + huge > self.raw.size:
            return False
        flat = self.raw.reshape(-1)
        before = resource.getrusage(resource.RUSAGE_SELF)
        flat[start : start + touches * mmap.PAGESIZE : mmap.PAGESIZE] = 0
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults = after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
        return faults < touches // 2

    def advise_random(self) -> None:
        """Tell the kernel to read single pages only."""
        self.roomy = False
        self._advise(getattr(mmap, "MADV_NOHUGEPAGE", None))
        self._advise(getattr(mmap, "MADV_RANDOM", None))

    def _advise(self, advice: int | None) -> None:
        if advice is not None:
            with contextlib.suppress(OSError):  # advice only: a kernel without it is no error
                self._map.madvise(advice)

    def will_need(self, rows: np.ndarray) -> None:
        """Ask the disk for the pages of the sorted ``rows`` without waiting for them."""
        from lowmem.kernels import pages

        if not pages.AVAILABLE:
            return
        parts = min(thread_count(), max(1, rows.size // 256))
        bounds = [rows.size * part // parts for part in range(parts + 1)]
        row_bytes = self.layout.row_bytes
        calls = [
            (rows, lo, hi, self.address, row_bytes, pages.PAGE, pages.MADV_WILLNEED)
            for lo, hi in itertools.pairwise(bounds)
        ]
        run_parallel(pages.advise_rows, calls)

    def evict(self) -> None:
        """Write everything back and drop the file's pages from memory: the next reads are cold."""
        self.flush()
        self._advise(getattr(mmap, "MADV_DONTNEED", None))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        """Return when every row and the header are on the disk."""
        self._map.flush()
        os.fsync(self._file)

    def close(self) -> None:
        """Unmap and close. The rows stay in the page cache and reach the disk by themselves."""
        if self._file < 0:
            return
        self.raw = np.empty((0, 0), np.uint8)
        self.fields = {}
        try:
            self._map.close()
        except BufferError:
            log.debug("views of %s are still in use; it stays mapped until they go", self.path)
        os.close(self._file)
        self._file = -1

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"RowStore({str(self.path)!r}, {self.rows:,} rows of {self.layout}, {state})"
