"""The threads that CPU kernels run on.

Numba's own ``parallel=True`` is not used: its threading layers either abort the process
when two Python threads call at once, or after a fork, and they keep a second set of
spinning workers beside torch's. Instead:

* :func:`run_team` runs a native job on torch's own OpenMP threads. Those still spin for a
  moment after a backward pass: a thread of ours would have to wait for a core that they
  hold, and one of theirs starts at once. Where torch has no OpenMP, the pool serves.
* :func:`run_parallel` calls numba functions, which release the GIL, on a small pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Protocol

import torch

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_key: tuple[int, int] = (0, 0)


def thread_count() -> int:
    """How many threads a kernel uses: what torch uses, so ``torch.set_num_threads`` rules both."""
    return max(1, torch.get_num_threads())


def _get_pool(workers: int) -> ThreadPoolExecutor:
    global _pool, _pool_key
    key = (os.getpid(), workers)  # a forked child has no threads of its parent's pool
    with _lock:
        if _pool is None or _pool_key != key:
            _pool = ThreadPoolExecutor(workers, thread_name_prefix="lowmem-kernel")
            _pool_key = key
        return _pool


def run_parallel(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call ``function(*call)`` for every call, the first one in this thread, and wait for all.

    Results come in the order of ``calls``. If any call raises, the error is raised after
    every call has ended, so no thread still writes when the caller goes on.
    """
    if len(calls) == 1:
        return [function(*calls[0])]
    pool = _get_pool(max(1, thread_count() - 1))
    try:
        futures = [pool.submit(function, *call) for call in calls[1:]]
    except RuntimeError:
        # The interpreter is ending: Python's pools are closed before finalizers run.
        return [function(*call) for call in calls]
    try:
        first = function(*calls[0])
    finally:
        for future in futures:
            future.exception()
    return [first, *(future.result() for future in futures)]


class NativeJob(Protocol):
    """A numba ``cfunc`` of one pointer: its address, and a way to call it without the GIL."""

    address: int
    ctypes: Callable[[int], None]


def run_team(function: NativeJob, address: int, threads: int) -> None:
    """Call the native ``function`` with its job's address on so many threads; wait for all.

    The function shares the work out by itself, so that fewer threads than asked for do.
    """
    if threads == 1:
        function.ctypes(address)
        return
    gomp = _torch_openmp()
    # OpenMP's threads do not survive a fork; the child would wait for them for ever.
    if gomp is not None and os.getpid() == _PID:
        gomp.GOMP_parallel(function.address, address, threads, 0)
    else:
        run_parallel(function.ctypes, [(address,)] * threads)


_PID = os.getpid()


@cache
def _torch_openmp() -> ctypes.CDLL | None:
    """The GNU OpenMP library that torch loaded, or ``None``."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        paths = {line.split()[-1] for line in file if "libgomp" in line.rsplit("/", 1)[-1]}
        torch_folder = os.path.dirname(torch.__file__)
        # A second copy, of another package, has threads of its own.
        for path in sorted(paths, key=lambda path: not path.startswith(torch_folder)):
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                pointer = ctypes.c_void_p
                library.GOMP_parallel.argtypes = [pointer, pointer, ctypes.c_uint, ctypes.c_uint]
                library.GOMP_parallel.restype = None
                return library
    return None
