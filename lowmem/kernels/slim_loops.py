"""The loops of the SlimAdamW step on the CPU; ``cpu_slim`` says what they do and who calls them.

``job`` is a line of the table: ``slim_layout.Job`` with addresses in the place of offsets, and
the number of its line of scalars last. ``s`` is that line: 1 − β1, β2, 1 − β2, the decay factor,
the step size, the root of the second bias correction, ε, and −1 to maximize, else 1.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import carray, types

from lowmem.kernels.native import pointer, take_next
from lowmem.kernels.slim_layout import COLUMN, LONG, MIXED, PLAIN, ROW

# Sums may be reordered and multiplications fused; NaN and infinities count as in torch.
_JIT: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},
}
# Without sums there is nothing to gain from reordering: (1 − β2)·g·g is small where g·g overflows.
_IN_ORDER = {**_JIT, "fastmath": {"contract", "nsz", "arcp"}}
_LONG_BLOCK = 16_384  # elements summed in one go
_MAX_BLOCKS = 64  # a column job has at most this many partial sums
WHOLE, SUMS, UPDATE = range(3)  # what a task does with its job


@numba.njit(**_JIT)
def _floats(address: int, size: int) -> np.ndarray:
    return carray(pointer(address), (size,), np.float32)


@numba.njit(**_JIT)
def _sum_of_squares(g: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(g.size):
        total += g[i] * g[i]
    return total


@numba.njit(**_JIT)
def _second_moment(v: np.float32, mean: np.float32, s: np.ndarray) -> np.float32:
    return s[1] * v + s[2] * mean


@numba.njit(**_JIT)
def _large_second_moment(
    v: np.float32, g: np.ndarray, columns: int, stride: int, run: int, s: np.ndarray
) -> np.float32:
    """The same where the sum of squares is beyond float32, from g itself, in float64."""
    total = np.float64(0)
    for column in range(columns):
        for i in range(column * stride, column * stride + run):
            total += np.float64(g[i]) * np.float64(g[i])
    mean = total / (np.float64(columns) * np.float64(run))
    return np.float32(np.float64(s[1]) * np.float64(v) + np.float64(s[2]) * mean)


@numba.njit(**_JIT)
def _scale(v: np.float32, s: np.ndarray) -> np.float32:
    """What the first moment is multiplied by: the step size over Adam's denominator."""
    return s[4] / (np.float32(math.sqrt(v)) / s[5] + s[6])


@numba.njit(**_JIT)
def _update_run(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, scale: np.float32, s: np.ndarray
) -> None:
    """Update a run of elements that share one second moment."""
    weight, decay, sign = s[0], s[3], s[7]
    for i in range(p.size):
        moment = m[i] + weight * (sign * g[i] - m[i])
        m[i] = moment
        p[i] = p[i] * decay - scale * moment


@numba.njit(**_JIT)
def _update_run_and_sum(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    scale: np.float32,
    s: np.ndarray,
    following: np.ndarray,
) -> np.float32:
    """``_update_run``, and on the way the sum of squares of the gradient that follows.

    Reading that one here keeps the memory busy: sums alone wait for it half of the time.
    """
    weight, decay, sign = s[0], s[3], s[7]
    total = np.float32(0)
    for i in range(p.size):
        moment = m[i] + weight * (sign * g[i] - m[i])
        m[i] = moment
        p[i] = p[i] * decay - scale * moment
        total += following[i] * following[i]
    return total


@numba.njit(**_JIT)
def _update_across(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, scales: np.ndarray, s: np.ndarray
) -> None:
    """Update a row in which each element has a second moment of its own."""
    weight, decay, sign = s[0], s[3], s[7]
    for i in range(p.size):
        moment = m[i] + weight * (sign * g[i] - m[i])
        m[i] = moment
        p[i] = p[i] * decay - scales[i] * moment


@numba.njit(**_IN_ORDER)
def _update_plain(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, s: np.ndarray
) -> None:
    weight, beta2, rest2, decay, step, root, eps, sign = (
        s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7],
    )  # fmt: skip
    for i in range(p.size):
        gradient = sign * g[i]
        moment = m[i] + weight * (gradient - m[i])
        square = beta2 * v[i] + rest2 * gradient * gradient
        m[i] = moment
        v[i] = square
        denominator = np.float32(math.sqrt(square)) / root + eps
        p[i] = p[i] * decay - step * moment / denominator


@numba.njit(**_JIT)
def _add_squares_of_rows(g: np.ndarray, stride: int, low: int, high: int, sums: np.ndarray) -> None:
    """``sums`` plus the column sums of g² over rows ``low`` to ``high``, eight rows at a time."""
    n = sums.size
    row = low
    while row + 8 <= high:
        a = g[row * stride : row * stride + n]
        b = g[(row + 1) * stride : (row + 1) * stride + n]
        c = g[(row + 2) * stride : (row + 2) * stride + n]
        d = g[(row + 3) * stride : (row + 3) * stride + n]
        e = g[(row + 4) * stride : (row + 4) * stride + n]
        f = g[(row + 5) * stride : (row + 5) * stride + n]
        h = g[(row + 6) * stride : (row + 6) * stride + n]
        k = g[(row + 7) * stride : (row + 7) * stride + n]
        for i in range(n):
            sums[i] += (
                (a[i] * a[i] + b[i] * b[i]) + (c[i] * c[i] + d[i] * d[i])
            ) + ((e[i] * e[i] + f[i] * f[i]) + (h[i] * h[i] + k[i] * k[i]))  # fmt: skip
        row += 8
    while row < high:
        a = g[row * stride : row * stride + n]
        for i in range(n):
            sums[i] += a[i] * a[i]
        row += 1


