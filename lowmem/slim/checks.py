"""What SlimAdamW is given, checked at construction, so that nothing fails in training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.slim.eager import is_dtensor
from lowmem.slim.uses import refuse_lazy


def listed(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Groups as dicts with lists, each tensor once a group, its further names beside it."""
    if isinstance(params, Tensor):
        raise TypeError(
            "params must be an iterable of tensors, named tensors or groups, got one tensor"
        )
    members = list(params)
    if not members:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(members[0], dict):
        members = [{"params": members}]
    groups = []
    for member in members:
        if not isinstance(member, dict) or "params" not in member:
            raise TypeError(f"a parameter group must be a dict with 'params', got {member!r:.80}")
        inside = member["params"]
        if isinstance(inside, set):
            raise TypeError("parameters need an order that stays: pass a list, not a set")
        listed = [inside] if isinstance(inside, Tensor) else list(inside)
        once: dict[int, Any] = {}
        aliases: dict[int, list[str]] = {}
        for each in listed:
            if id(tensor_of(each)) in once and isinstance(each, tuple):
                aliases.setdefault(id(tensor_of(each)), []).append(each[0])
            once.setdefault(id(tensor_of(each)), each)
        group = {**member, "params": list(once.values())}
        if aliases:
            group["names_of_duplicates"] = aliases
        groups.append(group)
    return groups


def tensor_of(member: Any) -> Any:
    return member[1] if isinstance(member, tuple) and len(member) == 2 else member


def check_hyper_parameters(values: Mapping[str, Any]) -> None:
    lr = values["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be a number or a tensor of one element, got shape {lr.shape}")
    betas = values["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers, got {betas!r}")
    named = {"lr": lr, "eps": values["eps"], "weight_decay": values["weight_decay"]}
    for name, value in named.items():
        if not 0.0 <= _number(name, value) < math.inf:
            raise ValueError(f"Invalid {name}: {value}; it must be 0 or more")
    if not isinstance(values.get("maximize", False), bool):
        raise TypeError(f"maximize must be True or False, got {values['maximize']!r:.80}")
    for place, beta in enumerate(betas):
        if not 0.0 <= _number(f"betas[{place}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {place}: {beta}; 0 <= beta < 1")


def _number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or value is None:
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a number, got {value!r:.80}") from None


def refuse_param(param: Tensor, names: list[str]) -> None:
    refuse_lazy(param, repr(names[0]) if names else "a parameter")
    shown = repr(names[0]) if names else f"a parameter of shape {tuple(param.shape)}"
    if param.is_complex():
        raise ValueError(
            f"{shown} is complex ({param.dtype}); SlimAdamW takes real parameters: optimise "
            "torch.view_as_real of it"
        )
    if param.layout is not torch.strided and not is_dtensor(param):
        raise ValueError(f"{shown} has layout {param.layout}; SlimAdamW takes dense parameters")
    if param.is_leaf and param.grad is not None and param.grad.layout is not torch.strided:
        raise ValueError(refused_gradient(shown, param.grad))


def refuse_sparse_modules(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    taken = {id(tensor_of(member)) for group in groups for member in group["params"]}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) is True and id(weight) in taken and weight is not None:
            if not weight.requires_grad:
                continue
            raise ValueError(
                f"{name + '.weight'!r} will have sparse gradients ({type(module).__name__} with "
                "sparse=True); give it to lowmem.DSA, or make the module with sparse=False"
            )


def refused_gradient(shown: str, grad: Tensor) -> str:
    if grad.is_complex():
        return f"{shown} has a complex gradient; SlimAdamW takes real ones"
    return (
        f"{shown} has a sparse gradient ({grad.layout}); SlimAdamW takes dense ones: give the "
        "table to lowmem.DSA, or make the module with sparse=False"
    )
