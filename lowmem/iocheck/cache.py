"""Getting the page cache out of the way of a measurement, and proving that it is.

``O_DIRECT`` opens on tmpfs and on some FUSE file systems and bypasses nothing there, so
an open that succeeds proves nothing. The proof is made on the file itself: its cache is
dropped, a page is read through the descriptor under test, and ``mincore`` says whether
that left the page in memory.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import sys
from collections.abc import Callable
from typing import Literal

from .filesystem import FileSystem

Method = Literal["direct", "cache-dropped", "cached: not a disk speed"]
PAGE = 4096
ALIGNMENT = 4096

_log = logging.getLogger("lowmem.iocheck")


def sync(fd: int) -> None:
    """Data on its way to the device, by the strongest call that this system has."""
    full = None
    if sys.platform == "darwin":
        import fcntl

        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            try:
                fcntl.fcntl(fd, full)
                return
            except OSError:  # file systems without it
                pass
    getattr(os, "fdatasync", os.fsync)(fd)


def drop(fd: int, offset: int = 0, length: int = 0) -> bool:
    """Ask the system to forget a file's clean pages. False where it has no such call."""
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return False
    try:
        advise(fd, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError:
        return False
    return True


def resident_pages(fd: int, offset: int, length: int) -> int | None:
    """Pages of a file range that are in memory; ``None`` where ``mincore`` cannot be asked."""
    try:
        mincore: Callable[..., int] = ctypes.CDLL(None, use_errno=True).mincore
    except (OSError, AttributeError, TypeError):
        return None
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    span = length + offset - start
    try:
        # Copy-on-write, because ctypes asks for a buffer that may be written.
        view = mmap.mmap(fd, span, flags=mmap.MAP_PRIVATE, offset=start)
    except (OSError, ValueError, AttributeError):
        return None
    pages = -(-span // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(view)
    failed = mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(span), found)
    del first
    view.close()
    if failed:
        return None
    return sum(byte & 1 for byte in found) * (mmap.PAGESIZE // PAGE)


def open_direct(path: str, writable: bool = True) -> int | None:
    """A descriptor that bypasses the page cache, or ``None`` where the system refuses one."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | getattr(os, "O_CLOEXEC", 0)
    if sys.platform == "darwin":
        import fcntl

        fd = os.open(path, flags)
        try:
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        except OSError:
            os.close(fd)
            return None
        return fd
    direct = getattr(os, "O_DIRECT", None)
    if direct is None:
        return None
    try:
        return os.open(path, flags | direct)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
            return None
        raise


def choose_method(path: str, size: int, system: FileSystem) -> tuple[Method, str]:
    """How reads of this file can be kept honest, and a word on why.

    The file must hold data that is already on the device.
    """
    if system.kind == "ram":
        return "cached: not a disk speed", f"{system.type} is RAM"
    probe = min(size, 64 * PAGE)
    fd = os.open(path, os.O_RDWR)
    try:
        sync(fd)
        dropped = drop(fd) and resident_pages(fd, 0, probe) == 0
        unproven = not dropped and resident_pages(fd, 0, probe) is None
        reason = "O_DIRECT refused"
        direct = open_direct(path)
        if direct is not None:
            try:
                reason = _read_leaves_traces(direct, fd, probe, dropped)
            finally:
                os.close(direct)
        if not reason:
            return "direct", "proved: pages read this way do not appear in the page cache"
        if dropped:
            return "cache-dropped", reason
        if unproven and drop(fd):
            return "cache-dropped", reason + "; that the pages left memory could not be proved"
        if direct is not None and sys.platform == "darwin":
            return "direct", "F_NOCACHE, not provable on this system"
        return "cached: not a disk speed", reason + " and the cache cannot be dropped here"
    finally:
        os.close(fd)


def _read_leaves_traces(direct: int, fd: int, length: int, dropped: bool) -> str:
    """Empty when a direct read brought nothing into the page cache, else what went wrong."""
    if not hasattr(os, "preadv"):
        return "no positioned reads on this system"
    with mmap.mmap(-1, length) as buffer:
        try:
            os.preadv(direct, [memoryview(buffer)], 0)
        except OSError as error:
            return f"O_DIRECT opens, but reading fails ({error.strerror})"
    if not dropped:
        return "O_DIRECT opens, but that it bypasses the cache could not be proved"
    if resident_pages(fd, 0, length):
        return "O_DIRECT opens, but reads go through the page cache all the same"
    return ""