@numba.njit(**_JIT)
def _add_squares_of_runs(
    g: np.ndarray, job: np.ndarray, low: int, high: int, sums: np.ndarray
) -> None:
    """The same for MIXED: one sum a column, over the runs of rows ``low`` to ``high``."""
    run, stride, step = job[3], job[9], job[13]
    for row in range(low, high):
        for column in range(sums.size):
            start = row * stride + column * step
            sums[column] += _sum_of_squares(g[start : start + run])


@numba.njit(**_JIT)
def _extent(rows: int, row_stride: int, columns: int, column_stride: int, run: int) -> int:
    return (rows - 1) * row_stride + (columns - 1) * column_stride + run


@numba.njit(**_JIT)
def _arrays(job: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parameter, gradient and first moment of a job, each from its first to its last element."""
    rows, columns, run = job[1], job[2], job[3]
    mixed = job[0] == MIXED
    p = _floats(job[4], _extent(rows, job[8], columns, job[12] if mixed else 1, run))
    g = _floats(job[5], _extent(rows, job[9], columns, job[13] if mixed else 1, run))
    m = _floats(job[6], _extent(rows, job[10], columns, job[14] if mixed else 1, run))
    return p, g, m


@numba.njit(**_JIT)
def _block_size(job: np.ndarray) -> int:
    """Rows (of LONG: elements) whose squares make one partial sum. Depends on the shape alone."""
    if job[0] == LONG:
        return _LONG_BLOCK
    share = (job[1] + _MAX_BLOCKS - 1) // _MAX_BLOCKS
    return max(64, (share + 7) // 8 * 8)


@numba.njit(**_JIT)
def block_count(job: np.ndarray) -> int:
    size = _block_size(job)
    return ((job[2] if job[0] == LONG else job[1]) + size - 1) // size


@numba.njit(**_JIT)
def width(job: np.ndarray) -> int:
    """How many second moments a job has that needs sums first."""
    return 1 if job[0] == LONG else job[2]


@numba.njit(**_JIT)
def _block_sums(job: np.ndarray, g: np.ndarray, block: int, sums: np.ndarray) -> None:
    size = _block_size(job)
    low = block * size
    if job[0] == LONG:
        sums[0] = _sum_of_squares(g[low : min(low + size, job[2])])
        return
    sums[:] = np.float32(0)
    high = min(low + size, job[1])
    if job[0] == COLUMN:
        _add_squares_of_rows(g, job[9], low, high, sums)
    else:
        _add_squares_of_runs(g, job, low, high, sums)


@numba.njit(**_JIT)
def _finish_moments(job: np.ndarray, s: np.ndarray, totals: np.ndarray) -> None:
    """Sums of g² become the new second moments; ``totals`` then holds the scales."""
    count = np.float32(job[2] if job[0] == LONG else job[1] * job[3])
    step = job[11]
    v = _floats(job[7], (totals.size - 1) * step + 1)
    for i in range(totals.size):
        if totals[i] == np.inf:
            g = _arrays(job)[1]
            if job[0] == LONG:
                square = _large_second_moment(v[i * step], g, 1, 0, job[2], s)
            else:
                first = i * (job[13] if job[0] == MIXED else 1)
                square = _large_second_moment(v[i * step], g[first:], job[1], job[9], job[3], s)
        else:
            square = _second_moment(v[i * step], totals[i] / count, s)
        v[i * step] = square
        totals[i] = _scale(square, s)


@numba.njit(**_JIT)
def _update_block(
    job: np.ndarray,
    s: np.ndarray,
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    block: int,
    scales: np.ndarray,
) -> None:
    """Update one block: eight rows forwards, then the eight before them, and so on.

    Backwards, because the end of g is the part that is still in the cache; forwards within
    eight rows, because that is what the hardware fetches ahead.
    """
    size = _block_size(job)
    low = block * size
    n = job[2]
    if job[0] == LONG:
        high = min(low + size, n)
        _update_run(p[low:high], g[low:high], m[low:high], scales[0], s)
        return
    high = min(low + size, job[1])
    for start in range(low + (high - 1 - low) // 8 * 8, low - 1, -8):
        for row in range(start, min(start + 8, high)):
            a, b, c = row * job[8], row * job[9], row * job[10]
            if job[0] == COLUMN:
                _update_across(p[a : a + n], g[b : b + n], m[c : c + n], scales, s)
            else:
                _update_runs(p[a:], g[b:], m[c:], job, scales, s)


@numba.njit(**_JIT)
def _update_runs(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, job: np.ndarray, scales: np.ndarray, s: np.ndarray
) -> None:
    """MIXED: update one row, each run of it with its column's scale."""
    run = job[3]
    for column in range(job[2]):
        a, b, c = column * job[12], column * job[13], column * job[14]
        _update_run(p[a : a + run], g[b : b + run], m[c : c + run], scales[column], s)


@numba.njit(**_JIT)
def _rows(job: np.ndarray, s: np.ndarray, low: int, high: int) -> None:
    """PLAIN and ROW: rows ``low`` to ``high``; of a single row, elements."""
    n = job[2]
    p, g, m = _arrays(job)
    if job[0] == PLAIN:
        v = _floats(job[7], _extent(job[1], job[11], n, 1, 1))
        if job[1] == 1:
            _update_plain(p[low:high], g[low:high], m[low:high], v[low:high], s)
            return
        for row in range(low, high):
            a, b, c, d = row * job[8], row * job[9], row * job[10], row * job[11]
            _update_plain(p[a : a + n], g[b : b + n], m[c : c + n], v[d : d + n], s)
        return
    v = _floats(job[7], (job[1] - 1) * job[11] + 1)
    count = np.float32(n)
    # Each turn updates one row and sums the next. The first one updates nothing of ours, so
    # that every row is summed by the same instructions, whichever row a thread starts with.
    nothing = np.zeros(3 * n, np.float32)
    pr, gr, mr, scale = nothing[:n], nothing[n : 2 * n], nothing[2 * n :], np.float32(0)
    for row in range(low, high + 1):
        b = min(row, high - 1) * job[9]
        total = _update_run_and_sum(pr, gr, mr, scale, s, g[b : b + n])
        if row < high:
            a, c, d = row * job[8], row * job[10], row * job[11]
            if total == np.inf:
                square = _large_second_moment(v[d], g[b : b + n], 1, 0, n, s)
            else:
                square = _second_moment(v[d], total / count, s)
            v[d] = square
            scale = _scale(square, s)
            pr, gr, mr = p[a : a + n], g[b : b + n], m[c : c + n]


@numba.njit(**_JIT)
def work_through(
    table: np.ndarray, scalars: np.ndarray, tasks: np.ndarray, partials: np.ndarray
) -> None:
    """One thread's tasks: (what, job, low, high), one a line."""
    widest = 1
    for t in range(tasks.shape[0]):
        if tasks[t, 0] == WHOLE:
            widest = max(widest, width(table[tasks[t, 1]]))
    sums = np.empty(widest, np.float32)
    totals = np.empty(widest, np.float32)
    for t in range(tasks.shape[0]):
        what, low, high = tasks[t, 0], tasks[t, 2], tasks[t, 3]
        job = table[tasks[t, 1]]
        s = scalars[job[15]]
        if job[0] == PLAIN or job[0] == ROW:
            _rows(job, s, low, high)
            continue
        p, g, m = _arrays(job)
        n = width(job)
        if what == SUMS:
            for block in range(low, high):
                _block_sums(job, g, block, partials[block * n : (block + 1) * n])
        elif what == UPDATE:
            for block in range(high - 1, low - 1, -1):
                _update_block(job, s, p, g, m, block, partials[:n])
        else:
            blocks = block_count(job)
            total = totals[:n]
            total[:] = np.float32(0)
            for block in range(blocks):
                part = sums[:n]
                _block_sums(job, g, block, part)
                for i in range(n):
                    total[i] += part[i]
            _finish_moments(job, s, total)
            for block in range(blocks - 1, -1, -1):
                _update_block(job, s, p, g, m, block, total)


@numba.njit(**_JIT)
def collect(table: np.ndarray, scalars: np.ndarray, number: int, partials: np.ndarray) -> None:
    """Add up the partial sums of a shared job, in order, and leave the scales in the first."""
    job = table[number]
    n = width(job)
    total = partials[:n]
    for block in range(1, block_count(job)):
        part = partials[block * n : (block + 1) * n]
        for i in range(n):
            total[i] += part[i]
    _finish_moments(job, scalars[job[15]], total)


@numba.cfunc(types.void(types.voidptr), nopython=True, cache=True, error_model="numpy")
def slim_team(team_address: int) -> None:
    """Take one part after the other until none is left; any number of threads may call it.

    ``team``: the next part (counted up here), how many there are, and address and length of
    the table, the scalars, the tasks, the borders of the parts in them, and the partial sums.
    """
    team = carray(team_address, (12,), np.int64)
    table = carray(pointer(team[2]), (team[3], 16), np.int64)
    scalars = carray(pointer(team[4]), (team[5], 8), np.float32)
    tasks = carray(pointer(team[6]), (team[7], 4), np.int64)
    bounds = carray(pointer(team[8]), (team[9],), np.int64)
    partials = carray(pointer(team[10]), (team[11],), np.float32)
    while True:
        part = take_next(team.ctypes.data)
        if part >= team[1]:
            break
        work_through(table, scalars, tasks[bounds[part] : bounds[part + 1]], partials)
