"""RowStore: a file of fixed-size rows, mapped into memory.

The file is one header page and then ``rows`` rows of ``layout.row_bytes`` bytes, from
byte 4,096 on. The header page holds two copies of the header, each with a sequence
number and a checksum of its own, written in turn: a torn write leaves the other one.
Nothing in a file is executed, and every size is checked before memory is reserved.

The file is reserved in full when it is made, so that a full disk is an error at
construction and never a bus error in the middle of training.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import mmap
import os
import re
import shutil
import struct
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lowmem.dsa import interrupts
from lowmem.dsa.history import History
from lowmem.dsa.layout import RowLayout
from lowmem.env import available_memory_bytes
from lowmem.kernels.threads import run_parallel, thread_count

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
FORMAT_VERSION = 1
_MAGIC = b"LMROWST\0"
_SLOT_BYTES = 2048
_PREFIX = struct.Struct("<8sIIIQ")  # magic, version, payload bytes, crc32 of what follows, sequence
_POPULATE_SHARE = 0.1  # of the available memory; more dirty pages than that stall on the disk
_NAME_BYTES = 200  # of a name in the header; six times as many where JSON must escape them
_OTHER_TABLE = (
    "Pass the table that it was made for, choose another directory=, or start anew with "
    'mode="overwrite"'
)
_UNNAMED = re.compile("parameter [0-9]+")
_HUGE_SHARE = 0.25  # of the available memory; above it, huge pages would fight the page cache


class StoreError(OSError):
    """A row store that is not what it should be: the message says what, and the way out."""


@dataclass(frozen=True)
class Header:
    """What a store says of itself.

    ``step`` is right while ``clean``; ``journaled`` says that every change of a row since the
    folder's commit has its old bytes in the undo journal, and ``boot`` names the start of the
    machine that must not have ended since for that to hold (empty: it may have). ``history``
    names the training that the rows at ``step`` come from.
    """

    identity: str
    rows: int
    layout: RowLayout
    step: int = 0
    committed_step: int = 0
    clean: bool = False
    journaled: bool = False
    name: str = ""
    boot: str = ""
    history: str = ""

    def to_bytes(self, sequence: int) -> bytes:
        payload = json.dumps(
            {
                "identity": self.identity,
                "rows": self.rows,
                "layout": self.layout.to_json(),
                "step": self.step,
                "committed_step": self.committed_step,
                "clean": self.clean,
                "journaled": self.journaled,
                "name": short_name(self.name),
                "boot": self.boot,
                "history": self.history,
            }
        ).encode()
        if len(payload) > _SLOT_BYTES - _PREFIX.size:
            raise ValueError(f"{self.layout} is too long for a store's header")
        checksum = zlib.crc32(struct.pack("<Q", sequence) + payload)
        prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(payload), checksum, sequence)
        return (prefix + payload).ljust(_SLOT_BYTES, b"\0")

    @classmethod
    def from_json(cls, fields: Any) -> Header:
        if not isinstance(fields, Mapping):
            raise ValueError("the header is not a table of fields")
        layout = RowLayout.from_json(fields.get("layout"))
        numbers = [fields.get(key) for key in ("rows", "step", "committed_step")]
        if any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers) or numbers[0] == 0:
            raise ValueError(f"rows, step and committed_step are {numbers}")
        identity, name = fields.get("identity"), fields.get("name")
        boot, history = fields.get("boot", ""), fields.get("history", "")
        clean, journaled = fields.get("clean"), fields.get("journaled")
        if not isinstance(identity, str) or not isinstance(name, str):
            raise ValueError("identity or name is no text")
        if not isinstance(boot, str) or not isinstance(history, str):
            raise ValueError("boot or history is no text")
        if not identity.isascii() or not 0 < len(identity) <= 32:
            raise ValueError(f"identity {identity!r:.40} is not up to 32 plain letters")
        if not history.isascii() or len(history) > 32:
            raise ValueError(f"history {history!r:.40} is not up to 32 plain letters")
        if type(clean) is not bool or type(journaled) is not bool:
            raise ValueError("a flag is neither true nor false")
        rows, step, committed = (int(n) for n in numbers if n is not None)
        return cls(identity, rows, layout, step, committed, clean, journaled, name, boot, history)


def short_name(name: str) -> str:
    """``name`` as a header keeps it: cut, and marked with …, where it is long."""
    if len(name.encode("utf-8", "replace")) <= _NAME_BYTES:
        return name
    cut = name.encode("utf-8", "replace")[: _NAME_BYTES - len("…".encode())]
    return cut.decode("utf-8", "ignore") + "…"


def require_name(path: Path, header: Header, label: str) -> None:
    """Raise ``StoreError`` when the store was made for a parameter of another name.

    Parameters without names, which are called by their number, fit any. What wrappers of a
    model put into its names (``module.``, ``_orig_mod.``) makes no other name.
    """
    if not header.name or _UNNAMED.fullmatch(header.name) or _UNNAMED.fullmatch(label):
        return
    ours, theirs = _unwrapped(label), _unwrapped(header.name)
    if short_name(ours) == theirs or short_name(label) == short_name(header.name):
        return
    # A cut name that lost a wrapper has room for more of itself.
    if theirs.endswith("…") and ours.startswith(theirs[:-1]):
        return
    raise StoreError(
        f"{path} was made for {header.name}; the parameter here is {label}. Pass the same "
        "parameters in the same order; where they have new names only, pass them without names"
    )


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part not in ("module", "_orig_mod")]
    return ".".join(parts)


def read_header(path: str | os.PathLike[str]) -> tuple[Header, int]:
    """The header of the file at ``path`` and its sequence number.

    Where one of the two copies is damaged, the other one may be a write behind: such a store
    counts as not closed cleanly.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: not a row store, of a newer format version, or damaged.
    """
    with open(path, "rb") as file:
        page = file.read(HEADER_BYTES)
    found: list[tuple[int, Header]] = []
    faults: list[str] = []
    for start in (0, _SLOT_BYTES):
        slot = page[start : start + _SLOT_BYTES]
        if len(slot) < _SLOT_BYTES or not slot.strip(b"\0"):
            continue
        magic, version, size, checksum, sequence = _PREFIX.unpack_from(slot)
        if magic != _MAGIC:
            faults.append("it does not start like one")
            continue
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{path} has store format version {version}; this lowmem reads version "
                f"{FORMAT_VERSION}. Update lowmem to read it"
            )
        payload = slot[_PREFIX.size : _PREFIX.size + size]
        if len(payload) != size or zlib.crc32(struct.pack("<Q", sequence) + payload) != checksum:
            faults.append("the checksum of its header does not match")
            continue
        try:
            found.append((sequence, Header.from_json(json.loads(payload))))
        except (ValueError, RecursionError) as error:
            faults.append(str(error))
    if not found:
        raise StoreError(
            f"{path} is not a sound row store: {'; '.join(faults) or 'it has no header'}"
        )
    sequence, header = max(found, key=lambda pair: pair[0])
    if [number for number, _ in sorted(found, key=lambda pair: pair[0])] != (
        [1] if sequence == 1 else [sequence - 1, sequence]
    ):
        log.warning("%s: one of the two copies of its header is damaged", path)
        header = replace(header, clean=False)
    return header, sequence


def require_fit(path: Path, header: Header, rows: int | None, layout: RowLayout | None) -> None:
    """Raise ``StoreError`` unless the file is whole and holds ``rows`` rows of ``layout``."""
    if rows is not None and header.rows != rows:
        raise StoreError(
            f"{path} holds {header.rows:,} rows; the parameter has {rows:,}. {_OTHER_TABLE}"
        )
    if layout is not None and header.layout != layout:
        raise StoreError(
            f"{path} has rows of {header.layout}; the parameter needs {layout}. {_OTHER_TABLE}"
        )
    expected = HEADER_BYTES + header.rows * header.layout.row_bytes
    actual = path.stat().st_size
    if actual != expected:
        raise StoreError(
            f"{path} is {actual:,} bytes long; its header says {expected:,}. "
            "It was truncated or copied in part"
        )


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
        file = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0))
        left = aside  # what to remove when something fails
        store = None
        try:
            require_space(path.parent, size)
            reserve(file, size, path.parent)
            os.pwrite(file, header.to_bytes(1) + bytes(_SLOT_BYTES), 0)
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
        os.pwrite(self._file, header.to_bytes(sequence), _SLOT_BYTES * ((sequence + 1) % 2))
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
        self.roomy = available is not None and self.file_bytes <= _HUGE_SHARE * available
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


def unclean(path: Path) -> StoreError:
    return StoreError(
        f"{path} was not closed cleanly, and there is no commit to go back to. Start anew "
        'with mode="overwrite", or take it as it is with mode="resume-unclean"'
    )


def require_space(folder: Path, needed: int) -> None:
    """Raise ``OSError`` with both figures when ``folder`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the store needs {needed:,} bytes and {free:,} are free; choose another "
            "directory= or fewer rows",
            str(folder),
        )


def reserve(file: int, size: int, folder: Path) -> None:
    """Give the file ``size`` bytes of the disk, so that writing to its map cannot fail."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(file, size)
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            require_space(folder, size)
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            # Some network file systems cannot reserve. Writing zeros is the honest way.
            zeros = bytes(1 << 20)
            for start in range(0, size, len(zeros)):
                part = zeros[: size - start]
                if os.pwrite(file, part, start) < len(part):
                    require_space(folder, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            return
        raise OSError(
            error.errno, f"{error.strerror} while reserving {size:,} bytes", str(folder)
        ) from error
