"""Figures as people read them, and the columns of a result's table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNITS = ("text", "count", "number", "s", "bytes", "bytes/s", "rows/s", "ratio", "share")


@dataclass(frozen=True)
class Column:
    """One column of a result's table.

    Attributes:
        key: of the figure in a row.
        title: its heading; a line break in it is one in a terminal's table.
        unit: one of ``UNITS``.
        regimes: whose tables show it; all, if there are none.
    """

    key: str
    title: str
    unit: str = "number"
    regimes: tuple[str, ...] = ()

    def shown(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Is it for these rows, and does one of them have a figure that is not zero?

        Only the bytes and faults of what did not happen are left out for being zero.
        """
        if self.regimes and not any(row.get("regime") in self.regimes for row in rows):
            return False
        values = [row[self.key] for row in rows if row.get(self.key) is not None]
        idle = self.unit == "bytes" or self.key.endswith("_faults")
        return any(values) if idle else bool(values)

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unknown unit {self.unit!r} of column {self.key!r}; know {UNITS}")


def format_value(value: Any, unit: str) -> str:
    """A figure as people read it: ``62.1 ms``, ``1.24 GB``, ``8.6 M/s``, ``0.71``."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if unit == "text":
        return str(value)
    if unit == "count":
        return f"{int(value):,}"
    if unit == "share":
        return f"{value * 100:.0f} %" if value >= 0.1 else f"{value * 100:.2g} %"
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor or name == "µs":
                return f"{_digits(value / factor)} {name}"
    if unit in ("bytes", "bytes/s", "rows/s"):
        base, rate = (
            ("B" if unit.startswith("bytes") else ""),
            ("/s" if unit.endswith("/s") else ""),
        )
        for factor, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= factor:
                return f"{_digits(value / factor)} {name}{base}{rate}"
        return f"{_digits(value)} {base}{rate}".rstrip()
    return _digits(value)


def _digits(value: float) -> str:
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.2f}"
    )
