"""What a checkpoint holds, held to what a step needs, before anything of it is taken over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem.slim.checks import check_hyper_parameters
from lowmem.slim.eager import is_dtensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


def checked_groups(state_dict: Any) -> list[dict[str, Any]]:
    """Copies of a state_dict's groups, once they are groups that AdamW's step can do with.

    Raises:
        ValueError: no state_dict; a group without parameters or hyper-parameters, or with bad
            ones; names that do not go with the parameters; amsgrad; Adam's L2 decay.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("this is no optimizer state_dict: it lacks 'state' or 'param_groups'")
    state, groups = state_dict["state"], state_dict["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, (list, tuple)):
        raise ValueError(
            "this is no optimizer state_dict: 'state' must be a dict and 'param_groups' a list, "
            f"got {type(state).__name__} and {type(groups).__name__}"
        )
    for number, group in enumerate(groups):
        _check_group(group, f"the checkpoint's group {number}")
    return [dict(group) for group in groups]


def _check_group(group: Any, shown: str) -> None:
    if not isinstance(group, Mapping) or not isinstance(group.get("params"), (list, tuple)):
        raise ValueError(f"{shown} is no parameter group: {group!r:.80}")
    if not all(isinstance(key, (int, str)) for key in group["params"]):
        raise ValueError(f"{shown} must hold numbers of parameters, got {group['params']!r:.80}")
    if len(set(group["params"])) != len(group["params"]):
        raise ValueError(f"{shown} holds a parameter twice: {group['params']!r:.80}")
    missing = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
    if missing:
        raise ValueError(f"{shown} lacks {', '.join(missing)}: it is not of an Adam optimizer")
    try:
        check_hyper_parameters(group)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{shown}: {error}") from None
    names = group.get("param_names")
    if names is not None and not (
        isinstance(names, (list, tuple))
        and len(names) == len(group["params"])
        and all(isinstance(name, str) for name in names)
    ):
        raise ValueError(
            f"{shown}: param_names must be one string for each of {len(group['params'])} "
            f"parameters, got {names!r:.80}"
        )
    if group.get("amsgrad"):
        raise ValueError("the checkpoint uses amsgrad, which SlimAdamW has not")
    if group.get("decoupled_weight_decay") is False and group["weight_decay"]:
        raise ValueError(
            f"the checkpoint is of Adam with an L2 weight_decay of {group['weight_decay']}; "
            "SlimAdamW's decay is AdamW's"
        )


def state_faults(values: Any) -> list[str]:
    """What no step can do with in one parameter's state, in words; shapes are not looked at."""
    if not isinstance(values, Mapping):
        return [f"its state is {values!r:.80}, not a dict"]
    faults = []
    for name in _MOMENTS:
        if name not in values:
            faults.append(f"it has no {name} (there are {', '.join(map(str, values)) or 'none'})")
        else:
            faults += [f"{name} {fault}" for fault in _moment_fault(values[name], name)]
    if "step" not in values:
        faults.append("it has no step")
    elif not _is_count(values["step"]):
        faults.append(f"step is {values['step']!r:.80}, and must be one whole number of 0 or more")
    return faults


def _moment_fault(value: Any, name: str) -> Sequence[str]:
    if not isinstance(value, Tensor):
        return [f"is {value!r:.80}, not a tensor"]
    if value.layout is not torch.strided and not is_dtensor(value):
        return [f"has layout {value.layout}, and must be dense"]
    if not value.is_floating_point() or value.element_size() < 2:
        return [f"is of {value.dtype}, and must be of real floating-point numbers"]
    if name == "exp_avg_sq" and value.numel() and value.device.type != "meta":
        whole: Any = value
        local = whole.to_local() if is_dtensor(value) else whole
        least = float(local.amin()) if local.numel() else 0.0
        if least < 0:
            return [f"has negative elements, down to {least:g}: it is a mean of squares"]
    return []


def _is_count(step: Any) -> bool:
    if isinstance(step, Tensor):
        if step.numel() != 1 or step.is_complex() or step.layout is not torch.strided:
            return False
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, (int, float)):
        return False
    return 0 <= step < math.inf and step == int(step)
