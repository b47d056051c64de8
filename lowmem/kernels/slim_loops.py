"""The jobs of the SlimAdamW step on the CPU; ``cpu_slim`` says what they do and who calls them.

``job`` is a line of the table, with the places that ``slim_layout`` names. ``s`` is its line of
scalars: 1 − β1, β2, 1 − β2, the decay factor, the step size, the root of the second bias
correction, ε, and −1 to maximize, else 1.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numba import carray, types

from lowmem.kernels.native import pointer, take_next
from lowmem.kernels.notice import announce
from lowmem.kernels.slim_layout import (
    COLUMN,
    COLUMNS,
    G_ROW,
    G_SLICE,
    JOB_SIZE,
    KIND,
    LONG,
    M_ROW,
    M_SLICE,
    MIXED,
    P_ROW,
    P_SLICE,
    PLAIN,
    ROW,
    ROWS,
    RUN,
    SCALARS,
    SLICES,
    V_SLICE,
    V_STEP,
    G,
    M,
    P,
    V,
)  # fmt: skip
from lowmem.kernels.slim_rows import (
    JIT,
    LEFT,
    SUMS_SIZE,
    begin_sums,
    finish_sums,
    sum_of_squares,
    update_across,
    update_plain,
    update_run,
)

announce(__name__, "SlimAdamW")

_LONG_BLOCK = 16_384  # elements summed in one go
_MAX_BLOCKS = 64  # a column job has at most this many partial sums

# A task: what to do, with which job, from where to where, and where its partial sums begin.
# From and to are rows (of a single row, elements) where rows go each for itself, slices where
# there are any, and blocks of SUMS and UPDATE.
WHOLE, SUMS, UPDATE = range(3)
WHAT, JOB, LOW, HIGH, OFFSET, TASK_SIZE = range(6)
# What all threads share: the next part (counted up), how many there are, before which one a
# part may be taken early, elements that a thread needs for sums; then address and length of
# the table, the scalars, the tasks, the borders of the parts in them, and the partial sums.
(
    NEXT, PARTS, EARLY, WIDEST, TABLE, JOBS, LINES, LINE_COUNT, TASKS, TASK_COUNT,
    BORDERS, BORDER_COUNT, PARTIALS, PARTIALS_SIZE, TEAM_SIZE,
) = range(15)  # fmt: skip


@numba.njit(**JIT)
def _floats(address: int, size: int) -> np.ndarray:
    return carray(pointer(address), (size,), np.float32)


@numba.njit(**JIT)
def _address(array: np.ndarray) -> int:
    """The address of an array that somebody else keeps alive."""
    return np.int64(array.ctypes.data)  # type: ignore[return-value]


@numba.njit(**JIT)
def _k(s: np.ndarray) -> tuple[np.float32, np.float32, np.float32]:
    return s[0], s[3], s[7]


@numba.njit(**JIT)
def block_size(job: np.ndarray) -> int:
    """Rows (of LONG: elements) whose squares make one partial sum. Depends on the shape alone."""
    if job[KIND] == LONG:
        return _LONG_BLOCK
    share = (job[ROWS] + _MAX_BLOCKS - 1) // _MAX_BLOCKS
    return max(64, (share + 7) // 8 * 8)


@numba.njit(**JIT)
def block_count(job: np.ndarray) -> int:
    size = block_size(job)
    return ((job[COLUMNS] if job[KIND] == LONG else job[ROWS]) + size - 1) // size


@numba.njit(**JIT)
def width(job: np.ndarray) -> int:
    """How many sums a job needs before its second moments are known."""
    return 1 if job[KIND] == LONG else job[COLUMNS] * job[RUN]


@numba.njit(**JIT)
def units(job: np.ndarray) -> int:
    """Into how many pieces a job may be cut that is not shared block by block."""
    if job[SLICES] > 1:
        return job[SLICES]
    return job[COLUMNS] if job[KIND] == PLAIN and job[ROWS] == 1 else job[ROWS]


@numba.njit(**JIT)
def _moment(
    v: np.float32, total: np.float32, count: int, g: int, rows: int, stride: int, run: int,
    s: np.ndarray,
) -> np.float32:  # fmt: skip
    """The new second moment from the sum of g² over ``rows`` runs from ``g`` on."""
    if total != np.inf:
        return s[1] * v + s[2] * (total / np.float32(count))
    exact = np.float64(0)  # the sum is beyond float32: from g itself, in float64
    for row in range(rows):
        values = _floats(g + row * stride, run)
        for i in range(run):
            exact += np.float64(values[i]) * np.float64(values[i])
    mean = exact / np.float64(count)
    return np.float32(np.float64(s[1]) * np.float64(v) + np.float64(s[2]) * mean)


@numba.njit(**JIT)
def _scale(v: np.float32, s: np.ndarray) -> np.float32:
    """What the first moment is multiplied by: the step size over Adam's denominator."""
    return s[4] / (np.float32(math.sqrt(v)) / s[5] + s[6])


