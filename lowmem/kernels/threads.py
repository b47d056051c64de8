"""One small thread pool for every CPU kernel.

The kernels are numba functions that release the GIL, each called on a slice of the
work. Numba's own ``parallel=True`` is not used: its threading layers either abort the
process when two Python threads call at once, or after a fork, and they keep a second
set of spinning workers beside torch's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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
    futures = [pool.submit(function, *call) for call in calls[1:]]
    try:
        first = function(*calls[0])
    finally:
        for future in futures:
            future.exception()
    return [first, *(future.result() for future in futures)]
