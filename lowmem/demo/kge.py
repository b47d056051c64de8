"""The demo's model: ComplEx embeddings, and a loss that compares with sampled negatives.

Score: ComplEx (Trouillon, Welbl, Riedel, Gaussier, Bouchard, "Complex Embeddings for Simple
Link Prediction", ICML 2016). A row of ``dim`` floats is ``dim / 2`` complex numbers, real parts
first; the score of (h, r, t) is the real part of the sum of h * r * conj(t).

Both directions are asked as tail questions, each relation having a reciprocal one of its own
(Lacroix, Usunier, Obozinski, "Canonical Tensor Decomposition for Knowledge Base Completion",
ICML 2018): (?, r, t) is asked as (t, r + relations, ?).

Loss: the multi-class log-loss of that paper, with the sum over all entities estimated from
uniform negatives that a group of triples shares (sharing as in Lerer et al., "PyTorch-BigGraph",
MLSys 2019): cross-entropy over the true tail and the negatives, whose logits are raised by
log(entities / negatives), so that few stand for all (importance sampling, Bengio and Senecal,
2003).
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

_FILL_ROWS = 1 << 17  # rows that one seed fills: the same table for any number of threads


class KGE(nn.Module):
    """A large sparse entity table and a small dense relation table.

    Args:
        rows: rows of the entity table; at least as many as there are entities.
        relations: relations of the graph; the table has twice as many rows.
        dim: floats a row; even.
        device: where the tables live.
        seed: of the initial values.
        scale: standard deviation of the entities' initial values.

    Raises:
        ValueError: rows, relations or dim out of range.
        MemoryError, torch.OutOfMemoryError, RuntimeError: as torch says, if it does not fit.
    """

    def __init__(
        self,
        rows: int,
        relations: int,
        dim: int = 128,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        scale: float = 0.1,
    ) -> None:
        super().__init__()
        if rows < 1 or relations < 1:
            raise ValueError(f"need at least one row and one relation, got {rows} and {relations}")
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even (pairs make complex numbers), got {dim}")
        self.dim = dim
        self.relations = relations
        # skip_init: torch would fill the table once, in one thread, and we once more.
        self.entity = nn.utils.skip_init(nn.Embedding, rows, dim, sparse=True, device=device)
        fill_normal(self.entity.weight, scale, seed)
        self.relation = nn.Embedding(2 * relations, dim, device=device)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(2 * relations, dim, generator=generator) * 0.1
            start[:, : dim // 2] += 1.0  # near the identity: h alone scores t by their product
            self.relation.weight.copy_(start)

    def query(self, head: Tensor, relation: Tensor) -> Tensor:
        """h * r, shape (..., dim): its dot product with a tail's row is the score.

        Args:
            head: entity rows (not ids), shape (..., dim).
            relation: relation ids, shape (...); plus ``self.relations`` for the reciprocal one.
        """
        a, b = head.chunk(2, dim=-1)
        c, d = self.relation(relation).chunk(2, dim=-1)
        return torch.cat([a * c - b * d, a * d + b * c], dim=-1)

    def score(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        """Scores of triples given by table ids, each of shape (...)."""
        return (self.query(self.entity(head), relation) * self.entity(tail)).sum(-1)

    def loss(
        self, head: Tensor, relation: Tensor, tail: Tensor, negative: Tensor, entities: int
    ) -> Tensor:
        """The mean loss of groups of triples that share their group's negatives.

        Args:
            head, relation, tail: ids, shape (groups, triples).
            negative: ids of entities drawn uniformly, shape (groups, negatives).
            entities: how many entities the negatives stand for.
        """
        triples = head.shape[1]
        # One lookup for all, so that the table gets one gradient.
        rows = self.entity(torch.cat([head, tail, negative], dim=1))
        heads, tails, others = rows.split([triples, triples, negative.shape[1]], dim=1)
        query = self.query(heads, relation)
        true = (query * tails).sum(-1)
        false = query @ others.transpose(1, 2)
        # The true tail is not its own rival. (Not -inf, whose logsumexp has no gradient.)
        false = false.masked_fill(negative[:, None, :] == tail[:, :, None], -1e9)
        raised = math.log(max(entities / negative.shape[1], 1.0))
        # Cross-entropy of one against the rest: log(e^true + e^rest) - true.
        return nn.functional.softplus(false.logsumexp(-1) + raised - true).mean()


def fill_normal(weight: Tensor, scale: float, seed: int) -> None:
    """Fill a table in place with normal values, in chunks on all threads; no second copy.

    Each chunk has its own seed, so the values do not depend on the number of threads.
    """

    weight = weight.detach()  # no_grad would hold in this thread only

    def fill(start: int) -> None:
        generator = torch.Generator(weight.device).manual_seed(seed * 1_000_003 + start)
        weight[start : start + _FILL_ROWS].normal_(0.0, scale, generator=generator)

    starts = range(0, len(weight), _FILL_ROWS)
    if weight.device.type != "cpu":
        for start in starts:
            fill(start)
        return
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        list(pool.map(fill, starts))


def scatter_ids(count: int, rows: int, seed: int = 0) -> np.ndarray:
    """A table row for each of ``count`` entities: scattered over the whole table, all distinct.

    Numbers that neighbour each other land far apart, as hashed ids do. The map is a permutation
    of the rows (a four-round Feistel network on the bits of the number, walked until it falls
    inside the table), so that nothing collides and nothing is stored.

    Raises:
        ValueError: more entities than rows.
    """
    if count > rows:
        raise ValueError(
            f"the graph has {count:,} entities but the table only {rows:,} rows; "
            f"raise --rows to at least {count:,}"
        )
    half = max(1, math.ceil(math.log2(max(rows, 2)) / 2))
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence(seed).generate_state(4, np.uint64)

    def permute(ids: np.ndarray) -> np.ndarray:
        left, right = ids >> np.uint64(half), ids & mask
        for key in keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << np.uint64(half)) | right

    result = permute(np.arange(count, dtype=np.uint64))
    while True:
        outside = np.flatnonzero(result >= rows)
        if not len(outside):
            return result.astype(np.int64)
        result[outside] = permute(result[outside])
