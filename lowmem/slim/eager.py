"""The SlimAdamW step in ordinary torch operations: any device, stride, dtype, and DTensor.

It runs where no kernel does. The mean of g² is a ``vector_norm``, so g² is never made; what
does need working memory (a half-precision tensor's float32 image, the denominator of a
parameter that is not averaged) is made for one block of the parameter at a time.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

Axes = tuple[int, ...]

# Elements worked on at a time: about a second-level cache on a CPU, enough to fill an accelerator.
_CPU_BLOCK = 1 << 17
_DEVICE_BLOCK = 1 << 24


def supports(
    param: Tensor, grad: Tensor, axes: Axes, v_strides: tuple[int, ...] | None = None
) -> bool:
    """Everything strided that is real."""
    return grad.layout == torch.strided and not param.is_complex()


@torch.no_grad()
def slim_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    axes: Sequence[Axes],
    steps: Sequence[float],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Update parameters and moments in place; see ``reference.slim_adamw_``."""
    for p, g, m, v, over, step in zip(
        params, grads, exp_avgs, exp_avg_sqs, axes, steps, strict=True
    ):
        if p.numel() == 0:
            continue
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        blocks = list(_blocks(p))
        if over:
            _average(v, g, over, blocks, beta2)
            denominator = (v.sqrt() / math.sqrt(correction2)).add_(eps)
        work = torch.promote_types(p.dtype, torch.float32)
        rate = torch.tensor(lr / correction1, dtype=work).item()  # a huge one is infinite
        for index in blocks:
            pb, gb, mb = _at(p, index), _at(g, index).to(work), _at(m, index)
            mean = mb if mb.dtype == work else mb.to(work)
            mean.lerp_(-gb if maximize else gb, 1 - beta1)
            if over:
                denom = _at(denominator, _kept(index, over))
            else:
                vb, gv = _at(v, index), gb.to(v.dtype)
                vb.mul_(beta2).addcmul_(gv, gv, value=1 - beta2)
                denom = (vb.sqrt() / math.sqrt(correction2)).add_(eps)
            value = pb if pb.dtype == work else pb.to(work)
            value.mul_(1 - lr * weight_decay)
            value.addcdiv_(mean, denom.to(work), value=-rate)
            if value is not pb:
                pb.copy_(value)
            if mean is not mb:
                mb.copy_(mean)


def _average(v: Tensor, g: Tensor, axes: Axes, blocks: list[Any], beta2: float) -> None:
    """``v ← β2·v + (1 − β2)·mean of g² over axes``."""
    work = torch.promote_types(g.dtype, torch.float32)
    mean = _mean_square(v, g, axes, blocks, work)
    # Where g² is beyond float32, (1 − β2)·g² may not be: AdamW's second moment is finite then.
    # (On other devices looking would make the host wait for them at every parameter.)
    if v.device.type == "cpu" and not is_dtensor(v) and mean.isinf().any():
        exact = _mean_square(v, g, axes, blocks, torch.float64)
        v.copy_(beta2 * v.double() + (1 - beta2) * exact)
        return
    v.lerp_(mean.to(v.dtype), 1 - beta2)


def _mean_square(v: Tensor, g: Tensor, axes: Axes, blocks: list[Any], work: torch.dtype) -> Tensor:
    count = math.prod(g.shape[axis] for axis in axes)
    if len(blocks) == 1:
        norm: Any = torch.linalg.vector_norm(g.to(work), dim=axes, keepdim=True)
        if is_dtensor(v):  # a shard knows its own share only
            norm = norm.redistribute(placements=cast(Any, v).placements)
        return norm.square() / count
    square = torch.zeros_like(v, dtype=work)
    for index in blocks:
        norm = torch.linalg.vector_norm(g[index].to(work), dim=axes, keepdim=True)
        square[_kept(index, axes)] += norm.square_()
    return square / count


def _at(tensor: Tensor, index: Any) -> Tensor:
    return tensor if index is Ellipsis else tensor[index]


def _kept(index: Any, axes: Axes) -> Any:
    """The block of a tensor of size 1 along ``axes`` that belongs to a block of the whole."""
    if index is Ellipsis:
        return index
    return tuple(slice(None) if axis in axes else part for axis, part in enumerate(index))


def _blocks(tensor: Tensor) -> Iterator[Any]:
    """Indices of blocks of bounded size that cover ``tensor``, cut along its longest strides."""
    limit = _CPU_BLOCK if tensor.device.type == "cpu" else _DEVICE_BLOCK
    left = tensor.numel()
    if left <= limit or is_dtensor(tensor):
        yield ...  # a DTensor is sharded already, and cutting it would move data
        return
    cuts: list[list[slice]] = [[slice(None)] for _ in tensor.shape]
    strides = tensor.stride()
    for axis in sorted(range(tensor.dim()), key=lambda axis: -strides[axis]):
        size = tensor.shape[axis]
        inner = left // size
        width = max(1, limit // inner)
        cuts[axis] = [slice(start, start + width) for start in range(0, size, width)]
        left = inner * min(width, size)
        if left <= limit:
            break
    yield from itertools.product(*cuts)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor, without importing distributed torch to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
