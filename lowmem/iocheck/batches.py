"""The ids and gradients of the steps that are timed: as many duplicates as the person's own."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from .patterns import PAGE, Access, draw_ids

MAX_IDS = 1 << 17
_ALL_IDS = 1 << 20  # of all batches: fewer would stay in a processor's cache
_MOST = 128
_GRADIENTS = 4
_GRADIENT_BYTES = 128 << 20
_SHUFFLED = 1 << 22  # rows; to shuffle more takes seconds
_OWN_NUMBERS = 1 << 22
_GOLDEN = (5**0.5 - 1) / 2


def most_ids(batch: int, dim: int) -> int:
    """Ids of the batches that are timed, where all of ``batch`` would take too much memory."""
    return max(1, min(batch, MAX_IDS, _GRADIENT_BYTES // (4 * dim)))


class Batches:
    """Batches of a table of ``table_rows`` rows, laid on the first ``window`` rows.

    The ids repeat within a batch, and from batch to batch, as those of the person's own
    table do: a row that comes up often is the same row of the window every time, and the
    others are drawn from what is left, so that no two of them fall together. Each batch has
    gradients of its own place in memory, as each backward pass leaves them.

    Attributes:
        distinct: how many different rows a batch has, on average.
    """

    def __init__(
        self,
        table_rows: int,
        window: int,
        batch: int,
        dim: int,
        access: Access,
        rng: np.random.Generator,
        grads: torch.Tensor | None = None,
    ) -> None:
        count = most_ids(batch, dim)
        place = _scattered(window, rng)
        self._ids = [
            _laid(draw_ids(table_rows, count, access, rng), place, access, rng)
            for _ in range(max(4, min(_MOST, _ALL_IDS // count)))
        ]
        self.distinct = self.distinct_of(count)
        self._grads = random_grads(count, dim) if grads is None else grads
        copies = max(1, min(_GRADIENTS, _GRADIENT_BYTES // self._grads.nbytes))
        self._copies = self._grads.repeat(copies, 1, 1) if copies > 1 else self._grads[None]

    def __len__(self) -> int:
        """Ids of a batch."""
        return len(self._ids[0])

    def ids(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self._ids[number % len(self._ids)])

    def distinct_of(self, count: int) -> int:
        """How many different rows the first ``count`` ids of a batch have, on average."""
        return round(float(np.mean([len(np.unique(ids[:count])) for ids in self._ids[:4]])))

    def grads(self, number: int) -> torch.Tensor:
        return self._copies[number % len(self._copies)]


def _scattered(window: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The rows of a window in an order in which neighbours lie far apart."""
    if window <= _SHUFFLED:
        return rng.permutation(window)
    stride = int(_GOLDEN * window)
    while math.gcd(stride, window) > 1:
        stride += 1
    places = np.arange(window, dtype=np.int64)
    places *= stride
    places += int(rng.integers(window))
    places %= window
    return places


def _laid(
    ids: NDArray[np.int64], place: NDArray[np.int64], access: Access, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Put ids that are ranks of a table on rows of a window, different ones on different rows."""
    window = len(place)
    ranks, inverse = np.unique(ids, return_inverse=True)
    often = window // 2 if access == "zipf" else 0
    known = int(np.searchsorted(ranks, often))
    rest, others = len(ranks) - known, window - often
    # Where there are more different rows than places, some fall together.
    drawn = rng.choice(others, rest, replace=False) if rest <= others else ranks[known:] % others
    rows = np.concatenate([place[ranks[:known]], place[often + drawn]])
    return np.ascontiguousarray(rows[inverse.reshape(-1)], np.int64)


def random_grads(count: int, dim: int) -> torch.Tensor:
    """Gradients of ``(count, dim)``; from some millions of numbers on they repeat."""
    own = max(1, min(count, _OWN_NUMBERS // dim))
    grads = torch.rand(own, dim).sub_(0.5)
    return grads if own == count else grads.repeat(-(-count // own), 1)[:count]


def count_pages(ids: torch.Tensor, row_bytes: int) -> int:
    """How many pages of a store different rows lie on."""
    rows: NDArray[np.int64] = np.unique(ids.numpy())
    first, last = rows * row_bytes // PAGE, (rows * row_bytes + row_bytes - 1) // PAGE
    # Sorted rows: a page is new unless it is the last page of the row before.
    shared = int(np.count_nonzero(first[1:] == last[:-1]))
    return int((last - first + 1).sum()) - shared
