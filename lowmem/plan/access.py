"""How much of a table is served from memory when the page cache holds only a part of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
ZIPF_EXPONENT = 1.05
_BINS = 4000


def cached_share(
    rows: int,
    row_bytes: int,
    cache_bytes: float,
    access: str = "uniform",
    exponent: float = ZIPF_EXPONENT,
) -> float:
    """The share of row accesses that find their row in memory, once the cache has warmed up.

    The page cache is taken as least-recently-used over pages of 4,096 bytes, in Che's
    approximation: a page stays for a time ``T``, the same for all, and ``T`` is such that
    the expected number of resident pages fills the cache. Popular rows lie scattered, so
    a popular row shares its page with rows of any rank.

    Args:
        rows: rows of the table.
        row_bytes: bytes of one row's state on disk.
        cache_bytes: memory that is left for the page cache.
        access: ``"uniform"``, or ``"zipf"``: the row of rank i is drawn in proportion to
            ``i ** -exponent``.

    Returns:
        A number from 0 to 1.
    """
    if access not in ("uniform", "zipf"):
        raise ValueError(f"access is {access!r}; it is 'uniform' or 'zipf'")
    if rows < 1 or row_bytes < 1:
        raise ValueError(f"a table has at least 1 row of 1 byte, not {rows} of {row_bytes}")
    if cache_bytes <= 0:
        return 0.0
    whole = rows * row_bytes
    if cache_bytes >= whole:
        return 1.0
    if access == "uniform":
        return cache_bytes / whole
    neighbours = max(1.0, PAGE_BYTES / row_bytes)
    rates, counts = zipf_bins(rows, exponent)
    weights = counts / rows

    def resident(time: float) -> float:
        absent = float(weights @ np.exp(-time * rates))
        return 1.0 - absent**neighbours

    time = _solve(resident, cache_bytes / whole)
    absent = np.exp(-time * rates)
    others = float(weights @ absent) ** (neighbours - 1.0)
    return float(np.clip(rates * counts @ (1.0 - absent * others), 0.0, 1.0))


def zipf_bins(rows: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rate of one row and number of rows, for bins of ranks that widen with the rank."""
    edges = np.unique(np.round(np.geomspace(1, rows + 1, min(rows, _BINS) + 1)))
    counts = np.diff(edges)
    # The integral from half a rank before a bin to half a rank before the next is the
    # midpoint rule backwards; the first ranks have bins of their own and are taken exactly.
    low, high = edges[:-1] - 0.5, edges[1:] - 0.5
    if math.isclose(exponent, 1.0):
        mass = np.log(high / low)
    else:
        mass = (low ** (1 - exponent) - high ** (1 - exponent)) / (exponent - 1)
    mass = np.where(counts == 1, edges[:-1] ** -exponent, mass)
    return mass / counts / mass.sum(), counts


def _solve(increasing: Callable[[float], float], target: float) -> float:
    """The ``x`` where a function that grows from 0 to 1 reaches ``target``, by halving."""
    low, high = -5.0, 30.0  # powers of ten
    for _ in range(80):
        middle = (low + high) / 2
        if increasing(10.0**middle) < target:
            low = middle
        else:
            high = middle
    return 10.0**high


def expected_unique(rows: int, batch: int) -> float:
    """How many different rows a batch of uniform ids touches, in the mean."""
    return rows * -math.expm1(batch * math.log1p(-1.0 / rows)) if rows > 1 else 1.0
