"""What a process and its disk did meanwhile: faults, bytes, memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_SECTOR = 512


@dataclass
class Usage:
    """Sums over some steps. Bytes as ``/proc/self/io`` counts them: what went to the device.

    One ``getrusage`` call a reading, so that it can stand beside a step of microseconds.
    """

    major_faults: int = 0
    minor_faults: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    @classmethod
    def now(cls) -> Usage:
        if resource is None:
            return cls()
        now = resource.getrusage(resource.RUSAGE_SELF)
        return cls(now.ru_majflt, now.ru_minflt, now.ru_inblock * _SECTOR, now.ru_oublock * _SECTOR)

    def add(self, before: Usage, after: Usage) -> None:
        for one in fields(self):
            change = getattr(after, one.name) - getattr(before, one.name)
            setattr(self, one.name, getattr(self, one.name) + change)


class Device:
    """``/proc/diskstats`` of the device below a folder.

    Attributes:
        known: the system counts this device's traffic; where not, ``bytes`` gives zeros.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        number = os.stat(folder).st_dev
        self._number = f"{os.major(number)} {os.minor(number)}" if hasattr(os, "major") else ""
        self.known = self._find() is not None

    def bytes(self) -> tuple[int, int]:
        """Bytes read from and written to the device so far, by everybody."""
        return self._find() or (0, 0)

    def _find(self) -> tuple[int, int] | None:
        try:
            for line in Path("/proc/diskstats").read_text().splitlines():
                words = line.split()
                if " ".join(words[:2]) == self._number:
                    return int(words[5]) * _SECTOR, int(words[9]) * _SECTOR
        except (OSError, ValueError, IndexError):
            pass
        return None


def anonymous_bytes() -> int:
    """Bytes of this process in memory that belong to no file: RSS without cached file pages."""
    try:
        with open("/proc/self/statm") as file:
            words = file.read().split()
        return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def mapped_bytes(addresses: Sequence[int]) -> int:
    """Bytes in memory of the mappings that hold these addresses; each mapping counts once."""
    total, inside = 0, False
    try:
        with open("/proc/self/smaps") as file:
            for line in file:
                first = line.split(maxsplit=1)[0]
                if not first.endswith(":"):
                    low, _, high = first.partition("-")
                    inside = any(int(low, 16) <= at < int(high, 16) for at in addresses)
                elif inside and first == "Rss:":
                    total += int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
    return total


def trim() -> None:
    """Give memory that is free inside this process back to the system, where glibc can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def take_back(size: int) -> None:
    """Touch ``size`` bytes of memory that nobody uses, in huge pages, and give them up again.

    A virtual machine that lends its free memory to its host gets it back page by page at the
    first touch, some microseconds for each 4 KiB. Whoever has to take it back, and whoever
    finds memory that somebody just gave up, is chance; after this all find it at hand.
    Private memory on purpose: shared anonymous memory comes in single pages, which the system
    takes from elsewhere.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    with mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE) as area:
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(area, np.uint8)[:: mmap.PAGESIZE] = 1


@dataclass
class Held:
    """What ``holding`` found."""

    bytes: int = 0


@contextlib.contextmanager
def holding() -> Iterator[Held]:
    """The memory, file pages apart, that is held at the end and was not at the beginning."""
    held = Held()
    trim()
    before = anonymous_bytes()
    yield held
    trim()
    held.bytes = max(0, anonymous_bytes() - before)


@dataclass
class PeakMemory:
    """Context: the most anonymous memory in use meanwhile, beyond what was in use before."""

    interval: float = 0.001
    bytes: int = 0
    _before: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        self._before = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval):
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, anonymous_bytes() - self._before)
