"""A deep queue from one thread: linux-aio, driven by a loop that numba compiles.

The loop keeps ``depth`` requests in flight and notes each one's latency. It calls the
kernel directly (``io_setup``, ``io_submit``, ``io_getevents``), so nothing has to be
installed, and unlike io_uring it is rarely forbidden in containers.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

READ, WRITE = 0, 1

# System call numbers: setup, destroy, getevents, submit.
_CALLS = {
    ("x86_64", 64): (206, 207, 208, 209),
    ("aarch64", 64): (0, 1, 4, 2),
}

_syscall = types.ExternalFunction(
    "syscall",
    types.intp(types.intp, types.intp, types.intp, types.intp, types.intp, types.intp),
)
_clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.intp))


def supported() -> tuple[int, int, int, int] | None:
    """The system call numbers of this machine, or ``None`` where linux-aio is not there."""
    if sys.platform != "linux":
        return None
    return _CALLS.get((platform.machine(), 8 * ctypes.sizeof(ctypes.c_void_p)))


class Context:
    """An aio context of a given depth; ``OSError`` where the kernel refuses one."""

    def __init__(self, depth: int) -> None:
        numbers = supported()
        if numbers is None:
            raise OSError("linux-aio is not available on this system")
        self.depth = depth
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._libc = ctypes.CDLL(None, use_errno=True)
        handle = ctypes.c_ulong(0)
        arguments = (ctypes.c_long(depth), ctypes.byref(handle))
        if self._libc.syscall(ctypes.c_long(self._setup), *arguments) != 0:
            code = ctypes.get_errno()
            raise OSError(code, "io_setup was refused")
        self._handle = handle.value
        self._blocks = np.zeros((depth, 8), np.int64)
        self._pointers = np.zeros(1, np.int64)
        self._events = np.zeros((depth, 4), np.int64)
        self._begun = np.zeros(depth, np.int64)
        self._clock = np.zeros(2, np.int64)

    def run(
        self,
        fd: int,
        operation: int,
        offsets: NDArray[np.int64],
        buffers: NDArray[np.uint32],
        latencies: NDArray[np.int64],
        nanoseconds: int,
    ) -> tuple[int, int]:
        """Keep the queue full until the time is over or the offsets are; then drain it.

        Args:
            fd: an open file, ``O_DIRECT``.
            operation: ``READ`` or ``WRITE``.
            offsets: where to go, in bytes.
            buffers: (depth, block/4) page-aligned. For writes, each page's first word is
                changed before every write, so that no two blocks on disk are alike.
            latencies: filled with nanoseconds, one an operation.
            nanoseconds: how long new requests are made.

        Returns:
            Operations done, and the nanoseconds that took.
        """
        done, taken = _run(
            self._handle,
            self._getevents,
            self._submit,
            fd,
            operation,
            offsets,
            buffers,
            latencies,
            nanoseconds,
            self._blocks,
            self._pointers,
            self._events,
            self._begun,
            self._clock,
        )
        if done < 0:
            word = "reading" if operation == READ else "writing"
            raise OSError(-done, f"{word} the test file failed")
        return done, taken

    def close(self) -> None:
        if self._handle:
            self._libc.syscall(ctypes.c_long(self._destroy), ctypes.c_ulong(self._handle))
            self._handle = 0

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@njit(nogil=True, cache=True)
def _now(clock: Any) -> Any:
    _clock_gettime(1, clock.ctypes.data)
    return clock[0] * 1_000_000_000 + clock[1]


@njit(nogil=True, cache=True)
def _run(
    handle: Any,
    call_getevents: Any,
    call_submit: Any,
    fd: Any,
    operation: Any,
    offsets: Any,
    buffers: Any,
    latencies: Any,
    nanoseconds: Any,
    blocks: Any,
    pointers: Any,
    events: Any,
    begun: Any,
    clock: Any,
) -> Any:
    depth = blocks.shape[0]
    words = buffers.shape[1]
    total = min(offsets.shape[0], latencies.shape[0])
    for slot in range(depth):
        for word in range(8):
            blocks[slot, word] = 0
        blocks[slot, 0] = slot
        blocks[slot, 2] = operation | (fd << 32)
        blocks[slot, 3] = buffers.ctypes.data + slot * words * 4
        blocks[slot, 4] = words * 4

    start = _now(clock)
    now = start
    issued = 0
    done = 0
    error = 0
    ready = min(depth, total)  # slots events[:ready, 0] are free; at first slots 0 .. ready-1
    for slot in range(ready):
        events[slot, 0] = slot
    while True:
        free = 0
        # One call a request: a disk starts on the first one while the next is being made.
        # A batch in one call would wait until all of it is made, here a quarter slower.
        while free < ready and issued < total and error == 0 and now - start < nanoseconds:
            slot = events[free, 0]
            if operation == 1:
                for word in range(0, words, 1024):
                    buffers[slot, word] ^= (issued + 1) & 0x7FFFFF
            blocks[slot, 5] = offsets[issued]
            begun[slot] = _now(clock) if free else now
            pointers[0] = blocks.ctypes.data + slot * 64
            if _syscall(call_submit, handle, 1, pointers.ctypes.data, 0, 0) != 1:
                error = 11  # EAGAIN: the caller sees a refusal
                break
            issued += 1
            free += 1
        if issued == done:
            break
        ready = _syscall(call_getevents, handle, 1, depth, events.ctypes.data, 0)
        now = _now(clock)
        if ready < 0:
            ready = 0  # interrupted by a signal: ask again
        for index in range(ready):
            if events[index, 2] != words * 4 and error == 0:
                result = events[index, 2]
                error = -result if result < 0 else 5  # a short transfer counts as EIO
            latencies[done] = now - begun[events[index, 0]]
            done += 1
    if error != 0:
        return -error, now - start
    return done, now - start
