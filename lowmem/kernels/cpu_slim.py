"""The SlimAdamW step on the CPU: one call for all tensors, each byte moved as seldom as possible.

Every tensor becomes one or more *jobs* in a table of addresses and strides
(``slim_layout`` finds them):

- plain (no axis averaged): one pass, 28 bytes a float32 element.
- row (the last axis averaged): one pass; a row of g is read twice, the second time from the
  first-level cache: 20 bytes.
- column (the first axis averaged): a pass over g for the sums, and an update pass: 24 bytes.
  A thread sums up its next job while it updates one, which takes less time than one after
  the other: reading alone does not keep the memory busy.
- mixed (axes on both sides of the kept one averaged, as in convolutions): as column, with
  the sums of a run's elements added up at the end.

Threads take parts of the work one after the other (``_divide`` cuts it, ``slim_team`` takes).
Sums run over blocks whose borders depend on the shape alone, and are added up in order. So a
result depends neither on how threads were scheduled nor on how many there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lowmem.kernels.notice import announce
from lowmem.kernels.slim_layout import (
    COLUMNS,
    JOB_SIZE,
    KIND,
    PLAIN,
    ROW,
    ROWS,
    RUN,
    SCALARS,
    SLICES,
    P,
    V,
    layout,
    moment_strides,
)  # fmt: skip
from lowmem.kernels.slim_loops import (
    SUMS,
    TASK_SIZE,
    UPDATE,
    WHAT,
    WHOLE,
    block_count,
    collect,
    slim_team,
    units,
    width,
)  # fmt: skip
from lowmem.kernels.threads import run_team, thread_count

announce(__name__, "SlimAdamW")

_ALONE = 1 << 20  # elements below which threads do not share one column job
_PART = 1 << 15  # elements below which it does not pay to cut
_PARTS = 32  # a thread, of what can be cut anywhere
_WORTH_A_THREAD = 1 << 14  # elements below which another thread costs more than it brings


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _divide(table: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Cut the work into parts that threads take one after the other, the largest first.

    A column job is one part, or a few small ones are. Plain and row jobs, and those of many
    slices, come last and are cut finely, so that all threads end together. Where a column job
    is too large for that, it is shared: it is left out here and comes back in the third array.

    Returns:
        Tasks of all parts; the parts' borders in them; the numbers of the shared jobs; how
        many parts there are of column jobs; how many sums the largest job needs.
    """
    jobs = table.shape[0]
    cost = table[:, ROWS] * table[:, COLUMNS] * table[:, RUN] * table[:, SLICES]
    kinds = table[:, KIND]
    even = (kinds == PLAIN) | (kinds == ROW) | (table[:, SLICES] > 1)  # can be cut anywhere
    order = np.argsort(-cost)
    widest = 1
    for j in range(jobs):
        if kinds[j] != PLAIN and kinds[j] != ROW:
            widest = max(widest, width(table[j]))
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
    size: Any = max(_PART, rest // (threads * _PARTS))
    tasks = np.zeros((2 * jobs + threads * _PARTS + 8, TASK_SIZE), np.int64)
    borders = np.zeros(2 * jobs + threads * _PARTS + 8, np.int64)
    filled, parts, room = 0, 0, size
    for j in order:
        if even[j] or shared[j]:
            continue
        tasks[filled] = (WHOLE, j, 0, 0, 0)
        filled += 1
        room -= cost[j]
        if room <= 0:
            parts, room = parts + 1, size
            borders[parts] = filled
    if borders[parts] < filled:
        parts, room = parts + 1, size
        borders[parts] = filled
    whole = parts
    for j in range(jobs):
        if not even[j]:
            continue
        count = units(table[j])
        each = cost[j] // count
        low: Any = np.int64(0)
        while low < count:
            step = (room + each - 1) // each
            if each == 1:  # whole cache lines
                step = (step + 63) // 64 * 64
            high: Any = min(count, low + step)
            tasks[filled] = (WHOLE, j, low, high, 0)
            filled += 1
            room -= (high - low) * each
            low = high
            if room <= 0:
                parts, room = parts + 1, size
                borders[parts] = filled
    if borders[parts] < filled:
        parts += 1
        borders[parts] = filled
    return tasks[:filled], borders[: parts + 1], np.flatnonzero(shared), whole, widest


def supports(
    param: Tensor, grad: Tensor, axes: tuple[int, ...], v_strides: tuple[int, ...] | None = None
) -> bool:
    """Whether ``slim_adamw_`` takes this parameter (or part of one) with this gradient.

    It takes float32 on the CPU in any layout that ends in runs of neighbours: contiguous,
    ``channels_last``, columns or rows of a larger tensor. It does not take tensor subclasses
    (DTensor), sparse or complex gradients. ``v_strides`` are the second moment's; without
    them it is contiguous, or laid out as the parameter is where nothing is averaged.
    """
    if v_strides is None:
        v_strides = moment_strides(tuple(param.shape), param.stride(), axes)
    return (
        param.dtype is torch.float32
        and grad.dtype is torch.float32
        and param.device.type == grad.device.type == "cpu"
        and param.layout is grad.layout is torch.strided
        and type(grad) is Tensor
        and type(param) in (Tensor, torch.nn.Parameter)
        and not (param.is_neg() or grad.is_neg())
        and param.shape == grad.shape
        and _lines(
            param.shape, param.stride(), grad.stride(), param.stride(), v_strides, tuple(axes)
        )
        is not None
    )


@lru_cache(maxsize=4096)
def _lines(*key: Any) -> np.ndarray | None:
    """A tensor's lines of the table, with offsets where addresses will stand."""
    jobs = layout(*key)
    if jobs is None:
        return None
    lines = np.zeros((len(jobs), JOB_SIZE), np.int64)
    if jobs:
        lines[:, :SCALARS] = jobs
    lines[:, P:SLICES] *= 4
    lines[:, SLICES + 1 : SCALARS] *= 4
    return lines


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
    tables = []
    addresses = []
    for number, (p, g, m, v, kept) in enumerate(
        zip(params, grads, exp_avgs, exp_avg_sqs, axes, strict=True)
    ):
        lines = _lines(p.shape, p.stride(), g.stride(), m.stride(), v.stride(), kept)
        if lines is None:
            raise ValueError(
                f"tensor {number}: moments with strides {m.stride()} and {v.stride()} do not go "
                f"with a parameter of strides {p.stride()}; lay them out as the parameter is"
            )
        tables.append(lines)
        addresses.append((p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr()))
    if tables:
        table = np.concatenate(tables)
        table[:, SCALARS] = np.repeat(np.arange(len(tables)), [len(lines) for lines in tables])
        table[:, P : V + 1] += np.array(addresses, np.int64)[table[:, SCALARS]]
        _run(table, _scalars(steps, lr, beta1, beta2, eps, weight_decay, maximize))
    # The kernel writes behind autograd's back; a backward that still needs the old weights
    # must fail as it does with every other optimizer.
    torch.autograd.graph.increment_version(params)


def _scalars(
    steps: Sequence[float],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> np.ndarray:
    count = np.array(steps, np.float64)
    scalars = np.empty((len(count), 8), np.float32)
    with np.errstate(over="ignore"):  # a huge lr is infinite in float32, as in torch
        scalars[:, :4] = 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay
        scalars[:, 4] = lr / (1 - beta1**count)
        scalars[:, 5] = np.sqrt(1 - beta2**count)
        scalars[:, 6:] = eps, -1.0 if maximize else 1.0
    return scalars


def _run(table: np.ndarray, scalars: np.ndarray) -> None:
    work = int((table[:, ROWS] * table[:, COLUMNS] * table[:, RUN] * table[:, SLICES]).sum())
    threads = max(1, min(thread_count(), work // _WORTH_A_THREAD))
    tasks, borders, shared, whole, widest = _divide(table, threads)
    sizes = [int(block_count(table[job]) * width(table[job])) for job in shared]
    room = max(sizes, default=0)
    partials = np.empty(2 * room, np.float32)
    updates = np.empty((0, TASK_SIZE), np.int64)
    arrays = [table, scalars, tasks, borders, partials]
    for turn, job in enumerate(shared):  # its sums are taken while the one before it is updated
        offset = turn % 2 * room
        sums = _shares(table[job], job, threads, offset)
        arrays[2] = np.concatenate([updates, sums])
        arrays[3] = np.arange(len(arrays[2]) + 1)
        _run_team(arrays, threads, 0, widest)
        line = scalars[table[job, SCALARS]]
        collect(table[job], line, partials[offset : offset + sizes[turn]])
        updates = sums.copy()
        updates[:, WHAT] = UPDATE
    arrays[2] = np.concatenate([updates, tasks])
    arrays[3] = np.concatenate([np.arange(len(updates)), borders + len(updates)])
    _run_team(arrays, threads, len(updates) + whole - threads, widest)


def _shares(job: np.ndarray, number: int, threads: int, offset: int) -> np.ndarray:
    """The sums of a shared job as tasks, one a part."""
    blocks = int(block_count(job))
    parts = min(blocks, 16 * threads)
    edges = [blocks * part // parts for part in range(parts + 1)]
    return np.array([(SUMS, number, *edge, offset) for edge in pairwise(edges)], np.int64)


def _run_team(arrays: Sequence[np.ndarray], threads: int, early: int, widest: int) -> None:
    parts = len(arrays[3]) - 1
    if parts < 1:
        return
    places = (number for array in arrays for number in (array.ctypes.data, len(array)))
    team = np.array([0, parts, early, widest, *places], np.int64)
    run_team(slim_team, team.ctypes.data, min(threads, parts))
