"""How well the means over some axes stand for a tensor: the numbers behind ``snr``.

For every set of axes asked for: the mean over the kept axes of mean squared over variance,
of the squared mean and of the variance. One pass over the tensor serves all sets of a
matrix; nothing of the tensor's size is made, and nothing leaves its device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Axes = tuple[int, ...]

_BLOCK = 1 << 21  # elements that the eager path works on at a time
_JOINED = 1 << 16  # elements that joined axes may have: rows stay shorter than a block
_NO_FLOAT64 = {"mps"}


def slice_moments(v: Tensor, sets: Sequence[Axes]) -> Tensor:
    """``(snr, mean_sqr, var, scale)`` for every axis set, one row each, on ``v``'s device.

    ``mean_sqr`` and ``var`` are in units of ``scale`` squared, which is 1 except on devices
    without float64. Axes are non-negative and within ``v``'s dimensions.
    """
    v = v.detach()
    if hasattr(v, "full_tensor"):  # a DTensor: rules are decided on global shapes
        v = v.full_tensor()
    v, sets = _by_stride(v, sets)
    dims, groups = _merged(v.shape, sets)
    x = _viewed(v, dims)
    exact = torch.float32 if v.device.type in _NO_FLOAT64 else torch.float64
    scale = x.new_ones((), dtype=exact)
    if exact == torch.float32:
        largest = x.abs().amax().to(exact)
        scale = torch.where(largest > 0, largest, scale)

    last, above = len(dims) - 1, len(dims) - 2
    columns = any(above in group and last not in group for group in groups if above >= 0)
    matrices = _viewed(x, [-1, dims[-2] if above >= 0 else 1, dims[-1]])
    row, column = _leaf(matrices, columns, exact, scale)
    rows = [part.reshape(dims[:-1]) for part in row]
    cols = [part.reshape((*dims[:-2], dims[-1])) for part in column] if column else []

    results = []
    for group in groups:
        if last in group:
            mean, var = _merge(rows[0], rows[1], [axis for axis in group if axis != last])
        elif above in group:
            mean, var = _merge(cols[0], cols[1], [axis for axis in group if axis != above])
        elif group == tuple(range(len(group))) and group:  # the columns of another matrix
            size = math.prod(dims[axis] for axis in group)
            _, outer = _leaf(_viewed(x, [1, size, -1]), True, exact, scale)
            assert outer is not None
            mean, var = outer
        elif group:  # an axis in the middle
            moved = x.movedim(group, tuple(range(-len(group), 0)))
            size = math.prod(dims[axis] for axis in group)
            (mean, var), _ = _leaf(moved.reshape(1, -1, size), False, exact, scale)
        else:  # only axes of size 1: every slice is one value
            mean, var = x.to(exact) / scale, x.new_zeros((), dtype=exact).expand(x.shape)
        results.append(torch.stack([*_summary(mean, var), scale]))
    return torch.stack(results)


def _summary(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SNR, squared mean and variance, averaged over slices. All-zero slices have no SNR."""
    known = (mean != 0) | (var != 0)
    ratio = mean / var * mean  # x/0 is inf: zero variance loses nothing
    ratio = torch.where(known, ratio, torch.zeros_like(ratio))
    snr = ratio.sum() / known.sum().clamp(min=1)
    return snr, mean.square().mean(), var.mean()


