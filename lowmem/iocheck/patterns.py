"""The pages that a step touches and misses, given the page cache and the way ids repeat.

Let A(x) be the mean, over the rows of a table, of exp(-x·p), where p is the chance that
one id is this row: the share of rows that x ids leave untouched. Rows lie scattered, n to
a page, so x ids leave the share A(x)**n of the pages untouched. The page cache is one that
keeps the pages used last; by Che's approximation (Che, Tung, Wang 2002) it remembers the
last T ids, with T such that the pages touched in them are the pages that it holds.
A step of k ids then touches the share 1 - A(k)**n of the pages, and of these
A(T)**n - A(T + k)**n are missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lowmem.plan.access import ZIPF_EXPONENT, zipf_bins

Access = Literal["uniform", "zipf"]
PAGE = 4096


@dataclass(frozen=True)
class StepPages:
    """What one step meets, in expectation, once the page cache has settled."""

    distinct_rows: float
    touched_pages: float
    missing_pages: float

    @property
    def hit_share(self) -> float:
        """Share of the touched pages that are in memory already."""
        return 1.0 - self.missing_pages / self.touched_pages if self.touched_pages else 1.0


class TableAccess:
    """A table of ``rows`` rows of ``row_bytes`` each, and the law by which ids ask for them."""

    def __init__(self, rows: int, row_bytes: int, access: Access) -> None:
        self.rows, self.row_bytes, self.access = rows, row_bytes, access
        if access == "uniform":
            self._chance, self._count = np.array([1.0 / rows]), np.array([float(rows)])
        else:
            self._chance, self._count = zipf_bins(rows, ZIPF_EXPONENT)
        whole = -(-row_bytes // PAGE) if row_bytes % PAGE == 0 else 0
        # A row that does not divide a page straddles two of them now and then.
        self._pages_per_row = whole or (
            1.0 if PAGE % row_bytes == 0 else 1.0 + (row_bytes - 1) / PAGE
        )
        self.pages = max(1.0, rows * row_bytes / PAGE)
        self._rows_per_page = rows * self._pages_per_row / self.pages

    def untouched_rows(self, ids: float) -> float:
        """Share of rows that ``ids`` accesses leave alone."""
        return float(self._count @ np.exp(-ids * self._chance)) / self.rows

    def untouched_pages(self, ids: float) -> float:
        """Share of pages that ``ids`` accesses leave alone."""
        return self.untouched_rows(ids) ** self._rows_per_page

    def step(self, batch: int, cache_bytes: float) -> StepPages:
        """A step of ``batch`` ids, duplicates included, with so much page cache for the store."""
        distinct = self.rows * (1.0 - self.untouched_rows(batch))
        touched = self.pages * (1.0 - self.untouched_pages(batch))
        memory = self._remembered_ids(cache_bytes)
        if math.isinf(memory):
            missing = 0.0
        elif memory < batch:
            missing = touched  # a cache that forgets within a step has nothing of the last one
        else:
            after = self.untouched_pages(memory + batch)
            missing = self.pages * (self.untouched_pages(memory) - after)
        return StepPages(distinct, touched, min(missing, touched))

    def _remembered_ids(self, cache_bytes: float) -> float:
        share = cache_bytes / (self.pages * PAGE)
        if share >= 1.0:
            return math.inf
        if share <= 0.0:
            return 0.0
        low, high = 0.0, 1.0
        while 1.0 - self.untouched_pages(high) < share:
            high *= 2.0
            if high > 1e30:
                return math.inf
        for _ in range(100):
            middle = (low + high) / 2
            if 1.0 - self.untouched_pages(middle) < share:
                low = middle
            else:
                high = middle
        return high


def draw_ids(rows: int, count: int, access: Access, rng: np.random.Generator) -> NDArray[np.int64]:
    """``count`` ids of one batch, duplicates included; for ``zipf`` the id is the rank."""
    if access == "uniform":
        return rng.integers(0, rows, count, dtype=np.int64)
    chance, counts = zipf_bins(rows, ZIPF_EXPONENT)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    bins = np.searchsorted(np.cumsum(chance * counts), rng.random(count))
    bins = np.minimum(bins, len(counts) - 1)
    return first[bins] + (rng.random(count) * counts[bins]).astype(np.int64)
