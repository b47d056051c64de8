"""Which rows a step touches, and the gradient that autograd would leave for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORKLOADS = {
    "uniform": "uniform ids",
    "zipf": "Zipf(1.05) ids, scattered",
    "zipf-ordered": "Zipf(1.05) ids, ordered by frequency",
    "codegraph": "ids of the demo's code graph",
}
EXPONENT = 1.05


class Ids:
    """The ids of every step: the same for every contender, another batch each step.

    Args:
        name: one of ``WORKLOADS``.
        rows: of the table.
        seed: of everything that is drawn.
        hot: draw from so many rows only, scattered evenly over the table (uniform only).
    """

    def __init__(self, name: str, rows: int, seed: int = 0, hot: int | None = None) -> None:
        if name not in WORKLOADS:
            raise ValueError(f"no workload {name!r}; choose from {', '.join(WORKLOADS)}")
        self.name, self.rows, self.seed = name, rows, seed
        rng = np.random.default_rng((seed, rows))
        self._draw: Callable[[np.random.Generator, int], np.ndarray]
        self.hot_rows: np.ndarray | None = None
        if name == "uniform":
            chosen = self.hot_rows = rng.choice(rows, hot, replace=False) if hot else None
            self._draw = lambda rng, count: (
                rng.integers(0, rows, count)
                if chosen is None
                else chosen[rng.integers(0, len(chosen), count)]
            )
        elif name == "codegraph":
            self._draw = _graph_draw(rows, rng)
        else:
            self._draw = _zipf_draw(rows, rng, scattered=name == "zipf")

    def at(self, number: int, batch: int) -> np.ndarray:
        """The ids of step ``number``: int64, ``(batch,)``, with duplicates."""
        rng = np.random.default_rng((self.seed, number, batch))
        return np.ascontiguousarray(self._draw(rng, batch), np.int64)


def _zipf_draw(
    rows: int, rng: np.random.Generator, scattered: bool
) -> Callable[[np.random.Generator, int], np.ndarray]:
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
    place = rng.permutation(rows).astype(np.int32) if scattered else None

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        points = rng.random(count) * cumulative[-1]
        order = np.argsort(points)  # looked up in order, or every look is a cache miss
        ranks = np.empty(count, np.int64)
        ranks[order] = np.searchsorted(cumulative, points[order])
        ranks = np.minimum(ranks, rows - 1)
        return ranks if place is None else place[ranks]

    return draw


def _graph_draw(
    rows: int, rng: np.random.Generator
) -> Callable[[np.random.Generator, int], np.ndarray]:
    """As the demo's training asks: heads and tails of random triples, and uniform negatives."""
    from lowmem.demo.codegraph import code_graph

    graph = code_graph()
    entities = len(graph.entities)
    place = rng.permutation(max(rows, entities))[:entities] % rows
    ends = place[graph.triples[:, (0, 2)]]

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        triples = (count * 2 // 3 + 1) // 2
        positive = ends[rng.integers(0, len(ends), triples)].ravel()
        negative = place[rng.integers(0, entities, max(0, count - len(positive)))]
        return np.concatenate([positive, negative])[:count]

    return draw


class Gradients:
    """Sparse gradients as ``nn.Embedding(sparse=True)`` leaves them: COO, not coalesced.

    Values are positive, so that the moments stay sound even where contenders that keep them
    in another order share one file.
    """

    def __init__(self, ids: Ids, batch: int, dim: int) -> None:
        self.ids, self.batch, self.dim = ids, batch, dim
        generator = torch.Generator().manual_seed(ids.seed)
        self._stretch = 4 * batch  # more values than one step takes: the next ones are not warm
        self._values = torch.rand(self._stretch, dim, generator=generator).mul_(0.1).add_(1e-3)
        self.ids_at = lru_cache(maxsize=256)(lambda number: self.ids.at(number, self.batch))

    def at(self, number: int) -> Tensor:
        """The gradient of step ``number``."""
        start = number * self.batch % self._stretch
        return torch.sparse_coo_tensor(
            torch.from_numpy(self.ids_at(number))[None],
            self._values[start : start + self.batch],
            (self.ids.rows, self.dim),
            check_invariants=False,
        )

    def distinct(self, number: int) -> int:
        """How many different rows step ``number`` touches."""
        return len(np.unique(self.ids_at(number)))
