"""Static rules: which layer a parameter is, and over which axes its second moment is averaged.

Table 1 speaks of fan-in and fan-out; the module that owns a weight turns them into tensor
axes. The module's type decides what it can, a name decides the rest, and what neither
recognises is not averaged, and is reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from lowmem.slim.recognise import Judge
from lowmem.slim.rulesfile import Axes, Split
from lowmem.slim.table1 import Decision, LayerMap
from lowmem.slim.uses import uses_of_model, uses_of_names


def table1_rules(model: nn.Module) -> dict[str, Axes | Split | None]:
    """Table 1 for every parameter of ``model``, in the form that a rules file has.

    Tied weights stand under their first name.
    """
    decisions = decide_model(model)
    first: dict[int, str] = {}
    for use in uses_of_model(model):
        first.setdefault(use.key, use.name)
    return {name: decisions[key].rule for key, name in first.items()}


def decide_model(model: nn.Module, layer_map: LayerMap | None = None) -> dict[int, Decision]:
    """A decision for every parameter, by the tensor's ``id``.

    A tied weight is decided once: where two of its uses ask for different axes, it is kept
    whole. ``layer_map`` overrules what the modules say where one of its patterns matches.
    """
    decided: dict[int, list[Decision]] = defaultdict(list)
    uses = uses_of_model(model)
    judge = Judge(uses)
    for use in uses:
        decided[use.key].append(judge.by_map(use, layer_map) or judge.decide(use))
    return {key: _join(several) for key, several in decided.items()}


def decide_names(
    shapes: Mapping[str, tuple[int, ...]], layer_map: LayerMap | None = None
) -> dict[str, Decision]:
    """A decision for every name, where no model is at hand. Weights are taken as (out, in)."""
    uses = uses_of_names(shapes)
    judge = Judge(uses)
    return {
        name: judge.by_map(use, layer_map) or judge.decide(use)
        for name, use in zip(shapes, uses, strict=True)
    }


def _join(several: list[Decision]) -> Decision:
    known = [decision for decision in several if decision.reached] or several
    first = known[0]
    if all(decision.rule == first.rule for decision in known):
        types = list(dict.fromkeys(decision.layer_type for decision in known))
        if len(types) == 1:
            return first
        return Decision(types[0], first.decided_by, first.rule, first.reached, f"tied: {types}")
    uses = ", ".join(f"{d.layer_type} {d.rule}" for d in known)
    return Decision(first.layer_type, first.decided_by, None, False, f"tied uses disagree: {uses}")
