"""Filtered ranking of held-out triples: MRR and hits@10.

The protocol of Bordes et al., "Translating Embeddings for Modeling Multi-relational Data"
(NeurIPS 2013): for a true (h, r, t), every entity is scored as the tail, then every entity as the
head; other entities that are known to be true answers do not compete. Equal scores share the mean
of their ranks, so that a model which scores everything alike gains nothing by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lowmem.demo.kge import KGE

_CHUNK = 1 << 15  # entities scored at a time


@dataclass(frozen=True)
class Ranking:
    """What a ranking found.

    Attributes:
        ranks: float64, one a question (two a triple: tail, then head), 1 is best.
        candidates: how many entities competed.
    """

    ranks: np.ndarray
    candidates: int

    @property
    def mrr(self) -> float:
        """Mean reciprocal rank."""
        return float((1.0 / self.ranks).mean()) if len(self.ranks) else float("nan")

    @property
    def median(self) -> float:
        """The middle rank: half of the answers rank better."""
        return float(np.median(self.ranks)) if len(self.ranks) else float("nan")

    def hits(self, k: int = 10) -> float:
        """The share of questions whose answer ranks among the first ``k``."""
        return float((self.ranks <= k).mean()) if len(self.ranks) else float("nan")

    def __repr__(self) -> str:
        return (
            f"Ranking(MRR {self.mrr:.4f}, hits@10 {self.hits(10):.1%}, "
            f"{len(self.ranks):,} questions, {self.candidates:,} candidates)"
        )


def known_answers(triples: np.ndarray, questions: np.ndarray, column: int) -> list[np.ndarray]:
    """For each question, the entities in ``column`` of the triples that agree with it elsewhere.

    Args:
        triples: all that is known to be true, shape (count, 3).
        questions: triples, shape (n, 3).
        column: 2 for tails that share head and relation; 0 for heads that share relation and tail.
    """
    other = 2 - column
    width = int(max(triples[:, 1].max(initial=0), questions[:, 1].max(initial=0))) + 1
    keys = triples[:, other].astype(np.int64) * width + triples[:, 1]
    wanted = questions[:, other].astype(np.int64) * width + questions[:, 1]
    asked = np.unique(wanted)
    near = np.minimum(np.searchsorted(asked, keys), max(len(asked) - 1, 0))
    chosen = np.flatnonzero(asked[near] == keys) if len(asked) else np.empty(0, np.int64)
    keys, answers = keys[chosen], triples[chosen, column]
    order = np.argsort(keys, kind="stable")
    keys, answers = keys[order], answers[order]
    first, last = np.searchsorted(keys, wanted), np.searchsorted(keys, wanted, side="right")
    return [answers[a:b] for a, b in zip(first, last, strict=True)]


@torch.no_grad()
def filtered_ranking(
    model: KGE,
    row_of: Tensor,
    triples: np.ndarray,
    known: np.ndarray,
    *,
    batch: int = 128,
    progress: bool = False,
    desc: str = "ranking",
) -> Ranking:
    """Rank the true tail and the true head of each triple among all entities.

    Args:
        model: the model; every entity is scored.
        row_of: the table row of each entity, shape (entities,).
        triples: what to rank, entity numbers, shape (n, 3).
        known: every triple that is known to be true, shape (count, 3).
        batch: questions scored together; memory is batch * 32,768 scores.
        progress: show a bar.
        desc: the bar's label.
    """
    device = model.entity.weight.device
    row_of = row_of.to(device)
    entities = len(row_of)
    questions = []  # asked entity, relation id, true answer, other true answers
    for column, shift in ((2, 0), (0, model.relations)):
        answers = known_answers(known, triples, column)
        for triple, others in zip(triples.tolist(), answers, strict=True):
            questions.append((triple[2 - column], triple[1] + shift, triple[column], others))

    plan = []
    for start in range(0, len(questions), batch):
        part = questions[start : start + batch]
        asked = torch.tensor([q[0] for q in part], device=device)
        relation = torch.tensor([q[1] for q in part], device=device)
        truth = model.entity(row_of[torch.tensor([q[2] for q in part], device=device)])
        query = model.query(model.entity(row_of[asked]), relation)
        true = (query * truth).sum(-1, keepdim=True)
        # Two roundings of one score may differ by this much and are still a tie.
        slack = 1e-6 * query.norm(dim=-1, keepdim=True) * truth.norm(dim=-1, keepdim=True)
        # Who does not compete: the truth itself, and the other true answers; sorted by entity.
        row = np.concatenate([np.full(len(q[3]) + 1, i) for i, q in enumerate(part)])
        entity = np.concatenate([np.append(q[3], q[2]) for q in part]).astype(np.int64)
        order = np.argsort(entity, kind="stable")
        plan.append(
            (slice(start, start + len(part)), query, true, slack, row[order], entity[order])
        )

    above = np.zeros(len(questions))
    equal = np.zeros(len(questions))
    chunks = range(0, entities, _CHUNK)
    for first in tqdm(chunks, desc=desc, unit="chunk", disable=not progress, mininterval=0.5):
        rows = model.entity(row_of[first : first + _CHUNK]).T
        for span, query, true, slack, row, entity in plan:
            difference = query @ rows - true
            a, b = np.searchsorted(entity, (first, first + rows.shape[1]))
            if b > a:
                out = torch.from_numpy(row[a:b]), torch.from_numpy(entity[a:b] - first)
                difference[out[0].to(device), out[1].to(device)] = -torch.inf
            higher = difference > slack
            above[span] += higher.sum(1).cpu().numpy()
            equal[span] += ((difference >= -slack) & ~higher).sum(1).cpu().numpy()
    return Ranking(1.0 + above + equal / 2.0, entities)
