"""The same steps with ``torch.optim.SparseAdam``, weights and moments in RAM."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from .batches import Batches
from .patterns import Access
from .timing import StepCost, time_steps, typical

WINDOW_BYTES = 512 << 20  # of weights and moments
_STEPS = 6  # that must fit in the time


def time_sparse_adam(
    table_rows: int,
    dim: int,
    batch: int,
    access: Access,
    seconds: float,
    memory_bytes: int,
    rng: np.random.Generator,
    should_stop: Callable[[], bool],
) -> StepCost | None:
    """Steps on as many rows as fit in ``memory_bytes``; ``None`` where not even one does.

    Where a step of the whole batch is too slow for several of them, the steps have fewer
    ids: the time per id hardly depends on their number.
    """
    begin = time.perf_counter()
    window = min(table_rows, min(WINDOW_BYTES, memory_bytes) // (12 * dim))
    if window < 1:
        return None
    batches = Batches(table_rows, window, batch, dim, access, rng)
    weights = torch.nn.Parameter(torch.empty(window, dim).fill_(0.01))
    optimizer = torch.optim.SparseAdam([weights])
    count = 1

    def step(number: int) -> None:
        # A gradient as autograd leaves it: not coalesced.
        weights.grad = torch.sparse_coo_tensor(
            batches.ids(number)[None, :count],
            batches.grads(number)[:count],
            weights.shape,
            check_invariants=False,
        )
        optimizer.step()

    step(0)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weights][name].fill_(0.01)
    count = min(len(batches), 8192)
    step(0)
    trials = []
    for number in range(2):  # the faster one: a stall must not shrink the batch
        start = time.perf_counter()
        step(number)
        trials.append(time.perf_counter() - start)
    left = max(0.0, seconds - (time.perf_counter() - begin))
    count = min(len(batches), max(count, int(count * left / _STEPS / max(1e-6, min(trials)))))
    times = time_steps(step, left, should_stop)
    middle, spread = typical(times)
    return StepCost(count, middle, batches.distinct_of(count), 0, len(times), spread=spread)
