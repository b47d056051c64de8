"""Checkpoints: their rules, what may be loaded into what, and AdamW's state turned into ours.

In ``state_dict()`` each parameter group carries ``"rules"``: a dict of parameter name (or
place, where there are no names) to rule in its JSON form, in the order of ``"params"``.
Everything in it is a tensor, number, string, list or dict, so ``torch.load`` reads it with
``weights_only=True``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.slim.axes import table1_rules
from lowmem.slim.checkpoint_checks import checked_groups, state_faults
from lowmem.slim.entries import Entry
from lowmem.slim.matching import RuleBook, spelled
from lowmem.slim.rulesfile import fit_rule, parse_rule, parse_rules, read_rules, rule_to_json
from lowmem.slim.state import averaged, moment_shape
from lowmem.slim.uses import canonical, model_names

_TORCH_ONLY = (
    "amsgrad",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
)


class Kept:
    """A tensor that ``Optimizer.load_state_dict`` is to leave as it is.

    It casts floating-point state to the parameter's dtype, which would round a float32
    ``exp_avg_sq``; what is neither tensor nor container it passes on untouched.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def rules_entry(entries: Sequence[Entry]) -> dict[str, Any]:
    """The ``"rules"`` of one group."""
    rules: dict[str, Any] = {}
    for place, entry in enumerate(entries):
        name = entry.name if entry.name and entry.name not in rules else str(place)
        rules[name] = rule_to_json(entry.rule)
    return rules


def checked_for_loading(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    entries: Mapping[Tensor, Entry],
) -> dict[str, Any]:
    """A copy of ``state_dict`` that torch may load, once everything in it fits.

    Raises:
        ValueError: other rules, names or shapes than this optimizer's; the first
            differences are in the message, and nothing has changed.
    """
    saved_groups = checked_groups(state_dict)
    loaded = {**state_dict, "param_groups": saved_groups}
    sizes = [len(group["params"]) for group in saved_groups]
    if sizes != [len(group["params"]) for group in groups]:
        return loaded  # torch refuses this with words of its own

    state = dict(state_dict["state"])
    names: list[str] = []
    rules: list[str] = []
    shapes: list[str] = []
    damaged: list[str] = []
    every = {canonical(name) for entry in entries.values() for name in entry.names}
    for group, saved in zip(groups, saved_groups, strict=True):
        for name in _TORCH_ONLY:
            saved.pop(name, None)
        written = saved.pop("rules", None)
        saved_rules = list(written.values()) if isinstance(written, Mapping) else []
        if written is not None and (
            len(saved_rules) != len(group["params"])
            or not all(isinstance(name, str) for name in written)
        ):
            raise ValueError(
                f"the checkpoint is damaged: {len(saved_rules)} rules for "
                f"{len(group['params'])} parameters"
            )
        known = saved.pop("param_names", None) or (list(written) if written else None)
        for place, (param, key) in enumerate(zip(group["params"], saved["params"], strict=True)):
            entry = entries[param]
            shown = entry.name or f"parameter {place}"
            if known and entry.names and not known[place].isdigit():
                mine = {canonical(name) for name in entry.names}
                if spelled(known[place], every) not in mine:
                    names.append(f"{known[place]} in the file, {shown} here")
            if written is not None:
                theirs, ours = saved_rules[place], rule_to_json(entry.rule)
                if _plain(theirs, param) != _plain(ours, param):
                    rules.append(f"{shown}: {_short(theirs)} in the file, {_short(ours)} here")
            if key in state and state[key] != {}:
                faults = state_faults(state[key])
                if faults:
                    damaged.append(f"{shown}: {'; '.join(faults)}")
                    continue
                state[key], wrong = _checked_state(state[key], param, entry, shown)
                shapes += wrong
    _refuse("of another model", "names", names)
    if damaged:
        more = f" (and {len(damaged) - 5} parameters more)" if len(damaged) > 5 else ""
        raise ValueError(f"the checkpoint is damaged: {'; '.join(damaged[:5])}{more}")
    _refuse("of another model", "shapes", [each for each in shapes if ": exp_avg is" in each])
    _refuse("made with other rules", "rules", rules)
    hint = ""
    if all("rules" not in group for group in state_dict["param_groups"]):
        hint = (
            ". An AdamW checkpoint becomes one of SlimAdamW by "
            "lowmem.slim.checkpoint.compress_state_dict(state, rules)"
        )
    _refuse("of another model or other rules", "shapes", shapes, hint)
    loaded["state"] = state
    return loaded


def unwrapped(state: Mapping[Any, Any]) -> None:
    """Put float32 second moments and CPU step counts in the place of their ``Kept``."""
    for param, values in state.items():
        if not isinstance(values, dict):
            continue
        for key, value in values.items():
            if isinstance(value, Kept):
                device = "cpu" if key == "step" else param.device
                values[key] = value.tensor.to(device=device, dtype=torch.float32)


