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

Kept axes further out (experts, the blocks of a strided view) become separate jobs.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from math import prod
from typing import NamedTuple

PLAIN, ROW, LONG, COLUMN, MIXED = range(5)

# Beyond this length a row of g no longer stays in a cache between its two readings.
LONG_ROW = 65_536
# Wider matrices are cut into panels, so that the sums of a panel fit the first-level cache.
PANEL = 8_192
MAX_JOBS = 65_536

_TAILS = ((MIXED, "AKA"), (COLUMN, "AK"), (ROW, "KA"), (ROW, "A"), (PLAIN, "KK"), (PLAIN, "K"))


class Job(NamedTuple):
    """One line of the kernels' table. Sizes, offsets and strides count elements.

    ``rows`` × ``columns`` × ``run``: PLAIN and ROW are (rows, columns), LONG is (columns,),
    COLUMN is (rows, columns) with rows averaged, MIXED is (rows, columns, run) with rows and
    run averaged. ``*_column`` are the strides of MIXED's columns; otherwise the innermost
    stride is 1. ``v_step`` is v's stride along what is kept.
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
    p_column: int
    g_column: int
    m_column: int


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
    if any(axis.averaged for axis in outer) or prod(axis.size for axis in outer) > MAX_JOBS:
        return None
    if kind in (PLAIN, COLUMN) and inner[-1].v != 1:
        return None
    jobs = []
    for place in itertools.product(*(range(axis.size) for axis in outer)):
        start = [
            sum(number * getattr(axis, name) for number, axis in zip(place, outer, strict=True))
            for name in "pgmv"
        ]
        jobs += _cut(kind, inner, *start)
    return tuple(jobs)


def _cut(kind: int, inner: list[_Axis], p: int, g: int, m: int, v: int) -> list[Job]:
    """The jobs of one block: long rows one by one, wide columns panel by panel."""
    if kind == MIXED:
        rows, columns, run = inner
        step = max(1, PANEL // 8 // run.size)
        return [
            Job(
                MIXED, rows.size, min(step, columns.size - low), run.size,
                p + low * columns.p, g + low * columns.g, m + low * columns.m, v + low * columns.v,
                rows.p, rows.g, rows.m, columns.v, columns.p, columns.g, columns.m,
            )
            for low in range(0, columns.size, step)
        ]  # fmt: skip
    one = _Axis(1, 0, 0, 0, 0, False)
    rows, columns = inner if len(inner) == 2 else (one, inner[0])
    if kind == ROW and columns.size > LONG_ROW and rows.size <= MAX_JOBS:
        return [
            Job(
                LONG, 1, columns.size, 1,
                p + row * rows.p, g + row * rows.g, m + row * rows.m, v + row * rows.v,
                0, 0, 0, 0, 0, 0, 0,
            )
            for row in range(rows.size)
        ]  # fmt: skip
    if kind == COLUMN:
        return [
            Job(
                COLUMN, rows.size, min(PANEL, columns.size - low), 1,
                p + low, g + low, m + low, v + low, rows.p, rows.g, rows.m, 1, 0, 0, 0,
            )
            for low in range(0, columns.size, PANEL)
        ]  # fmt: skip
    return [
        Job(kind, rows.size, columns.size, 1, p, g, m, v, rows.p, rows.g, rows.m, rows.v, 0, 0, 0)
    ]