@numba.njit(**JIT)
def _rows(job: np.ndarray, s: np.ndarray, low: int, high: int) -> None:
    """PLAIN and ROW: rows ``low`` to ``high``; of a single row of PLAIN, elements."""
    n, last = job[COLUMNS], high - 1
    p, g, m, v = job[P], job[G], job[M], job[V]
    if job[KIND] == PLAIN:
        if job[ROWS] == 1:
            p, g, m, v = p + 4 * low, g + 4 * low, m + 4 * low, v + 4 * low
            update_plain(p, g, m, v, p, g, m, v, high - low, s)
            return
        for row in range(low, high):
            a, b = row, min(row + 1, last)
            update_plain(
                p + a * job[P_ROW], g + a * job[G_ROW], m + a * job[M_ROW], v + a * job[V_STEP],
                p + b * job[P_ROW], g + b * job[G_ROW], m + b * job[M_ROW], v + b * job[V_STEP],
                n, s,
            )  # fmt: skip
        return
    for row in range(low, high):
        a, b = row, min(row + 1, last)
        gradient = g + a * job[G_ROW]
        total = sum_of_squares(gradient, g + b * job[G_ROW], n)
        moment = _floats(v + a * job[V_STEP], 1)
        moment[0] = _moment(moment[0], total, n, gradient, 1, 0, n, s)
        update_run(
            p + a * job[P_ROW], gradient, m + a * job[M_ROW],
            p + b * job[P_ROW], g + b * job[G_ROW], m + b * job[M_ROW],
            n, _scale(moment[0], s), _k(s),
        )  # fmt: skip


@numba.njit(**JIT)
def _begin(job: np.ndarray, later: np.ndarray, low: int, high: int, part: int, total: int) -> None:
    """``later`` becomes the sums of blocks ``low`` to ``high`` of COLUMN or MIXED."""
    size = block_size(job)
    rows = min(high * size, job[ROWS]) - low * size
    g = job[G] + low * size * job[G_ROW]
    begin_sums(later, g, job[G_ROW], width(job), rows, size, part, total)


@numba.njit(**JIT)
def _long_sum(job: np.ndarray, block: int) -> np.float32:
    low = block * _LONG_BLOCK
    g = job[G] + 4 * low
    count = min(_LONG_BLOCK, job[COLUMNS] - low)
    return sum_of_squares(g, g + 4 * count, count)


@numba.njit(**JIT)
def _sum(job: np.ndarray, later: np.ndarray, part: int, total: int) -> None:
    """All sums of a job, alone."""
    if job[KIND] == LONG:
        sums = _floats(total, 1)
        sums[0] = np.float32(0)
        for block in range(block_count(job)):
            sums[0] += _long_sum(job, block)
    else:
        _begin(job, later, 0, block_count(job), part, total)
        finish_sums(later)


@numba.njit(**JIT)
def _finish_moments(job: np.ndarray, s: np.ndarray, address: int) -> None:
    """Sums of g² become the new second moments; ``address`` then holds each element's scale."""
    totals = _floats(address, width(job))
    if job[KIND] == LONG:
        v = _floats(job[V], 1)
        v[0] = _moment(v[0], totals[0], job[COLUMNS], job[G], 1, 0, job[COLUMNS], s)
        totals[0] = _scale(v[0], s)
        return
    run, rows = job[RUN], job[ROWS]
    for column in range(job[COLUMNS]):
        first = column * run
        total = totals[first]
        for i in range(first + 1, first + run):
            total += totals[i]
        v = _floats(job[V] + column * job[V_STEP], 1)
        v[0] = _moment(v[0], total, rows * run, job[G] + 4 * first, rows, job[G_ROW], run, s)
        totals[first : first + run] = _scale(v[0], s)


@numba.njit(**JIT)
def _update(
    job: np.ndarray, s: np.ndarray, low: int, high: int, scales: int, later: np.ndarray
) -> None:
    """Update blocks ``low`` to ``high``, and sum up ``later`` on the way."""
    size, n = block_size(job), width(job)
    p, g, m = job[P], job[G], job[M]
    if job[KIND] == LONG:
        scale = _floats(scales, 1)[0]
        for block in range(low, high):
            at = 4 * block * size
            count = min(size, job[COLUMNS] - block * size)
            after = at + 4 * count
            update_run(p + at, g + at, m + at, p + after, g + after, m + after, count, scale, _k(s))
        return
    rows = min(high * size, job[ROWS])
    for row in range(low * size, rows):
        a, b = row, min(row + 1, rows - 1)
        update_across(
            p + a * job[P_ROW], g + a * job[G_ROW], m + a * job[M_ROW],
            p + b * job[P_ROW], g + b * job[G_ROW], m + b * job[M_ROW],
            n, scales, _k(s), later,
        )  # fmt: skip


