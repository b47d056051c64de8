"""Where the second moments of a model are: in which optimizer state, and in what pieces."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, nn

from lowmem.slim.axes import decide_model
from lowmem.slim.records import PartKey
from lowmem.slim.rulesfile import Split

logger = logging.getLogger(__name__)

Axes = tuple[int, ...]

_KEYS = ("exp_avg_sq", "nu")  # torch's name and ours; the published code's


@dataclass(frozen=True)
class SecondMoment:
    """One second moment, or one part of a split one, as the SNR is measured on it.

    Attributes:
        key: The parameter's name, or a ``PartKey``'s text.
        shape: The shape that records show.
        values: The numbers, a view on the optimizer's state.
        out_axis: The axis of the output channels where this is a convolution; the other of
            the first two are the input's, the rest a kernel's area.
        repeat_axis: Where ``values`` has one more axis than ``shape``: the repetitions of a
            part, which stand before this axis of ``shape`` and are never averaged over.
    """

    key: str
    shape: tuple[int, ...]
    values: Tensor
    out_axis: int | None = None
    repeat_axis: int | None = None

    def axis_sets(self, all_axes: bool = False) -> list[Axes]:
        """The axis sets to measure, counted in ``shape``; none that would average nothing."""
        dims = len(self.shape)
        if all_axes or dims <= 2:
            sets = _subsets(range(dims))
        elif self.out_axis is not None:
            area = tuple(range(2, dims))
            sets = [(self.out_axis,), area, (1, *area), (0, *area), (0, 1, *area)]
        else:  # a stack of matrices, one an expert, or one for a leading axis of size 1
            sets = _subsets((dims - 2, dims - 1))
        return [axes for axes in sets if math.prod(self.shape[axis] for axis in axes) > 1]

    def view_axes(self, axes: Axes) -> Axes:
        """Axes of ``shape`` as axes of ``values``."""
        if self.repeat_axis is None:
            return axes
        return tuple(axis + (axis >= self.repeat_axis) for axis in axes)


def splits_of(model: nn.Module) -> dict[int, Split]:
    """The parameters of ``model`` that are several weights in one, by the tensor's ``id``."""
    decisions = decide_model(model)
    return {key: d.rule for key, d in decisions.items() if isinstance(d.rule, Split)}


def foreign(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What to say where parameters of ``optimizer`` are none of ``model``'s; empty otherwise.

    Raises:
        ValueError: not one of them is.
    """
    groups = getattr(optimizer, "param_groups", ())
    held = {id(param) for group in groups for param in group["params"]}
    others = len(held - {id(param) for _, param in model.named_parameters()})
    names = f"this {type(optimizer).__name__}", f"this {type(model).__name__}"
    if 0 < len(held) == others:
        raise ValueError(
            f"none of the {others} parameters of {names[0]} is one of {names[1]}: pass model= the "
            "very module whose parameters the optimizer was given, not a copy of it or one that "
            "was made anew"
        )
    if not others:
        return ""
    return (
        f"{others} of the {len(held)} parameters of {names[0]} are not of {names[1]} and are not "
        "measured: pass model= a module that holds them all, for two models "
        "torch.nn.ModuleList([one, other])"
    )


def second_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, splits: Mapping[int, Split]
) -> tuple[list[SecondMoment], list[str]]:
    """The second moments that ``optimizer`` holds for the named parameters of ``model``.

    Means are no second moments to measure: they are equal along the axes that they were
    taken over, whatever the gradients were, and vary less over the others than what they
    stand for.

    Args:
        splits: From ``splits_of(model)``; these parameters come part by part.

    Returns:
        The second moments, and the names of parameters of which the optimizer holds means
        in place of one.

    Raises:
        ValueError: the optimizer has state, but no second moment in it.
    """
    modules = dict(model.named_modules())
    rule_of = getattr(optimizer, "rule", None)  # SlimAdamW's: how it has cut a parameter
    found: list[SecondMoment] = []
    averaged: list[str] = []
    others = False
    for full_name, param in model.named_parameters():
        if param not in optimizer.state:
            continue
        state = optimizer.state[param]
        v = next((state[key] for key in _KEYS if isinstance(state.get(key), Tensor)), None)
        if v is None:
            others = others or bool(state)
        elif v.numel() > 0 and v.dim() > 0:
            owner = modules.get(full_name.rpartition(".")[0])
            name = plain_name(full_name)
            cut = rule_of(param) if callable(rule_of) else None
            if isinstance(cut, Split) or _is_averaged(param, v):
                averaged.append(name)
            else:
                found += _pieces(name, param, v, owner, splits.get(id(param)))
    if not found and not averaged and others:
        raise ValueError(
            f"{type(optimizer).__name__} keeps no second moment per parameter "
            f"({' or '.join(_KEYS)}); SNR is measured on Adam's. Calibrate with AdamW or SlimAdamW"
        )
    return found, averaged


def plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` puts in front of it."""
    return ".".join(piece for piece in name.split(".") if piece != "_orig_mod")


def _is_averaged(param: Tensor, v: Tensor) -> bool:
    return v.dim() == param.dim() and any(
        kept == 1 and size != 1 for kept, size in zip(v.shape, param.shape, strict=True)
    )


def _pieces(
    name: str, param: Tensor, v: Tensor, owner: nn.Module | None, split: Split | None
) -> list[SecondMoment]:
    if v.shape == param.shape and split is not None:
        return _parts(name, v, split)
    if v.dim() != param.dim():
        logger.debug("%s: a second moment of shape %s is not measured", name, tuple(v.shape))
        return []
    out_axis = None
    if isinstance(owner, nn.modules.conv._ConvNd) and v.dim() > 2:
        out_axis = int(owner.transposed)
    return [SecondMoment(name, tuple(v.shape), v, out_axis)]


def _part_keys(name: str, split: Split) -> list[PartKey]:
    return [
        PartKey(
            name, part.name or "part", index, len(split.parts), split.axis, part.size, split.repeat
        )
        for index, part in enumerate(split.parts)
    ]


def _parts(name: str, v: Tensor, split: Split) -> list[SecondMoment]:
    pieces, start = [], 0
    period = split.length // split.repeat
    for key, part in zip(_part_keys(name, split), split.parts, strict=True):
        shape = list(v.shape)
        shape[split.axis] = part.size * split.repeat
        if split.repeat == 1:
            values, repeat_axis = v.narrow(split.axis, start, part.size), None
        else:
            lists = v.unflatten(split.axis, (split.repeat, period))
            values, repeat_axis = lists.narrow(split.axis + 1, start, part.size), split.axis
        start += part.size
        pieces.append(SecondMoment(str(key), tuple(shape), values, repeat_axis=repeat_axis))
    return pieces


def _subsets(axes: Sequence[int]) -> list[Axes]:
    return [chosen for size in range(1, len(axes) + 1) for chosen in combinations(axes, size)]