def compress_state_dict(
    adamw_state: Mapping[str, Any],
    rules: Mapping[str, Any] | str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Turn the ``state_dict`` of a running ``torch.optim.AdamW`` into one of ``SlimAdamW``.

    Args:
        adamw_state: ``AdamW(...).state_dict()``; it is left as it is.
        rules: Rules by name, a rules file, or ``"table1"`` (needs ``model``).
        model: Tells the parameters' names where the checkpoint does not carry them, for an
            AdamW made from ``model.parameters()``.
        names: Or the names themselves, in the order of the checkpoint's parameters.

    Returns:
        A state_dict for a ``SlimAdamW`` with the same groups and rules. First moments and
        steps are the checkpoint's own tensors, second moments are averaged, in float32.

    Raises:
        ValueError: no names, names or shapes that do not fit, amsgrad, Adam with L2 decay.
    """
    groups = checked_groups(adamw_state)
    keys = list(chain.from_iterable(group["params"] for group in groups))
    known = _names_of(groups, keys, model, names)
    if isinstance(rules, str) and rules == "table1":
        if model is None:
            raise ValueError('rules="table1" needs model=, so that module types decide')
        parsed = table1_rules(model)
    elif isinstance(rules, (str, os.PathLike)):
        parsed = read_rules(rules)
    else:
        parsed = parse_rules(rules)
    book = RuleBook(parsed)
    aliases = {several[0]: several for several in model_names(model).values()} if model else {}
    book.check_names([*known.values(), *chain.from_iterable(aliases.values())])

    state: dict[Any, Any] = {}
    fitted: dict[Any, Any] = {}
    for key in keys:
        _, rule = book.find([known[key], *aliases.get(spelled(known[key], aliases) or "", [])])
        values = adamw_state["state"].get(key, {})
        if values == {}:
            fitted[key] = rule
            continue
        faults = state_faults(values)
        if not faults and values["exp_avg"].shape != values["exp_avg_sq"].shape:
            m, v = (tuple(values[name].shape) for name in ("exp_avg", "exp_avg_sq"))
            faults = [f"exp_avg is {m} and exp_avg_sq {v}: they are not AdamW's"]
        if faults:
            raise ValueError(f"{known[key]}: {'; '.join(faults)}")
        v = values["exp_avg_sq"]
        fitted[key] = fit_rule(rule, tuple(v.shape), known[key])
        state[key] = {
            "step": values["step"],
            "exp_avg": values["exp_avg"],
            "exp_avg_sq": averaged(v, fitted[key]),
        }
    for group in groups:
        for name in _TORCH_ONLY:
            group.pop(name, None)
        group["rules"] = {known[key]: rule_to_json(fitted[key]) for key in group["params"]}
    return {"state": state, "param_groups": groups}


def _names_of(
    groups: Sequence[Mapping[str, Any]],
    keys: Sequence[Any],
    model: nn.Module | None,
    names: Sequence[str] | None,
) -> dict[Any, str]:
    if names is None and all("param_names" in group for group in groups):
        names = list(chain.from_iterable(group["param_names"] for group in groups))
    elif names is None and model is not None and len(groups) == 1:
        names = [name for name, _ in model.named_parameters()]
    if names is None:
        raise ValueError(
            "the checkpoint has no parameter names, and rules go by names: pass model= (an AdamW "
            "made from model.parameters()) or names= (one a parameter, in the checkpoint's order)"
        )
    if len(names) != len(keys):
        raise ValueError(f"{len(names)} names for {len(keys)} parameters in the checkpoint")
    return dict(zip(keys, names, strict=True))


def _checked_state(
    values: Mapping[str, Any], param: Tensor, entry: Entry, shown: str
) -> tuple[dict[str, Any], list[str]]:
    kept, wrong = dict(values), []
    if "max_exp_avg_sq" in kept:
        raise ValueError(f"{shown}: the checkpoint uses amsgrad, which SlimAdamW has not")
    shapes = {
        "exp_avg": tuple(param.shape),
        "exp_avg_sq": moment_shape(entry.rule, tuple(param.shape)),
    }
    for name, shape in shapes.items():
        found = tuple(kept[name].shape)
        if found != shape:
            wrong.append(f"{shown}: {name} is {found} in the file, {shape} here")
    if not wrong:
        kept["exp_avg_sq"] = Kept(kept["exp_avg_sq"])
        kept["step"] = Kept(torch.tensor(float(kept["step"])))
    return kept, wrong


def _plain(rule: Any, param: Tensor) -> Any:
    """A rule for comparing: parts without their names, axes in order."""
    try:
        parsed = fit_rule(parse_rule(rule, "checkpoint"), tuple(param.shape), "checkpoint")
    except (TypeError, ValueError):
        return rule  # of a parameter of another shape
    fitted = rule_to_json(parsed)
    if isinstance(fitted, dict):
        for part in fitted["parts"]:
            part.pop("name", None)
    return fitted


def _short(rule: Any) -> str:
    text = "whole" if rule is None else str(rule)
    return text if len(text) <= 80 else text[:77] + "..."


def _refuse(what: str, of: str, differences: Sequence[str], hint: str = "") -> None:
    if differences:
        more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"the checkpoint is {what}: {len(differences)} {of} differ: "
            f"{'; '.join(differences[:5])}{more}{hint}"
        )
