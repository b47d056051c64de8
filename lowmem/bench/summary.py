"""What ``lowmem bench dsa`` found, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What DSA is to the others, worst case and best case, one sentence a regime."""
    sentences = []
    for regime, key, other in (
        ("hot", "to_sparse", "SparseAdam"),
        ("fresh", "to_sparse", "SparseAdam"),
        ("fresh", "worst_stretch", "SparseAdam in its worst stretch of steps"),
        ("end-to-end", "to_sparse", "SparseAdam"),
        ("cold-dropped", "to_memmap", "memmap"),
        ("cold-dropped", "to_random", "memmap with MADV_RANDOM"),
        ("cold-limit", "to_memmap", "memmap"),
        ("cold-limit", "to_random", "memmap with MADV_RANDOM"),
    ):
        values = [
            row[key]
            for row in rows
            if row["regime"] == regime and row["contender"] == "DSA" and row.get(key) is not None
        ]
        if values:
            low, high = min(values), max(values)
            span = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
            sentences.append(f"{regime}: DSA is {span} times as fast as {other}.")
    for row in rows:
        if row["regime"] == "durability" and row["contender"] == "DSA, journal":
            sentences.append(
                f"durability: a step with the journal costs {row['steady']:.2f} of one without in "
                f"steady state, {row['first_touch']:.2f} in the first tenth after a commit."
            )
    values = [row["to_smallest"] for row in rows if row.get("to_smallest")]
    if len(values) > 1:
        sentences.append(f"flat: a step costs {max(values):.2f} of the lowest table's at most.")
    return sentences
