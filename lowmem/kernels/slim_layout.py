"""Tensor layouts as the SlimAdamW kernels see them: which axes fall together, and what is left.

``layout`` takes the shape, the strides of the four tensors and the averaged axes, drops axes
of size 1, orders the others as they lie in memory, and merges neighbours that can be walked
as one. What remains is one of five kinds (written outermost first; K kept, A averaged):

======  ===========  ==============================================
PLAIN   K or K, K    nothing is averaged
ROW     K, A         each row has one second moment
LONG    A            one second moment for a run too long for a cache
COLUMN  A, K         each column has one second moment
MIXED   A, K, A      as COLUMN, with runs in the place of elements
======  ===========  ==============================================

Kept axes further out (experts, the blocks of a strided view) become separate jobs, or, where
they are many and small, one job of many slices.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod
from typing import NamedTuple

PLAIN, ROW, LONG, COLUMN, MIXED = range(5)

# A job's places in the kernels' table, where addresses stand for offsets and strides count
# bytes; the last is the number of its line of scalars.
(
    KIND, ROWS, COLUMNS, RUN, P, G, M, V, P_ROW, G_ROW, M_ROW, V_STEP,
    SLICES, P_SLICE, G_SLICE, M_SLICE, V_SLICE, SCALARS, JOB_SIZE,
) = range(19)  # fmt: skip

# Beyond this length a row of g no longer stays in a cache between its two readings.
LONG_ROW = 65_536
# Wider matrices are cut into panels, so that the sums of a panel fit the first-level cache.
PANEL = 8_192
MAX_JOBS = 4_096
# More slices than this along one axis, each smaller than this, are one job.
_FEW_SLICES, _LARGE_SLICE = 16, 1 << 17

_TAILS = ((MIXED, "AKA"), (COLUMN, "AK"), (ROW, "KA"), (ROW, "A"), (PLAIN, "KK"), (PLAIN, "K"))


class Job(NamedTuple):
    """One line of the kernels' table. Sizes, offsets and strides count elements.

    ``rows`` × ``columns`` × ``run``: PLAIN and ROW are (rows, columns), LONG is (columns,),
    COLUMN is (rows, columns) with rows averaged, MIXED is (rows, columns, run) with rows and
    run averaged. All but rows (and slices) lie without gaps. ``v_step`` is v's stride along
    what is kept. The job is done ``slices`` times, each time ``*_slice`` further on.
    """

    kind: int
    rows: int
    columns: int
    run: int
    p: int
    g: int
    m: int
    v: int
    p_row: int
    g_row: int
    m_row: int
    v_step: int
    slices: int = 1
    p_slice: int = 0
    g_slice: int = 0
    m_slice: int = 0
    v_slice: int = 0


class _Axis(NamedTuple):
    size: int
    p: int
    g: int
    m: int
    v: int
    averaged: bool

    def inside(self, outer: _Axis) -> bool:
        """Whether ``outer`` and this axis are walked as one."""
        return (
            self.averaged == outer.averaged
            and outer.p == self.size * self.p
            and outer.g == self.size * self.g
            and outer.m == self.size * self.m
            and (self.averaged or outer.v == self.size * self.v)
        )

    def merged(self, outer: _Axis) -> _Axis:
        return self._replace(size=self.size * outer.size)


def moment_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...]:
    """The strides of a contiguous second moment; without ``axes`` those of its parameter."""
    if not axes:
        return strides
    averaged = {axis % len(shape) for axis in axes}
    kept = [1 if axis in averaged else size for axis, size in enumerate(shape)]
    return tuple(prod(kept[axis + 1 :]) for axis in range(len(kept)))


@lru_cache(maxsize=4096)
def layout(
    shape: tuple[int, ...],
    p_strides: tuple[int, ...],
    g_strides: tuple[int, ...],
    m_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    axes: tuple[int, ...],
) -> tuple[Job, ...] | None:
    """The jobs of one tensor, or ``None`` for a layout that the kernels do not walk.

    Args:
        shape: Of the parameter (or of the part of it that is updated).
        p_strides, g_strides, m_strides: Of parameter, gradient and first moment.
        v_strides: Of the second moment, which has size 1 along ``axes``.
        axes: The averaged axes, each from ``-ndim`` to ``ndim - 1``; ``()`` for plain AdamW.
    """
    if any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ValueError(f"axes {axes} do not exist in shape {shape}")
    if 0 in shape:
        return ()
    averaged = {axis % len(shape) for axis in axes}
    sized = [
        _Axis(*numbers, number in averaged)
        for number, numbers in enumerate(
            zip(shape, p_strides, g_strides, m_strides, v_strides, strict=True)
        )
        if numbers[0] != 1
    ]
    sized.sort(key=lambda axis: axis.p, reverse=True)
    walk: list[_Axis] = []
    for axis in sized:
        if walk and axis.inside(walk[-1]):
            walk[-1] = axis.merged(walk[-1])
        else:
            walk.append(axis)
    if not walk:
        walk = [_Axis(1, 1, 1, 1, 1, bool(averaged))]
    if not walk[-1].p == walk[-1].g == walk[-1].m == 1:
        return None
    if len(walk) > 1 and walk[-1].averaged and walk[-2].averaged:
        walk.insert(-1, _Axis(1, 0, 0, 0, 0, False))  # one second moment for a strided block
    kinds = "".join("A" if axis.averaged else "K" for axis in walk)
    kind, tail = next(found for found in _TAILS if kinds.endswith(found[1]))
    outer, inner = walk[: -len(tail)], walk[-len(tail) :]
    if any(axis.averaged for axis in outer) or (kind in (PLAIN, COLUMN) and inner[-1].v != 1):
        return None
    if kind == MIXED and not _is_one_run(*inner[1:]):
        return None
    slices = None
    small = prod(axis.size for axis in inner) < _LARGE_SLICE
    if outer and small and outer[-1].size > _FEW_SLICES:
        slices = outer.pop()
    if prod(axis.size for axis in outer) > MAX_JOBS:
        return None
    jobs: list[Job] = []
    for place in itertools.product(*(range(axis.size) for axis in outer)):
        start = [
            sum(number * getattr(axis, name) for number, axis in zip(place, outer, strict=True))
            for name in "pgmv"
        ]
        jobs += _cut(kind, inner, *start)
    if slices is not None:
        jobs = [
            job._replace(
                slices=slices.size,
                p_slice=slices.p,
                g_slice=slices.g,
                m_slice=slices.m,
                v_slice=slices.v,
            )
            for job in jobs
        ]
    return tuple(jobs)


def _is_one_run(columns: _Axis, run: _Axis) -> bool:
    """Whether the columns of MIXED lie one behind the other, and are short enough to sum."""
    gapless = columns.size == 1 or columns.p == columns.g == columns.m == run.size
    return gapless and run.size <= LONG_ROW


def _cut(kind: int, inner: list[_Axis], p: int, g: int, m: int, v: int) -> list[Job]:
    """The jobs of one block: long rows one by one, wide columns panel by panel."""
    if kind == MIXED:
        rows, columns, run = inner
        step = max(1, PANEL // run.size)
        return [
            Job(
                MIXED, rows.size, min(step, columns.size - low), run.size,
                p + low * columns.p, g + low * columns.g, m + low * columns.m, v + low * columns.v,
                rows.p, rows.g, rows.m, columns.v,
            )
            for low in range(0, columns.size, step)
        ]  # fmt: skip
    one = _Axis(1, 0, 0, 0, 0, False)
    rows, columns = inner if len(inner) == 2 else (one, inner[0])
    if kind == ROW and columns.size > LONG_ROW and rows.size <= MAX_JOBS:
        return [
            Job(
                LONG, 1, columns.size, 1,
                p + row * rows.p, g + row * rows.g, m + row * rows.m, v + row * rows.v, 0, 0, 0, 0,
            )
            for row in range(rows.size)
        ]  # fmt: skip
    if kind == COLUMN:
        return [
            Job(
                COLUMN, rows.size, min(PANEL, columns.size - low), 1,
                p + low, g + low, m + low, v + low, rows.p, rows.g, rows.m, 1,
            )
            for low in range(0, columns.size, PANEL)
        ]  # fmt: skip
    return [Job(kind, rows.size, columns.size, 1, p, g, m, v, rows.p, rows.g, rows.m, rows.v)]
