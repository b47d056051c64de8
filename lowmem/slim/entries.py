"""From what a person passes (rules, a path, a model, a layer map) to one rule a parameter."""

from __future__ import annotations

import copy
import difflib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lowmem.slim.axes import decide_model, decide_names
from lowmem.slim.eager import is_dtensor
from lowmem.slim.matching import RuleBook
from lowmem.slim.rulesfile import Axes, Split, fit_rule, parse_rules, read_rules
from lowmem.slim.table1 import Decision, LayerMap, is_compressible, read_layer_map
from lowmem.slim.uses import canonical, model_names

logger = logging.getLogger(__name__)

_UNNAMED = Decision("unknown", "no name", None, True)


@dataclass
class Entry:
    """A parameter as the optimizer knows it: its names, what it is, and its rule."""

    names: list[str]
    rule: Axes | Split | None
    layer_type: str
    decided_by: str
    reached: bool
    note: str = ""

    @property
    def name(self) -> str | None:
        return self.names[0] if self.names else None


class Resolver:
    """Gives every parameter its ``Entry``.

    Raises, at construction:
        ValueError: more than one source of rules, a bad file.
        TypeError: rules or model of a wrong type.
        OSError: a file that cannot be read.
    """

    def __init__(
        self,
        rules: Mapping[str, Any] | str | os.PathLike[str] | None,
        model: nn.Module | None,
        rules_json_path: str | os.PathLike[str] | None,
        layer_map_path: str | os.PathLike[str] | None,
    ) -> None:
        given = {
            "rules": rules,
            "rules_json_path": rules_json_path,
            "layer_map_path": layer_map_path,
        }
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(f"give one source of rules, not {' and '.join(chosen)}")
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        for name in ("rules_json_path", "layer_map_path"):
            if given[name] is not None and not isinstance(given[name], (str, os.PathLike)):
                raise TypeError(f"{name} must be a path, got {given[name]!r}")

        self.static = rules == "table1" if isinstance(rules, str) else False
        self.book: RuleBook | None = None
        layer_map: LayerMap | None = None
        if layer_map_path is not None:
            self.static, layer_map = True, read_layer_map(layer_map_path)
        elif rules_json_path is not None:
            self.book = RuleBook(read_rules(rules_json_path))
        elif rules is not None and not self.static:
            if isinstance(rules, (str, os.PathLike)):
                _need_file(rules)
                self.book = RuleBook(read_rules(rules))
            else:
                self.book = RuleBook(parse_rules(rules))
        self.layer_map = layer_map

        # By tensor, so that copies and pickles of the optimizer keep them.
        self.names: dict[Tensor, list[str]] = {}
        self.decisions: dict[Tensor, Decision] = {}
        if model is not None:
            names, decisions = model_names(model), decide_model(model, layer_map)
            for param in model.parameters():
                self.names[param] = names[id(param)]
                self.decisions[param] = decisions[id(param)]
        self.with_model = model is not None
        self.every_name = [name for several in self.names.values() for name in several]

    @property
    def ruled(self) -> bool:
        """Whether there are any rules: without, this is plain AdamW."""
        return self.static or self.book is not None

    def resolve(
        self, params: Sequence[tuple[Tensor, list[str]]], known: Sequence[Entry] = ()
    ) -> list[Entry]:
        """Entries for parameters with the names that came with them.

        ``known`` are entries of parameters that the optimizer has already.
        """
        if self.with_model and params and not known:
            self._need_members([param for param, _ in params])
        every = [
            (param, list(dict.fromkeys([*given, *self.names.get(param, [])])))
            for param, given in params
        ]
        if self.static or (self.book is not None and self.book.rules):
            self._need_names(every)
        if self.book is not None:
            names = [name for _, several in every for name in several]
            names += [name for entry in known for name in entry.names]
            self.book.check_names([*names, *self.every_name])
        if self.layer_map is not None and not known:
            self._report_idle_patterns([name for _, several in every for name in several])
        decisions = self._decide(every)
        return [
            self._entry(param, names, decision)
            for (param, names), decision in zip(every, decisions, strict=True)
        ]

    def for_pickling(self, kept: Collection[Tensor]) -> Resolver:
        """A copy that holds no tensors of the model but those that the optimizer has."""
        lean = copy.copy(self)
        lean.names = {p: names for p, names in self.names.items() if p in kept}
        lean.decisions = {p: decision for p, decision in self.decisions.items() if p in kept}
        return lean

    def _report_idle_patterns(self, names: Sequence[str]) -> None:
        assert self.layer_map is not None
        paths = {f".{canonical(name)}." for name in [*names, *self.every_name]}
        idle = [
            f"{pattern!r} ({layer_type})"
            for layer_type, patterns in self.layer_map.items()
            for pattern in patterns
            if not any(f".{pattern}." in path for path in paths)
        ]
        if idle:
            more = f" and {len(idle) - 10} more" if len(idle) > 10 else ""
            logger.warning("the layer map names no parameter by %s%s", ", ".join(idle[:10]), more)

    def _need_members(self, params: Sequence[Tensor]) -> None:
        if not any(param in self.names for param in params):
            raise ValueError(
                f"none of the {len(params)} parameters belongs to model=: it tells the names and "
                "layer types of its own parameters only. Pass the module that these come from"
            )

    def _need_names(self, params: Sequence[tuple[Tensor, list[str]]]) -> None:
        nameless = sum(not names for _, names in params)
        if not nameless:
            return
        start = f"rules go by names, but {nameless} of {len(params)} parameters have none: "
        if self.static:
            raise ValueError(
                f"{start}pass model=model, which also tells every layer's type, or "
                "model.named_parameters(), which reaches only layers that their names give away"
            )
        raise ValueError(
            f"{start}pass model.named_parameters() instead of model.parameters(), or model="
        )

    def _decide(self, params: Sequence[tuple[Tensor, list[str]]]) -> list[Decision]:
        # A name that comes again begins another model: names are evidence within one only.
        models: list[dict[str, tuple[int, ...]]] = [{}]
        found: list[tuple[int, str] | Decision] = []
        for param, names in params:
            if param in self.decisions or not names:
                found.append(self.decisions.get(param, _UNNAMED))
                continue
            if names[0] in models[-1]:
                models.append({})
            models[-1][names[0]] = tuple(param.shape)
            found.append((len(models) - 1, names[0]))
        by_name = [decide_names(shapes, self.layer_map) for shapes in models]
        return [each if isinstance(each, Decision) else by_name[each[0]][each[1]] for each in found]

    def _entry(self, param: Tensor, names: list[str], decision: Decision) -> Entry:
        rule, source, reached, note = None, decision.decided_by, True, ""
        shown = names[0] if names else "parameter"
        if self.static:
            rule = fit_rule(decision.rule, tuple(param.shape), shown)
            reached, note = decision.reached, decision.note
            if isinstance(rule, Split) and is_dtensor(param):
                rule, reached, note = None, False, "a DTensor is not split"
        elif self.book is not None:
            found, rule = self.book.find(names)
            reached = found or not is_compressible(param.shape) or decision.layer_type == "bias"
            reached = reached or decision.layer_type == "norm"
            source = "rule" if found else source
            rule = fit_rule(rule, tuple(param.shape), shown)
            if isinstance(rule, Split) and is_dtensor(param):
                raise ValueError(f"rule for {shown!r}: a DTensor cannot be split; give it one axis")
        return Entry(names, rule, decision.layer_type, source, reached, note)


def _need_file(rules: str | os.PathLike[str]) -> None:
    """Say what ``rules=`` may be where it is a path to nothing, or to a folder."""
    shown = os.fspath(rules)
    if os.path.isdir(shown):
        raise IsADirectoryError(
            f"rules={shown!r} is a folder; rules= takes a rules file, as `lowmem rules --out` "
            'writes it, "table1", or a dict'
        )
    if not os.path.exists(shown):
        near = difflib.get_close_matches(shown, ["table1"], n=1)
        raise FileNotFoundError(
            f'rules={shown!r}: there is no such file; the one choice by name is "table1"'
            f"{' (did you mean that?)' if near else ''}, and rules may be a dict"
        )
