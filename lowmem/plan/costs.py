"""Bytes of every choice: the one place that knows what each optimizer holds.

The terms in rows are exact. The working memory of a step was counted from the
optimizers' own temporaries and is held to measured peaks by ``tests/test_plan_measured.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lowmem.plan.access import expected_unique
from lowmem.plan.machine import RESOURCES

PARTS = ("weights", "gradients", "moments", "working", "runtime")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TABLE_CHOICES = ("Adam", "SparseAdam", "DSA")
DENSE_CHOICES = ("AdamW", "SlimAdamW")

# The published static rules on GPT-2 124M save 99.88 % of the second moment.
STATIC_RULES_SHARE = 0.0012

_HEADER_BYTES = 4096
_MOMENT_BYTES = 4  # DSA's and SlimAdamW's second moments are float32
_INDEX_BYTES = 8
# glibc gives blocks of this size back to the system at once; smaller ones it keeps.
_KEPT_BLOCK_BYTES = 32 << 20
# Python with torch and numba imported, and what a CUDA context takes: allowances.
_RUNTIME = {"cpu": {"ram": 400_000_000}, "cuda": {"ram": 1_500_000_000, "vram": 400_000_000}}

Bytes = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Table:
    """An embedding table of ``rows`` × ``dim`` weights, trained with ``batch`` ids a step."""

    rows: int
    dim: int
    dtype: str
    place: str
    batch: int

    def costs(self, choice: str) -> Bytes:
        """Bytes by resource and part for one of ``TABLE_CHOICES``."""
        item = ITEM_BYTES[self.dtype]
        home = "vram" if self.place == "cuda" else "ram"
        table = self.rows * self.dim * item
        block = self.batch * self.dim * item
        unique = int(expected_unique(self.rows, self.batch)) * self.dim * item
        out = _empty(self.place)
        out[home]["weights"] = table
        if choice == "Adam":
            out[home]["gradients"] = table
            out[home]["moments"] = 2 * table
            # The looked-up rows and their gradient.
            out[home]["working"] = 2 * block + _kept(3 * block, block, home)
            return out
        out[home]["gradients"] = block + self.batch * _INDEX_BYTES
        if choice == "SparseAdam":
            out[home]["moments"] = 2 * table
            # Looked-up rows; then the coalesced gradient, two old moments and two updates.
            out[home]["working"] = (
                int(1.5 * block + 4.4 * unique)
                + 6 * self.batch * _INDEX_BYTES
                + _kept(2 * unique, unique, home)
            )
            return out
        out["disk"]["moments"] = _HEADER_BYTES + self.rows * self.dim * 2 * _MOMENT_BYTES
        # Looked-up rows; then ids, sorted ids and their order.
        out[home]["working"] = int(1.5 * block) + _kept(2 * block, block, home)
        out["ram"]["working"] += 6 * self.batch * _INDEX_BYTES
        values = self.batch * self.dim
        touched = unique // item
        half = item < _MOMENT_BYTES
        if half:
            # The gradient in float32, and the change with the weights it is added to.
            out["ram"]["working"] += _MOMENT_BYTES * values
            out[home]["working"] += 16 * touched
        if home == "vram":
            # The gradient comes over, the update goes back, both through pinned memory.
            out["ram"]["working"] += item * values + _MOMENT_BYTES * touched
            out["vram"]["working"] += _MOMENT_BYTES * touched
        return out

    def at(self, rows: int) -> Table:
        return Table(rows, self.dim, self.dtype, self.place, self.batch)


@dataclass(frozen=True)
class Dense:
    """A dense model of ``parameters`` weights, without its activations.

    ``share`` is the part of the second moment that SlimAdamW keeps.
    """

    parameters: int
    dtype: str
    place: str
    share: float = field(default=STATIC_RULES_SHARE)

    def costs(self, choice: str) -> Bytes:
        """Bytes by resource and part for one of ``DENSE_CHOICES``."""
        weights = self.parameters * ITEM_BYTES[self.dtype]
        home = "vram" if self.place == "cuda" else "ram"
        out = _empty(self.place)
        out[home]["weights"] = weights
        out[home]["gradients"] = weights
        if choice == "AdamW":
            out[home]["moments"] = 2 * weights
        else:
            second = self.parameters * _MOMENT_BYTES * self.share
            out[home]["moments"] = weights + round(second)
        return out

    def at(self, rows: int) -> Dense:
        return Dense(rows, self.dtype, self.place, self.share)


def _empty(place: str) -> Bytes:
    out: Bytes = {resource: dict.fromkeys(PARTS, 0) for resource in RESOURCES}
    for resource, value in _RUNTIME[place].items():
        out[resource]["runtime"] = value
    return out


def _kept(total: int, block: int, home: str) -> int:
    return total if home == "ram" and block < _KEPT_BLOCK_BYTES else 0


def totals(costs: Bytes) -> dict[str, int]:
    """Bytes by resource."""
    return {resource: sum(parts.values()) for resource, parts in costs.items()}
