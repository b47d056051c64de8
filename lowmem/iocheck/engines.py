"""One workload on one file: so many blocks in flight for so long, and every latency kept."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from . import cache
from .cache import Method

if TYPE_CHECKING:
    from .aio import Context

_log = logging.getLogger("lowmem.iocheck")

_SLICE_S = 0.25  # how long the compiled loop runs before someone may ask it to stop
MAX_OPERATIONS = 4_000_000

Engine = Literal["linux-aio", "threads"]


@dataclass(frozen=True)
class Rate:
    """What one workload reached. Latencies in microseconds."""

    operations: int
    seconds: float
    block_bytes: int
    depth: int
    latency_p50_us: float
    latency_p95_us: float
    latency_p99_us: float

    @property
    def iops(self) -> float:
        return self.operations / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.iops * self.block_bytes


class Disk:
    """A test file, opened so that ``method`` holds, and the engine that loads it."""

    def __init__(self, path: str, size: int, method: Method, pool: NDArray[np.uint32]) -> None:
        self.path, self.size, self.method, self._pool = path, size, method, pool
        fd = cache.open_direct(path) if method == "direct" else os.open(path, _buffered_flags())
        if fd is None:
            raise OSError(f"O_DIRECT on {path} was refused after it had been granted")
        self.fd = fd
        self.engine: Engine = "threads"
        if method == "direct":
            try:
                from . import aio

                with aio.Context(1):
                    self.engine = "linux-aio"
            except OSError as error:
                _log.info("linux-aio is not used: %s", error)

    def close(self) -> None:
        os.close(self.fd)

    def sync(self) -> None:
        cache.sync(self.fd)

    def measure(
        self,
        kind: Literal["read", "write"],
        block: int,
        depth: int,
        seconds: float,
        *,
        offsets: NDArray[np.int64],
        should_stop: Callable[[], bool],
        once: bool = False,
    ) -> Rate:
        """Run one workload.

        Args:
            kind: what to do.
            block: bytes an operation, a multiple of 4,096.
            depth: operations in flight.
            seconds: how long; the last operations may end later.
            offsets: where in the file, in this order, from the start again when used up.
            should_stop: asked a few times a second.
            once: end when the offsets are used up.
        """
        view, buffers = _buffers(self._pool, depth, block)
        done, spent, position = 0, 0.0, 0
        kept: list[NDArray[np.int64]] = []
        context = self._context(depth)
        try:
            while spent < seconds and not should_stop() and done < MAX_OPERATIONS:
                if position == 0 and self.method == "cache-dropped":
                    self.sync()
                    cache.drop(self.fd)
                left = min(_SLICE_S, seconds - spent)
                took, nanoseconds, latencies = self._slice(
                    context, kind, offsets[position:], buffers, int(left * 1e9)
                )
                done, spent = done + took, spent + nanoseconds / 1e9
                kept.append(latencies)
                position = position + took if position + took < len(offsets) else 0
                if took == 0 or (once and position == 0):
                    break
            if kind == "write" and self.method != "direct":
                begin = time.perf_counter()
                self.sync()  # buffered writes are not done before they are on the device
                spent += time.perf_counter() - begin
        finally:
            if context is not None:
                context.close()
            del buffers
            with contextlib.suppress(BufferError):  # an error's traceback still holds them
                view.close()
        latency = np.concatenate(kept) / 1e3 if done else np.zeros(1)
        low, middle, high = np.percentile(latency, [50, 95, 99])
        return Rate(done, spent, block, depth, float(low), float(middle), float(high))

    def _context(self, depth: int) -> Context | None:
        if self.engine != "linux-aio":
            return None
        from . import aio

        return aio.Context(depth)

    def _slice(
        self,
        context: Context | None,
        kind: Literal["read", "write"],
        offsets: NDArray[np.int64],
        buffers: NDArray[np.uint32],
        nanoseconds: int,
    ) -> tuple[int, int, NDArray[np.int64]]:
        if context is None:
            return _threads(self.fd, self.path, kind, offsets, buffers, nanoseconds)
        from . import aio

        latencies = np.empty(min(len(offsets), MAX_OPERATIONS), np.int64)
        operation = aio.READ if kind == "read" else aio.WRITE
        done, taken = context.run(self.fd, operation, offsets, buffers, latencies, nanoseconds)
        return done, taken, latencies[:done]


def _buffered_flags() -> int:
    return os.O_RDWR | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def _buffers(pool: NDArray[np.uint32], depth: int, block: int) -> tuple[mmap.mmap, NDArray]:
    """Page-aligned memory for ``depth`` blocks, filled from the pool of random data."""
    view = mmap.mmap(-1, depth * block)
    buffers = np.frombuffer(view, np.uint32).reshape(depth, block // 4)
    buffers[:] = np.resize(pool, buffers.shape)
    return view, buffers


def _threads(
    fd: int,
    path: str,
    kind: Literal["read", "write"],
    offsets: NDArray[np.int64],
    buffers: NDArray[np.uint32],
    nanoseconds: int,
) -> tuple[int, int, NDArray[np.int64]]:
    """The same with one blocking thread for every operation in flight."""
    block = buffers.shape[1] * 4
    lists: list[list[int]] = [[] for _ in buffers]
    errors: list[BaseException] = []
    lock = threading.Lock()
    counter = iter(range(len(offsets)))
    positions = offsets.tolist() if len(offsets) < 1_000_000 else offsets
    clock = time.perf_counter_ns
    go = threading.Event()
    deadline = [0]

    def worker(slot: int) -> None:
        memory = memoryview(buffers[slot]).cast("B")
        words, mine = buffers[slot], lists[slot]
        positioned = hasattr(os, "preadv")
        own = -1
        go.wait()
        try:
            own = fd if positioned else os.open(path, _buffered_flags())
            while clock() < deadline[0] and not errors:
                with lock:
                    index = next(counter, -1)
                if index < 0:
                    break
                offset = int(positions[index])
                if kind == "write":
                    words[::1024] ^= np.uint32((index + 1) & 0x7FFFFF)
                begin = clock()
                if not positioned:
                    os.lseek(own, offset, os.SEEK_SET)
                    moved = len(os.read(own, block)) if kind == "read" else os.write(own, memory)
                elif kind == "read":
                    moved = os.preadv(own, [memory], offset)
                else:
                    moved = os.pwritev(own, [memory], offset)
                mine.append(clock() - begin)
                if moved != block:
                    raise OSError(f"{kind} moved {moved} of {block} bytes at offset {offset}")
        except BaseException as error:
            errors.append(error)
        finally:
            memory.release()
            if not positioned and own >= 0:
                os.close(own)

    workers = [threading.Thread(target=worker, args=(slot,)) for slot in range(len(buffers))]
    for thread in workers:
        thread.start()
    begin = clock()
    deadline[0] = begin + nanoseconds
    try:
        go.set()
        for thread in workers:
            thread.join()
    finally:
        # On Ctrl-C, too: no thread may use the descriptor after the caller has closed it.
        taken = clock() - begin
        deadline[0] = 0
        go.set()
        for thread in workers:
            thread.join()
    if errors:
        raise errors[0]
    return sum(map(len, lists)), taken, np.array([x for xs in lists for x in xs], np.int64)
