"""Rules by name, given to the parameters that they mean."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence

from lowmem.slim.rulesfile import Axes, Split, rule_to_json
from lowmem.slim.uses import canonical

Rules = Mapping[str, Axes | Split | None]

_DDP = "module."


def spelled(name: str, known: Container[str]) -> str | None:
    """How ``known`` (canonical names) spells ``name``: as it is, or with or without DDP's prefix.

    A name that stands there as it is means just that: a submodule may be called ``module``.
    """
    exact = canonical(name)
    for each in (exact, exact.removeprefix(_DDP), _DDP + exact):
        if each in known:
            return each
    return None


class RuleBook:
    """Rules by canonical name; ``check_names`` finds the parameters' names for them.

    Raises:
        ValueError: two names that mean one parameter have different rules.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules: dict[str, Axes | Split | None] = {}
        self.written: dict[str, str] = {}  # as the person wrote the name
        self._of: dict[str, str] = {}  # a parameter's name to that of its rule
        for name, rule in rules.items():
            exact = canonical(name)
            if exact in self.rules:
                self._same(exact, name, self.rules[exact], rule)
            else:
                self.rules[exact], self.written[exact] = rule, name

    def _same(
        self, first: str, other: str, rule: Axes | Split | None, another: Axes | Split | None
    ) -> None:
        if rule != another:
            raise ValueError(
                f"rules {self.written[first]!r} and {other!r} name one parameter and differ: "
                f"{rule_to_json(rule)} and {rule_to_json(another)}"
            )

    def find(self, names: Sequence[str]) -> tuple[bool, Axes | Split | None]:
        """Whether one of a parameter's names has a rule, and that rule.

        Raises:
            ValueError: two names of a tied weight have different rules.
        """
        found = [self._of[name] for name in map(canonical, names) if name in self._of]
        hits = list(dict.fromkeys(found))
        if not hits:
            return False, None
        rule = self.rules[hits[0]]
        for other in hits[1:]:
            if self.rules[other] != rule:
                raise ValueError(
                    f"{self.written[hits[0]]!r} and {self.written[other]!r} are one tied weight, "
                    f"but their rules differ: {rule_to_json(rule)} and "
                    f"{rule_to_json(self.rules[other])}"
                )
        return True, rule

    def check_names(self, known: Iterable[str]) -> None:
        """Find every rule's parameter among ``known``, all the names that there are.

        Raises:
            ValueError: rules for names that are not there (with the nearest that are), or
                two different ones for one.
        """
        names = {canonical(name): name for name in known}
        missing = []
        self._of = {}
        for rule_name in sorted(self.rules, key=lambda name: name not in names):  # exact ones first
            name = spelled(rule_name, names)
            if name is None:
                missing.append(rule_name)
                continue
            first = self._of.setdefault(name, rule_name)
            self._same(first, self.written[rule_name], self.rules[first], self.rules[rule_name])
        if not missing:
            return
        lines = []
        for name in missing[:5]:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" (nearest: {names[near[0]]!r})" if near else ""
            lines.append(f"{self.written[name]!r}{hint}")
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"{len(missing)} of {len(self.rules)} rules name no parameter of the optimizer: "
            f"{', '.join(lines)}{more}. Are they for another model? (With model= a tied weight is "
            "known by all its names, and rules may name parameters that are left out.)"
        )