def _merge(mean: Tensor, var: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and variance of unions of equally large slices."""
    if not axes:
        return mean, var
    pivot = mean
    for axis in axes:
        pivot = pivot.narrow(axis, 0, 1)
    shifted = mean - pivot  # equal means leave exact zeros
    centre = shifted.mean(dim=list(axes), keepdim=True)
    spread = (shifted - centre).square().mean(dim=list(axes), keepdim=True)
    return pivot + centre, var.mean(dim=list(axes), keepdim=True) + spread


def _leaf(
    x: Tensor, columns: bool, exact: torch.dtype, scale: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Mean and variance of the rows, and of the columns, of stacked matrices."""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        from lowmem.kernels.snr import row_and_column_moments

        stack, height, width = x.shape
        span = (stack - 1) * x.stride(0) + (height - 1) * x.stride(1) + width
        data = x.as_strided((span,), (1,)).numpy()
        strides, shape = (x.stride(0), x.stride(1)), (stack, height, width)
        found = row_and_column_moments(data, strides, shape, columns)
        tensors = [None if part is None else torch.from_numpy(part) for part in found]
        row_mean, row_var, column_mean, column_var = tensors
        assert row_mean is not None
        assert row_var is not None
        if column_mean is None or column_var is None:
            return (row_mean, row_var), None
        return (row_mean, row_var), (column_mean, column_var)
    return _eager_leaf(x, columns, exact, scale)


def _eager_leaf(
    x: Tensor, columns: bool, exact: torch.dtype, scale: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """``_leaf`` in plain torch, block by block; blocks of rows join by Chan's formula."""
    stack, height, width = x.shape
    if stack > 1 and x.numel() > _BLOCK:
        pieces = x.split(max(1, _BLOCK // (height * width)))
        parts = [_eager_leaf(piece, columns, exact, scale) for piece in pieces]
        row = torch.cat([part[0][0] for part in parts]), torch.cat([part[0][1] for part in parts])
        several = [part[1] for part in parts if part[1] is not None]
        if not several:
            return row, None
        return row, (torch.cat([m for m, _ in several]), torch.cat([v for _, v in several]))
    step = max(1, _BLOCK // (stack * width))
    pivot = x[:, :1].to(exact) / scale
    mean, square = torch.zeros_like(pivot), torch.zeros_like(pivot)
    means, variances, done = [], [], 0
    for block in x.split(step, dim=1):
        block = block.to(exact) / scale
        first = block[..., :1]
        offset = block - first
        centre = offset.mean(dim=2, keepdim=True)
        means.append((first + centre).squeeze(2))
        variances.append((offset - centre).square_().mean(dim=2))
        if columns:
            offset = block - pivot
            centre = offset.mean(dim=1, keepdim=True)
            count = block.shape[1]
            gap = centre - mean
            square += (offset - centre).square_().sum(dim=1, keepdim=True)
            square += gap.square() * (done * count / (done + count))
            mean += gap * (count / (done + count))
            done += count
    row = torch.cat(means, dim=1), torch.cat(variances, dim=1)
    if not columns:
        return row, None
    return row, ((pivot + mean).squeeze(1), (square / height).squeeze(1))


def _by_stride(v: Tensor, sets: Sequence[Axes]) -> tuple[Tensor, list[Axes]]:
    """``v`` with its axes in the order of memory: channels-last and transposed weights."""
    order = sorted(range(v.dim()), key=v.stride, reverse=True)
    place = {axis: i for i, axis in enumerate(order)}
    return v.permute(order), [tuple(sorted(place[axis] for axis in axes)) for axes in sets]


def _viewed(x: Tensor, dims: Sequence[int]) -> Tensor:
    """``x`` in another shape with unit stride in the last axis, copied only where it must be."""
    try:
        view = x.view(*dims)
    except RuntimeError:
        view = x.reshape(*dims)
    return view if view.stride(-1) == 1 or view.shape[-1] == 1 else view.contiguous()


def _merged(shape: Sequence[int], sets: Sequence[Axes]) -> tuple[list[int], list[Axes]]:
    """Drop axes of size 1 and join small neighbours that every set treats alike."""
    dims: list[int] = []
    kinds: list[tuple[bool, ...]] = []
    for axis, size in enumerate(shape):
        kind = tuple(axis in axes for axes in sets)
        if size == 1:
            continue
        if kinds and kinds[-1] == kind and dims[-1] * size <= _JOINED:
            dims[-1] *= size
        else:
            dims.append(size)
            kinds.append(kind)
    groups = [tuple(axis for axis, kind in enumerate(kinds) if kind[i]) for i in range(len(sets))]
    return dims or [1], groups
