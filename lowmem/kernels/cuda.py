"""The SlimAdamW step on CUDA, in triton: the jobs of ``slim_layout``, one or three launches each.

- plain: one pass. Rows: a program takes a row, sums its g², and reads g again from the cache
  for the update. Columns: partial sums of blocks of rows, then the second moments from them,
  then the update; no atomics, so results repeat bit for bit.
- mixed (axes on both sides of the kept one) and long rows go to the eager path: ``supports``
  says no.

Parameters and first moments may be float32, bfloat16 or float16; the arithmetic and the second
moments are float32. Under ``TRITON_INTERPRET=1`` the same code runs on CPU tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowmem.kernels.slim_layout import COLUMN, PLAIN, ROW, Job, layout, moment_strides

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTH = 1024  # elements of a row that a program holds at a time
_TILE_ROWS, _TILE_COLUMNS = 32, 64
_MAX_BLOCKS = 256  # of rows, each with its own partial sums


@triton.jit
def _adam(p, g, m, denominator, weight, decay, step):
    moment = m + weight * (g - m)
    return p * decay - step * (moment / denominator), moment


@triton.jit
def _plain_kernel(
    p_at, g_at, m_at, v_at, columns, p_row, g_row, m_row, v_row,
    weight, beta2, rest2, decay, step, root, eps, sign, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    here = column < columns
    g = sign * tl.load(g_at + row * g_row + column, here, 0.0).to(tl.float32)
    v = tl.load(v_at + row * v_row + column, here, 0.0)
    p = tl.load(p_at + row * p_row + column, here, 0.0).to(tl.float32)
    m = tl.load(m_at + row * m_row + column, here, 0.0).to(tl.float32)
    v = beta2 * v + rest2 * g * g
    p, m = _adam(p, g, m, tl.sqrt(v) / root + eps, weight, decay, step)
    tl.store(p_at + row * p_row + column, p.to(p_at.dtype.element_ty), here)
    tl.store(m_at + row * m_row + column, m.to(m_at.dtype.element_ty), here)
    tl.store(v_at + row * v_row + column, v, here)


@triton.jit
def _row_kernel(
    p_at, g_at, m_at, v_at, columns, p_row, g_row, m_row, v_row,
    weight, beta2, rest2, decay, step, root, eps, sign, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    share = rest2 / columns  # times g first: g·g alone may be beyond float32
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, columns, WIDTH):
        column = start + lane
        g = tl.load(g_at + row * g_row + column, column < columns, 0.0).to(tl.float32)
        total += share * g * g
    v = beta2 * tl.load(v_at + row * v_row) + tl.sum(total, 0)
    denominator = tl.sqrt(v) / root + eps
    for start in range(0, columns, WIDTH):
        column = start + lane
        here = column < columns
        g = sign * tl.load(g_at + row * g_row + column, here, 0.0).to(tl.float32)
        p = tl.load(p_at + row * p_row + column, here, 0.0).to(tl.float32)
        m = tl.load(m_at + row * m_row + column, here, 0.0).to(tl.float32)
        p, m = _adam(p, g, m, denominator, weight, decay, step)
        tl.store(p_at + row * p_row + column, p.to(p_at.dtype.element_ty), here)
        tl.store(m_at + row * m_row + column, m.to(m_at.dtype.element_ty), here)
    tl.store(v_at + row * v_row, v)


@triton.jit
def _column_sums_kernel(
    g_at, sums_at, rows, columns, g_row, block, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1).to(tl.int64) * block
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, block, ROWS):
        row = first + start + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (column < columns)[None, :]
        g = tl.load(g_at + row[:, None] * g_row + column[None, :], here, 0.0).to(tl.float32)
        total += share * g * g
    at = sums_at + tl.program_id(1).to(tl.int64) * columns + column
    tl.store(at, tl.sum(total, 0), column < columns)


@triton.jit
def _column_moments_kernel(sums_at, v_at, columns, blocks, beta2, COLUMNS: tl.constexpr):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < columns
    total = tl.zeros([COLUMNS], tl.float32)
    for number in range(blocks):
        total += tl.load(sums_at + number * columns + column, here, 0.0)
    v = beta2 * tl.load(v_at + column, here, 0.0) + total
    tl.store(v_at + column, v, here)


@triton.jit
def _column_update_kernel(
    p_at, g_at, m_at, v_at, rows, columns, p_row, g_row, m_row,
    weight, decay, step, root, eps, sign, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    here = (row < rows) & (column < columns)[None, :]
    denominator = tl.sqrt(tl.load(v_at + column, column < columns, 0.0)) / root + eps
    at = column[None, :]
    g = sign * tl.load(g_at + row * g_row + at, here, 0.0).to(tl.float32)
    p = tl.load(p_at + row * p_row + at, here, 0.0).to(tl.float32)
    m = tl.load(m_at + row * m_row + at, here, 0.0).to(tl.float32)
    p, m = _adam(p, g, m, denominator[None, :], weight, decay, step)
    tl.store(p_at + row * p_row + at, p.to(p_at.dtype.element_ty), here)
    tl.store(m_at + row * m_row + at, m.to(m_at.dtype.element_ty), here)


def supports(
    param: Tensor, grad: Tensor, axes: tuple[int, ...], v_strides: tuple[int, ...] | None = None
) -> bool:
    """Whether ``slim_adamw_`` takes this parameter (or part of one) with this gradient.

    ``v_strides`` as in ``cpu_slim.supports``.
    """
    if not (
        param.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and (param.is_cuda or _INTERPRETED)
        and param.device == grad.device
        and param.layout is grad.layout is torch.strided
        and type(grad) is Tensor
        and type(param) in (Tensor, torch.nn.Parameter)
        and not (param.is_neg() or grad.is_neg())
        and param.shape == grad.shape
    ):
        return False
    if v_strides is None:
        v_strides = moment_strides(tuple(param.shape), param.stride(), axes)
    jobs = _jobs(param, grad, param, v_strides, axes)
    return jobs is not None and len(jobs) <= 64 and all(_walks(job) for job in jobs)


def _walks(job: Job) -> bool:
    # The second dimension of a grid ends at 65,535.
    most = {PLAIN: 65_535, COLUMN: 65_535 * _TILE_ROWS}.get(job.kind, 2**31 - 1)
    return job.kind in (PLAIN, ROW, COLUMN) and job.rows <= most and job.slices == 1


def _jobs(
    p: Tensor, g: Tensor, m: Tensor, v_strides: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[Job, ...] | None:
    return layout(tuple(p.shape), p.stride(), g.stride(), m.stride(), v_strides, axes)


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
    """One AdamW step in place with the second moment averaged; as ``cpu_slim.slim_adamw_``."""
    sign = -1.0 if maximize else 1.0
    for p, g, m, v, kept, count in zip(
        params, grads, exp_avgs, exp_avg_sqs, axes, steps, strict=True
    ):
        jobs = _jobs(p, g, m, v.stride(), kept)
        if jobs is None:
            raise ValueError(
                f"moments with strides {m.stride()} and {v.stride()} do not go with a parameter "
                f"of strides {p.stride()}; lay them out as the parameter is"
            )
        scalars = {
            "weight": 1 - beta1,
            "beta2": beta2,
            "rest2": 1 - beta2,
            "decay": 1 - lr * weight_decay,
            "step": lr / (1 - beta1**count),
            "root": math.sqrt(1 - beta2**count),
            "eps": eps,
            "sign": sign,
        }
        with torch.cuda.device_of(p):
            for job in jobs:
                _launch(job, p.detach(), g.detach(), m.detach(), v, scalars)
    torch.autograd.graph.increment_version(params)


def _at(tensor: Tensor, offset: int) -> Tensor:
    """The tensor's storage from ``offset`` elements behind its first one on."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


