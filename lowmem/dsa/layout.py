"""RowLayout: which fields a row of a store has, their dtypes and where their bytes lie.

This is the one owner of that knowledge. The store asks it for views, the kernels get
offsets from it, and the header of a file carries it, so a field added here (bfloat16
moments, one second moment a row, the weights themselves) needs no second code path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# Little-endian on disk, whatever the machine: a store moves between machines.
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "int32": np.dtype("<i4"),
}


@dataclass(frozen=True)
class Field:
    """One field of a row: ``count`` values of ``dtype``."""

    name: str
    dtype: str
    count: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(
                f"field {self.name!r} has dtype {self.dtype!r}; a row holds {', '.join(DTYPES)}"
            )
        if self.count < 1:
            raise ValueError(f"field {self.name!r} has {self.count} values; it needs at least 1")

    @property
    def bytes(self) -> int:
        return DTYPES[self.dtype].itemsize * self.count


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, side by side in this order, without padding."""

    fields: tuple[Field, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a row needs fields with names of their own, not {names}")

    @classmethod
    def adam(cls, dim: int) -> RowLayout:
        """Adam's two moments of a row of ``dim`` weights, side by side: one place on disk."""
        return cls((Field("exp_avg", "float32", dim), Field("exp_avg_sq", "float32", dim)))

    @property
    def row_bytes(self) -> int:
        return sum(field.bytes for field in self.fields)

    def offset(self, name: str) -> int:
        """Where a field starts, in bytes from the start of its row."""
        start = 0
        for field in self.fields:
            if field.name == name:
                return start
            start += field.bytes
        raise KeyError(f"a row has no field {name!r}; it has {[f.name for f in self.fields]}")

    def views(self, buffer: np.ndarray, rows: int) -> dict[str, np.ndarray]:
        """Arrays ``(rows, count)`` over ``buffer`` (uint8, ``rows * row_bytes``), one a field."""
        table = buffer.reshape(rows, self.row_bytes)
        return {
            field.name: table[:, start : start + field.bytes].view(DTYPES[field.dtype])
            for field in self.fields
            for start in (self.offset(field.name),)
        }

    def to_json(self) -> list[dict[str, Any]]:
        return [{"name": f.name, "dtype": f.dtype, "count": f.count} for f in self.fields]

    @classmethod
    def from_json(cls, items: Any) -> RowLayout:
        """The layout that a header holds; ``ValueError`` for anything else."""
        if not isinstance(items, list) or not 0 < len(items) <= 16:
            raise ValueError(f"a layout is a list of 1 to 16 fields, not {items!r:.80}")
        fields = []
        for item in items:
            if not isinstance(item, Mapping) or set(item) != {"name", "dtype", "count"}:
                raise ValueError(f"a field has name, dtype and count, not {item!r:.80}")
            name, dtype, count = item["name"], item["dtype"], item["count"]
            if not isinstance(name, str) or not isinstance(dtype, str) or type(count) is not int:
                raise ValueError(f"a field has a name, a dtype and a whole count, not {item!r:.80}")
            if count > 1 << 24:
                raise ValueError(f"field {name!r:.40} claims {count} values a row")
            fields.append(Field(name, dtype, count))
        return cls(tuple(fields))

    def __str__(self) -> str:
        return " + ".join(f"{f.name}: {f.dtype}[{f.count}]" for f in self.fields)
