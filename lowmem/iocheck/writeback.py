"""What it costs a step that the system writes changed pages back.

Linux lets only so much changed data wait to be written (``vm.dirty_background_ratio`` and
``vm.dirty_ratio``). A table whose pages are all in memory and all changed, and larger than
that, is written for as long as it is trained: each page that has been written is clean, its
next change is a fault, and the page waits to be written again. When writing cannot keep up,
the system slows the writer down to it.

Pages are written in the order of the file, over and over. Let U(x) be the share of pages
that x ids leave untouched. In a round of T ids the share 1 - U(T) of the pages is changed
and must be written. A page that was written x ids ago waits again with the chance 1 - U(x),
so in the mean the share (1/T)∫(1 - U(x))dx waits. The round is as long as the system lets
pages wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lowmem import env

from .patterns import PAGE, TableAccess

_WRITE_BACK_EVERY_S = 30.0  # Linux: vm.dirty_expire_centisecs
_CHUNK = 1 << 20
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start it and do not wait for its end
_POLL_S = 5e-4


def dirtied_pages(table: TableAccess, batch: int, waiting_bytes: int) -> float:
    """Clean pages that a step of ``batch`` ids changes, with ``waiting_bytes`` unwritten.

    0 where the whole table is no more than that.
    """
    share = waiting_bytes / (table.pages * PAGE)
    if share >= 1.0:
        return 0.0
    low, high = 1e-3, 1e18  # ids of a round
    for _ in range(100):
        middle = math.sqrt(low * high)
        if _waiting_share(table, middle) < share:
            low = middle
        else:
            high = middle
    ids = high
    return batch * table.pages * (1.0 - table.untouched_pages(ids)) / ids


def _waiting_share(table: TableAccess, ids: float) -> float:
    """Mean over a round of ``ids`` ids of the share of pages that wait."""
    at = np.concatenate([[0.0], np.geomspace(1e-6, 1.0, 60)])
    touched = np.array([1.0 - table.untouched_pages(ids * part) for part in at])
    return float((touched[1:] + touched[:-1]) / 2 @ np.diff(at))


def write_back_period_s() -> float:
    """How long this system lets a page be dirty before it writes it."""
    try:
        text = Path("/proc/sys/vm/dirty_expire_centisecs").read_text()
        return max(1.0, int(text) / 100)
    except (OSError, ValueError):
        return _WRITE_BACK_EVERY_S


class Writer:
    """A thread that has the system write a file's changed pages, in order, over and over.

    It writes as many pages as it has been granted, and then waits: so steps can be timed
    with as much writing beside each as a long run would have.

    Args:
        file: descriptor of the file.
        size: bytes of it, from the first on.
        seconds: it ends by itself then, whatever became of who started it.

    Attributes:
        able: this system can be asked, has not refused, and counts the pages that it writes.
    """

    def __init__(self, file: int, size: int, seconds: float) -> None:
        self._file, self._size, self._at = os.dup(file), size, 0
        self._allowed = 0.0
        self._until = time.perf_counter() + seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._call: Any = None
        with contextlib.suppress(OSError, AttributeError, TypeError):
            self._call = ctypes.CDLL(None, use_errno=True).sync_file_range
            self._call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        self._begin = env.vmstat().get("nr_written", -1)
        self.able = self._call is not None and self._begin >= 0

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def written(self) -> int:
        """Pages written since the beginning, by everybody on this system."""
        return env.vmstat().get("nr_written", 0) - self._begin

    def grant(self, pages: float) -> None:
        """Let so many more pages be written."""
        self._allowed += pages

    def wait(self, should_stop: Callable[[], bool]) -> None:
        """Return when all that was granted is written."""
        while self.able and self.written < self._allowed and not should_stop():
            time.sleep(_POLL_S)

    def _write(self) -> None:
        try:
            while self.able and not self._done.is_set() and time.perf_counter() < self._until:
                if self.written >= self._allowed:
                    time.sleep(_POLL_S)
                elif self._call(self._file, self._at, _CHUNK, _RANGE_WRITE) != 0:
                    self.able = False
                else:
                    self._at = self._at + _CHUNK if self._at + _CHUNK < self._size else 0
        finally:
            os.close(self._file)
