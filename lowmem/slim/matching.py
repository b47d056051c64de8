"""Rules by name, given to the parameters that they mean."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from lowmem.slim.rulesfile import Axes, Split, rule_to_json
from lowmem.slim.uses import canonical

Rules = Mapping[str, Axes | Split | None]


def plain_name(name: str) -> str:
    """A name as rules and parameters are compared: without wrappers, DDP's included."""
    return canonical(name).removeprefix("module.")


class RuleBook:
    """Rules by plain name.

    Raises:
        ValueError: two names that mean one parameter have different rules.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules: dict[str, Axes | Split | None] = {}
        self.written: dict[str, str] = {}  # as the person wrote the name
        for name, rule in rules.items():
            plain = plain_name(name)
            if plain in self.rules and self.rules[plain] != rule:
                raise ValueError(
                    f"rules {self.written[plain]!r} and {name!r} name one parameter and differ: "
                    f"{rule_to_json(self.rules[plain])} and {rule_to_json(rule)}"
                )
            self.rules[plain], self.written[plain] = rule, name

    def find(self, names: Sequence[str]) -> tuple[bool, Axes | Split | None]:
        """Whether one of a parameter's names has a rule, and that rule.

        Raises:
            ValueError: two names of a tied weight have different rules.
        """
        hits = [plain for plain in dict.fromkeys(map(plain_name, names)) if plain in self.rules]
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
        """Refuse rules for names that are not among ``known``, with the nearest names there."""
        plain = {plain_name(name): name for name in known}
        missing = [name for name in self.rules if name not in plain]
        if not missing:
            return
        lines = []
        for name in missing[:5]:
            near = difflib.get_close_matches(name, plain, n=1)
            hint = f" (nearest: {plain[near[0]]!r})" if near else ""
            lines.append(f"{self.written[name]!r}{hint}")
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"{len(missing)} of {len(self.rules)} rules name no parameter of the optimizer: "
            f"{', '.join(lines)}{more}. Are they for another model? (With model= a tied weight is "
            "known by all its names, and rules may name parameters that are left out.)"
        )
