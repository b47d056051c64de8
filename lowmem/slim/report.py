"""What SlimAdamW does with each parameter, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowmem.slim.rulesfile import Axes, Split
from lowmem.units import short_bytes


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        name: The parameter's name, or its place in the optimizer where it has none.
        shape: Its (global) shape.
        layer_type: What it was recognised as.
        decided_by: What that rests on: the module, a name, the layer map, a rule, the shape.
        axes: The axes that its second moment is averaged over, ``None`` where none; a
            ``Split`` where parts of it have axes of their own.
        bytes_before: Bytes of the second moment in ``torch.optim.AdamW``.
        bytes_after: Bytes of the second moment here; float32 always.
        bytes_first: Bytes of the first moment, the same in both.
        reached: False for a parameter that could be averaged and that no rule reaches.
        note: Why, where there is something to say.
    """

    name: str
    shape: tuple[int, ...]
    layer_type: str
    decided_by: str
    axes: Axes | Split | None
    bytes_before: int
    bytes_after: int
    bytes_first: int
    reached: bool = True
    note: str = ""

    def axes_text(self) -> str:
        """The axes as people read them, ``"axis 1"``, ``"axes 0, 1"`` or ``"-"``.

        A split says it part by part, ``"query, key: axis 1; value: axis 0"``, with the number
        of times in front where the list of parts comes more than once.
        """
        if not isinstance(self.axes, Split):
            return "-" if self.axes is None else _axes(self.axes)
        alike: dict[str, list[str]] = {}
        for number, part in enumerate(self.axes.parts, 1):
            name = part.name or f"part {number} ({part.size} of axis {self.axes.axis})"
            text = "-" if part.axes is None else _axes(part.axes)
            alike.setdefault(text, []).append(name)
        parts = "; ".join(f"{', '.join(names)}: {text}" for text, names in alike.items())
        return f"{self.axes.repeat} x ({parts})" if self.axes.repeat > 1 else parts


class Report(Sequence[Row]):
    """One ``Row`` a parameter, in the optimizer's order, and the totals.

    Bytes are what the state takes once every parameter has had a gradient; the step counts
    (four bytes a parameter, in AdamW as here) are not in them.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = tuple(rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def bytes_before(self) -> int:
        """Bytes of all second moments in ``torch.optim.AdamW``."""
        return sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int:
        """Bytes of all second moments here."""
        return sum(row.bytes_after for row in self.rows)

    @property
    def state_bytes_before(self) -> int:
        """Bytes of both moments in ``torch.optim.AdamW``."""
        return self.bytes_before + sum(row.bytes_first for row in self.rows)

    @property
    def state_bytes_after(self) -> int:
        """Bytes of both moments here."""
        return self.bytes_after + sum(row.bytes_first for row in self.rows)

    @property
    def second_moment_saved(self) -> float:
        """Share of the second moment that is saved, 0 to 1 (below 0 for half-precision
        parameters that are not averaged: their float32 moment is larger than AdamW's)."""
        return _saved(self.bytes_before, self.bytes_after)

    @property
    def state_saved(self) -> float:
        """Share of the whole state, both moments, that is saved."""
        return _saved(self.state_bytes_before, self.state_bytes_after)

    @property
    def unreached(self) -> list[str]:
        """Parameters that could be averaged and that no rule reaches."""
        return [row.name for row in self.rows if not row.reached]

    def __str__(self) -> str:
        head = ("parameter", "shape", "layer", "decided by", "averaged over", "before", "after")
        table = [head]
        for row in self.rows:
            mark = "" if row.reached else " (no rule)"
            shape = "x".join(map(str, row.shape)) or "scalar"
            axes = row.axes_text() + mark
            before, after = short_bytes(row.bytes_before), short_bytes(row.bytes_after)
            table.append((row.name, shape, row.layer_type, row.decided_by, axes, before, after))
        widths = [max(len(line[column]) for line in table) for column in range(len(head))]
        lines = []
        for line in table:
            cells = [
                text.rjust(width) if column >= 5 else text.ljust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(
            f"second moment: {short_bytes(self.bytes_before)} -> {short_bytes(self.bytes_after)}, "
            f"{self.second_moment_saved:.2%} saved"
        )
        lines.append(
            f"whole state:   {short_bytes(self.state_bytes_before)} -> "
            f"{short_bytes(self.state_bytes_after)}, {self.state_saved:.2%} saved"
        )
        if self.unreached:
            lines.append(f"no rule reaches {len(self.unreached)}: {some_names(self.unreached)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<Report: {len(self.rows)} parameters, {self.second_moment_saved:.2%} of the second "
            f"moment and {self.state_saved:.2%} of the state saved>"
        )


def _saved(before: int, after: int) -> float:
    return 1 - after / before if before else 0.0


def _axes(axes: Axes) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"


def some_names(names: Sequence[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
