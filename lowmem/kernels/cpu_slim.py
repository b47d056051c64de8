"""The SlimAdamW step on the CPU: one call for all tensors, each byte moved as seldom as possible.

Every tensor becomes one or more *jobs* in a table of addresses and strides
(``slim_layout`` finds them):

- plain (no axis averaged): one pass, 28 bytes a float32 element.
- row (the last axis averaged): one pass; a row of g is read twice, the second time from the
  first-level cache: 20 bytes.
- column (the first axis averaged): a pass over g for the sums, eight rows at a time, then an
  update pass that walks the rows backwards, because the tail of g is still in the cache:
  24 bytes, less what the cache saves.
- mixed (axes on both sides of the kept one averaged, as in convolutions): as column, with
  short runs in the place of elements.

Threads take parts of the work one after the other (``_divide`` cuts it, ``slim_team`` takes).
Sums run over blocks whose borders depend on the shape alone, and are added up in order. So a
result depends neither on how threads were scheduled nor on how many there were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lowmem.kernels.slim_layout import PLAIN, ROW, Job, layout
from lowmem.kernels.slim_loops import (
    SUMS,
    UPDATE,
    WHOLE,
    block_count,
    collect,
    slim_team,
    width,
)
from lowmem.kernels.threads import run_team, thread_count

_ALONE = 1 << 20  # elements below which threads do not share one column job
_PART = 1 << 15  # elements below which it does not pay to cut
_WORTH_A_THREAD = 1 << 14  # elements below which another thread costs more than it brings
_NOTHING = np.empty(0, np.float32)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _divide(table: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the work into parts that threads take one after the other, the largest first.

    A column job is one part, or a few small ones are. Plain and row jobs come last and are
    cut finely, so that all threads end together. Where a column job is too large for that,
    it is shared: it is left out here and comes back in the third array.

    Returns:
        Tasks of all parts; the parts' borders in them; the numbers of the shared jobs.
    """
    jobs = table.shape[0]
    cost = table[:, 1] * table[:, 2] * table[:, 3]
    even = (table[:, 0] == PLAIN) | (table[:, 0] == ROW)  # can be cut anywhere
    order = np.argsort(-cost)
    shared = np.zeros(jobs, np.bool_)
    load = np.zeros(threads, np.int64)
    while True:
        load[:] = 0
        rest: Any = np.int64(0)
        largest = -1
        for j in order:
            if not shared[j]:
                rest += cost[j]
                if not even[j]:
                    largest = j if largest < 0 else largest
                    load[np.argmin(load)] += cost[j]
        if largest < 0 or cost[largest] < _ALONE or load.max() * threads <= rest * 1.03:
            break
        shared[largest] = True
    size: Any = max(_PART, rest // (threads * 8))
    tasks = np.empty((2 * jobs + threads * 8 + 8, 4), np.int64)
    bounds = np.zeros(2 * jobs + threads * 8 + 8, np.int64)
    filled, parts, room = 0, 0, size
    for j in order:
        if even[j] or shared[j]:
            continue
        tasks[filled] = (WHOLE, j, 0, 0)
        filled += 1
        room -= cost[j]
        if room <= 0:
            parts, room = parts + 1, size
            bounds[parts] = filled
    for j in range(jobs):
        if not even[j]:
            continue
        flat = table[j, 0] == PLAIN and table[j, 1] == 1
        units = table[j, 2] if flat else table[j, 1]
        each = 1 if flat else table[j, 2]
        low: Any = np.int64(0)
        while low < units:
            step = (room + each - 1) // each
            if flat:  # whole cache lines
                step = (step + 63) // 64 * 64
            high: Any = min(units, low + step)
            tasks[filled] = (WHOLE, j, low, high)
            filled += 1
            room -= (high - low) * each
            low = high
            if room <= 0:
                parts, room = parts + 1, size
                bounds[parts] = filled
    if bounds[parts] < filled:
        parts += 1
        bounds[parts] = filled
    return tasks[:filled], bounds[: parts + 1], np.flatnonzero(shared)


def supports(param: Tensor, grad: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether ``slim_adamw_`` takes this parameter (or part of one) with this gradient.

    It takes float32 on the CPU in any layout that ends in runs of neighbours: contiguous,
    ``channels_last``, columns or rows of a larger tensor. It does not take tensor subclasses
    (DTensor), sparse or complex gradients.
    """
    return (
        param.dtype is torch.float32
        and grad.dtype is torch.float32
        and param.device.type == grad.device.type == "cpu"
        and param.layout is grad.layout is torch.strided
        and type(grad) is Tensor
        and type(param) in (Tensor, torch.nn.Parameter)
        and not (param.is_neg() or grad.is_neg())
        and param.shape == grad.shape
        and _jobs(param, grad, param, None, axes) is not None
    )


def _jobs(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor | None, axes: tuple[int, ...]
) -> tuple[Job, ...] | None:
    shape = tuple(param.shape)
    if exp_avg_sq is not None:
        v_strides = exp_avg_sq.stride()
    elif axes:
        kept = [1 if i in {a % len(shape) for a in axes} else n for i, n in enumerate(shape)]
        v_strides = tuple(math.prod(kept[i + 1 :]) for i in range(len(kept)))
    else:
        v_strides = param.stride()
    return layout(shape, param.stride(), grad.stride(), exp_avg.stride(), v_strides, axes)


def slim_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    axes: Sequence[tuple[int, ...]],
    steps: Sequence[float],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """One AdamW step in place, with the second moment averaged along ``axes``.

    The lists have one entry a parameter, or a part of one (a view). All tensors are float32 on
    the CPU; pairs of parameter and gradient must pass ``supports``.

    Args:
        params, grads, exp_avgs: Tensors of one shape each.
        exp_avg_sqs: The same with size 1 along the averaged axes.
        axes: The averaged axes of each; ``()`` for plain AdamW.
        steps: The count of each, this step included (1 in the first).
    """
    table = []
    scalars = np.empty((len(params), 8), np.float32)
    decay = 1 - lr * weight_decay
    sign = -1.0 if maximize else 1.0
    for number, (p, g, m, v, kept) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, axes, strict=True)
    ):
        jobs = _jobs(p, g, m, v, kept)
        if jobs is None:
            raise ValueError(
                f"tensor {number}: moments with strides {m.stride()} and {v.stride()} do not go "
                f"with a parameter of strides {p.stride()}; lay them out as the parameter is"
            )
        step = steps[number]
        scalars[number] = (
            1 - beta1,
            beta2,
            1 - beta2,
            decay,
            lr / (1 - beta1**step),
            math.sqrt(1 - beta2**step),
            eps,
            sign,
        )
        pa, ga, ma, va = p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()
        for j in jobs:
            table.append(
                (*j[:4], pa + 4 * j.p, ga + 4 * j.g, ma + 4 * j.m, va + 4 * j.v, *j[8:], number)
            )
    if table:
        _run(np.array(table, np.int64), scalars)
    # The kernel writes behind autograd's back; a backward that still needs the old weights
    # must fail as it does with every other optimizer.
    torch.autograd.graph.increment_version(params)


def _run(table: np.ndarray, scalars: np.ndarray) -> None:
    work = int((table[:, 1] * table[:, 2] * table[:, 3]).sum())
    threads = max(1, min(thread_count(), work // _WORTH_A_THREAD))
    tasks, bounds, shared = _divide(table, threads)
    _run_tasks(table, scalars, tasks, bounds, _NOTHING, threads)
    for number in shared:
        _run_shared(table, scalars, number, threads)


def _run_shared(table: np.ndarray, scalars: np.ndarray, number: int, threads: int) -> None:
    """A column job by all threads: sums of its blocks, then updates of its blocks."""
    blocks = int(block_count(table[number]))
    partials = np.empty(blocks * int(width(table[number])), np.float32)
    parts = min(blocks, 4 * threads)
    edges = [blocks * part // parts for part in range(parts + 1)]
    bounds = np.arange(parts + 1)
    tasks = np.array([(SUMS, number, *edge) for edge in pairwise(edges)], np.int64)
    _run_tasks(table, scalars, tasks, bounds, partials, threads)
    collect(table, scalars, number, partials)
    tasks = tasks[::-1].copy()  # the last sums are still in the cache
    tasks[:, 0] = UPDATE
    _run_tasks(table, scalars, tasks, bounds, partials, threads)


def _run_tasks(
    table: np.ndarray,
    scalars: np.ndarray,
    tasks: np.ndarray,
    bounds: np.ndarray,
    partials: np.ndarray,
    threads: int,
) -> None:
    parts = len(bounds) - 1
    if parts < 1:
        return
    arrays = (table, scalars, tasks, bounds, partials)
    team = np.array([0, parts, *(n for a in arrays for n in (a.ctypes.data, len(a)))], np.int64)
    run_team(slim_team, team.ctypes.data, min(threads, parts))