def _launch(job: Job, p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: dict[str, Any]) -> None:
    at = [_at(t, start) for t, start in zip((p, g, m, v), job[4:8], strict=True)]
    rows, columns = job.rows, job.columns
    strides = (job.p_row, job.g_row, job.m_row)
    width = min(_WIDTH, triton.next_power_of_2(columns))
    if job.kind == PLAIN:
        grid = (triton.cdiv(columns, width), rows)
        _plain_kernel[grid](*at, columns, *strides, job.v_step, **s, WIDTH=width)
        return
    if job.kind == ROW:
        _row_kernel[(rows,)](*at, columns, *strides, job.v_step, **s, WIDTH=width)
        return
    assert job.kind == COLUMN
    tile = {"ROWS": _TILE_ROWS, "COLUMNS": _TILE_COLUMNS}
    across = triton.cdiv(columns, _TILE_COLUMNS)
    block = triton.cdiv(triton.cdiv(rows, _MAX_BLOCKS), _TILE_ROWS) * _TILE_ROWS
    blocks = triton.cdiv(rows, block)
    sums = torch.empty((blocks, columns), dtype=torch.float32, device=p.device)
    _column_sums_kernel[(across, blocks)](
        at[1], sums, rows, columns, job.g_row, block, s["rest2"] / rows, **tile
    )
    _column_moments_kernel[(across,)](
        sums, at[3], columns, blocks, s["beta2"], COLUMNS=_TILE_COLUMNS
    )
    scalars = {name: s[name] for name in ("weight", "decay", "step", "root", "eps", "sign")}
    grid = (across, triton.cdiv(rows, _TILE_ROWS))
    _column_update_kernel[grid](*at, rows, columns, *strides, **scalars, **tile)