@numba.njit(**JIT)
def _slices(
    job: np.ndarray, s: np.ndarray, low: int, high: int, part: int, total: int, later: np.ndarray
) -> None:
    one = job.copy()
    one[SLICES] = 1
    for number in range(low, high):
        one[P] = job[P] + number * job[P_SLICE]
        one[G] = job[G] + number * job[G_SLICE]
        one[M] = job[M] + number * job[M_SLICE]
        one[V] = job[V] + number * job[V_SLICE]
        if job[KIND] == PLAIN or job[KIND] == ROW:
            _rows(one, s, 0, units(one))
        else:
            _sum(one, later, part, total)
            _finish_moments(one, s, total)
            _update(one, s, 0, block_count(one), total, later)


@numba.njit(**JIT)
def _take(team: np.ndarray, borders: np.ndarray, mine: np.ndarray, early: bool) -> int:
    """This thread's next task, or −1; ``mine`` are the next and the end of those of its part."""
    if mine[0] == mine[1]:
        if early and team[NEXT] >= team[EARLY]:
            return -1
        part = take_next(_address(team))
        if part >= team[PARTS]:
            return -1
        mine[0], mine[1] = borders[part], borders[part + 1]
    mine[0] += 1
    return mine[0] - 1


@numba.njit(**JIT)
def _in_columns(job: np.ndarray) -> bool:
    return (job[KIND] == COLUMN or job[KIND] == MIXED) and job[SLICES] == 1


@numba.njit(**JIT)
def _work(
    team: np.ndarray, table: np.ndarray, lines: np.ndarray, tasks: np.ndarray,
    borders: np.ndarray, partials: np.ndarray, room: np.ndarray,
) -> None:  # fmt: skip
    """What one thread does. While it updates a job it sums up the one that it has next."""
    part, total = _address(room), _address(room) + 4 * team[WIDEST]
    spare = total + 4 * team[WIDEST]
    later = np.zeros(SUMS_SIZE, np.int64)
    mine = np.zeros(2, np.int64)
    summed = False  # whether `total` holds the present job's scales
    here = _take(team, borders, mine, False)
    while here >= 0:
        what, low, high = tasks[here, WHAT], tasks[here, LOW], tasks[here, HIGH]
        job = table[tasks[here, JOB]]
        s = lines[job[SCALARS]]
        later[LEFT] = 0
        after = -1
        own = _address(partials) + 4 * tasks[here, OFFSET]
        if job[SLICES] > 1:
            _slices(job, s, low, high, part, total, later)
        elif job[KIND] == PLAIN or job[KIND] == ROW:
            _rows(job, s, low, high)
        elif what == SUMS:
            for block in range(low, high):
                sums = own + 4 * block * width(job)
                if job[KIND] == LONG:
                    _floats(sums, 1)[0] = _long_sum(job, block)
                else:
                    _begin(job, later, block, block + 1, part, sums)
                    finish_sums(later)
        else:
            if what == WHOLE:
                low, high, own = 0, block_count(job), total
                if not summed:
                    _sum(job, later, part, total)
                    _finish_moments(job, s, total)
            summed = False
            if _in_columns(job):
                after = _take(team, borders, mine, True)
            if after >= 0 and tasks[after, WHAT] == WHOLE and _in_columns(table[tasks[after, JOB]]):
                following = table[tasks[after, JOB]]
                _begin(following, later, 0, block_count(following), part, spare)
                _update(job, s, low, high, own, later)
                finish_sums(later)
                _finish_moments(following, lines[following[SCALARS]], spare)
                total, spare = spare, total
                summed = True
            else:
                _update(job, s, low, high, own, later)
        here = after if after >= 0 else _take(team, borders, mine, False)


@numba.njit(**JIT)
def collect(job: np.ndarray, s: np.ndarray, partials: np.ndarray) -> None:
    """Add up the partial sums of a shared job, in order, and leave the scales in the first."""
    n = width(job)
    total = partials[:n]
    for block in range(1, block_count(job)):
        part = partials[block * n : (block + 1) * n]
        for i in range(n):
            total[i] += part[i]
    _finish_moments(job, s, _address(total))


@numba.cfunc(types.void(types.voidptr), nopython=True, cache=True, error_model="numpy")
def slim_team(address: int) -> None:
    """Take one part after the other until none is left; any number of threads may call it."""
    team = carray(address, (TEAM_SIZE,), np.int64)
    table = carray(pointer(team[TABLE]), (team[JOBS], JOB_SIZE), np.int64)
    lines = carray(pointer(team[LINES]), (team[LINE_COUNT], 8), np.float32)
    tasks = carray(pointer(team[TASKS]), (team[TASK_COUNT], TASK_SIZE), np.int64)
    borders = carray(pointer(team[BORDERS]), (team[BORDER_COUNT],), np.int64)
    partials = carray(pointer(team[PARTIALS]), (team[PARTIALS_SIZE],), np.float32)
    room = np.empty(3 * team[WIDEST], np.float32)
    _work(team, table, lines, tasks, borders, partials, room)
