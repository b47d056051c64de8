"""Page advice from native code: which rows' pages are missing, and asking for them.

One system call a run of pages, issued in the order in which the kernel will touch them
and without the GIL, so that the disk sees a deep queue while Python does nothing.
Linux only: elsewhere ``AVAILABLE`` is false and the callers do without.
"""

from __future__ import annotations

import mmap
import sys

import numpy as np
from numba import njit, types

AVAILABLE = sys.platform == "linux"
PAGE = mmap.PAGESIZE

MADV_WILLNEED = 3
MADV_POPULATE_WRITE = 23

_madvise = types.ExternalFunction("madvise", types.int32(types.uintp, types.uintp, types.int32))
_mincore = types.ExternalFunction("mincore", types.int32(types.uintp, types.uintp, types.uintp))
_getrusage = types.ExternalFunction("getrusage", types.int32(types.int32, types.uintp))
_RUSAGE_THREAD = 1
# Of struct rusage, in 64-bit words; blocks are of 512 bytes, and 2**12 of them a huge page.
_RUSAGE_WORDS, _MAJOR_FAULTS, _BLOCKS_READ = 18, 9, 11


@njit(nogil=True, cache=True)
def advise_rows(rows, lo, hi, base, row_bytes, page, advice):
    """``madvise(advice)`` for the pages of the sorted ``rows[lo:hi]``, one call a run of pages.

    ``base`` is the address of row 0, ``row_bytes`` the size of a row. Returns the number of
    calls.
    """
    calls = 0
    run_start = np.int64(-1)
    run_end = np.int64(-1)
    for i in range(lo, hi):
        first = (base + rows[i] * row_bytes) // page
        last = (base + (rows[i] + 1) * row_bytes - 1) // page + 1
        if first <= run_end:
            run_end = max(run_end, last)
            continue
        if run_start >= 0:
            _madvise(
                np.uintp(run_start * page), np.uintp((run_end - run_start) * page), np.int32(advice)
            )
            calls += 1
        run_start = first
        run_end = last
    if run_start >= 0:
        _madvise(
            np.uintp(run_start * page), np.uintp((run_end - run_start) * page), np.int32(advice)
        )
        calls += 1
    return calls


@njit(nogil=True, cache=True)
def populate(base, lo, hi, step, page):
    """Map the pages of bytes ``lo:hi`` after ``base`` for writing, ``step`` bytes a call."""
    start = (base + lo) // page * page
    end = (base + hi) // page * page
    while start < end:
        size = min(step, end - start)
        if _madvise(np.uintp(start), np.uintp(size), np.int32(MADV_POPULATE_WRITE)) != 0:
            return  # an older kernel: pages come one by one
        start += size


@njit(nogil=True, cache=True)
def count_missing(rows, samples, base, row_bytes, page):
    """Of ``samples`` rows taken evenly from ``rows``, how many start in a page not in memory."""
    resident = np.zeros(1, np.uint8)
    address = np.uintp(resident.ctypes.data)
    missing = 0
    for n in range(samples):
        row = rows[n * rows.size // samples]
        start = (base + row * row_bytes) // page * page
        if _mincore(np.uintp(start), np.uintp(page), address) == 0 and resident[0] & 1 == 0:
            missing += 1
    return missing


if AVAILABLE:

    @njit(nogil=True, cache=True)
    def thread_faults():
        """Page faults of this thread that had to wait for a disk, so far.

        The kernel reads ahead of huge pages, and one fault may bring a hundred of them. So
        every huge page's worth of bytes that was read counts, too.
        """
        usage = np.zeros(_RUSAGE_WORDS, np.int64)
        _getrusage(np.int32(_RUSAGE_THREAD), np.uintp(usage.ctypes.data))
        return usage[_MAJOR_FAULTS] + (usage[_BLOCKS_READ] >> 12)

else:

    @njit(nogil=True, cache=True)
    def thread_faults():
        """0: this system does not count the faults of a thread."""
        return np.int64(0)
