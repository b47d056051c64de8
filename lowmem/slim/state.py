"""How a second moment is stored: its shape under a rule, and the parts of a split one.

Not averaged: the parameter's shape. Averaged: the same with size 1 along the averaged axes.
Split: one flat tensor, the parts one after another in the order of ``Split.runs``; each part
is a view with the part's shape and size 1 along the part's axes. A step works on ``cuts``,
which join what may be joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Cut:
    """Parts of a split parameter that are stepped as one: neighbours, or all repetitions of one.

    Along ``axis`` of the parameter, from ``start`` on, ``size`` indices; ``repeat`` times,
    ``length`` apart. The second moment's are ``v_size`` numbers from ``v_start`` on in each
    repetition, shaped ``v_shape``. ``axes`` count in the views, which have one more axis
    where there are repetitions.
    """

    axis: int
    start: int
    size: int
    repeat: int
    length: int
    v_start: int
    v_size: int
    v_shape: Shape
    axes: Axes

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a parameter, a gradient or a first moment, as a view."""
        if self.repeat == 1:
            return tensor.narrow(self.axis, self.start, self.size)
        runs = tensor.unflatten(self.axis, (self.repeat, self.length))
        return runs.narrow(self.axis + 1, self.start, self.size)

    def of_moment(self, exp_avg_sq: Tensor) -> Tensor:
        """This part of the flat second moment."""
        runs = exp_avg_sq.view(self.repeat, -1)[:, self.v_start : self.v_start + self.v_size]
        views = runs.unflatten(1, self.v_shape)
        return views[0] if self.repeat == 1 else views.movedim(0, self.axis)


def cuts(rule: Split, shape: Sequence[int]) -> list[Cut]:
    """A split's parts, as few as there can be."""
    found: list[Cut] = []
    length, start, v_start = rule.length // rule.repeat, 0, 0
    for part in rule.parts:
        axes = part.axes or ()
        whole = [part.size if axis == rule.axis else size for axis, size in enumerate(shape)]
        v_shape = _reduced(whole, axes)
        seen = tuple(axis + (rule.repeat > 1 and axis >= rule.axis) for axis in axes)
        cut = Cut(
            rule.axis, start, part.size, rule.repeat, length,
            v_start, math.prod(v_shape), v_shape, seen,
        )  # fmt: skip
        start, v_start = start + part.size, v_start + cut.v_size
        found.append(cut)
        if len(found) > 1 and found[-2].axes == seen and rule.axis not in axes:
            first = found[-2]
            if math.prod(v_shape[: rule.axis]) == 1:  # their second moments are neighbours too
                both = first.size + cut.size
                v_both = (*v_shape[: rule.axis], both, *v_shape[rule.axis + 1 :])
                found[-2:] = [
                    replace(first, size=both, v_size=first.v_size + cut.v_size, v_shape=v_both)
                ]
    return found


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
