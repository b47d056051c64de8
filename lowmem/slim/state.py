"""How a second moment is stored: its shape under a rule, and the parts of a split one.

Not averaged: the parameter's shape. Averaged: the same with size 1 along the averaged axes.
Split: one flat tensor, the parts one after another in the order of ``Split.runs``; each part
is a view with the part's shape and size 1 along the part's axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowmem.slim.rulesfile import Axes, Split

Shape = tuple[int, ...]


def moment_shape(rule: Axes | Split | None, shape: Sequence[int]) -> Shape:
    """The shape of ``exp_avg_sq`` for a parameter of ``shape``; the rule must fit."""
    if isinstance(rule, Split):
        return (sum(math.prod(part) for part in _part_shapes(rule, shape)),)
    return _reduced(shape, rule or ())


def moment_views(
    exp_avg_sq: Tensor, rule: Axes | Split | None, shape: Sequence[int]
) -> list[Tensor]:
    """The second moment part by part, as views; the whole of it where the rule does not split."""
    if not isinstance(rule, Split):
        return [exp_avg_sq]
    views, start = [], 0
    for part in _part_shapes(rule, shape):
        size = math.prod(part)
        views.append(exp_avg_sq[start : start + size].view(part))
        start += size
    return views


def param_views(param: Tensor, rule: Axes | Split | None) -> list[Tensor]:
    """A parameter (or gradient, or first moment) cut as ``moment_views`` cuts its moment."""
    if not isinstance(rule, Split):
        return [param]
    return [param.narrow(rule.axis, start, part.size) for start, part in rule.runs()]


def part_axes(rule: Axes | Split | None) -> list[Axes]:
    """The axes of each part; ``()`` where nothing is averaged."""
    if not isinstance(rule, Split):
        return [rule or ()]
    return [part.axes or () for _, part in rule.runs()]


def averaged(v: Tensor, rule: Axes | Split | None) -> Tensor:
    """A full second moment as the rule keeps it, in float32."""
    kept = []
    for view, axes in zip(param_views(v, rule), part_axes(rule), strict=True):
        whole = view.to(torch.float32)
        kept.append(whole.mean(dim=axes, keepdim=True) if axes else whole)
    if isinstance(rule, Split):
        return torch.cat([part.reshape(-1) for part in kept])
    return kept[0].clone() if kept[0] is v else kept[0]


def _part_shapes(rule: Split, shape: Sequence[int]) -> list[Shape]:
    shapes = []
    for _, part in rule.runs():
        whole = [part.size if axis == rule.axis else size for axis, size in enumerate(shape)]
        shapes.append(_reduced(whole, part.axes or ()))
    return shapes


def _reduced(shape: Sequence[int], axes: Axes) -> Shape:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
