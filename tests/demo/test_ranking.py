"""Filtered ranking against the plainest loop there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.demo import ranking
from lowmem.demo.kge import KGE, scatter_ids
from lowmem.demo.ranking import Ranking, filtered_ranking


def brute_force(model: KGE, row_of: torch.Tensor, test: list, known: set) -> list[float]:
    entity = model.entity.weight.detach().double()[row_of]
    weight = model.relation.weight.detach().double()

    def scores(asked: int, relation: int) -> torch.Tensor:
        half = model.dim // 2
        as_complex = lambda row: torch.complex(row[..., :half], row[..., half:])  # noqa: E731
        query = as_complex(entity[asked]) * as_complex(weight[relation])
        return (query * as_complex(entity).conj()).sum(-1).real

    def rank(found: torch.Tensor, truth: int, others: set[int]) -> float:
        rank = 1.0
        for candidate in range(len(entity)):
            if candidate == truth or candidate in others:
                continue
            difference = float(found[candidate] - found[truth])
            rank += 0.5 if abs(difference) < 1e-9 else float(difference > 0)
        return rank

    ranks = []
    for h, r, t in test:
        ranks.append(rank(scores(h, r), t, {c for a, b, c in known if (a, b) == (h, r)}))
    for h, r, t in test:
        reverse = r + model.relations
        ranks.append(rank(scores(t, reverse), h, {a for a, b, c in known if (b, c) == (r, t)}))
    return ranks


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans(), st.sampled_from([1, 3, 128]))
def test_ranks_are_those_of_a_plain_loop(seed: int, count: int, ties: bool, batch: int) -> None:
    random = np.random.default_rng(seed)
    entities = 13
    model = KGE(40, 2, 4, seed=seed, scale=1.0)
    row_of = torch.from_numpy(scatter_ids(entities, 40))
    if ties:  # small whole numbers: many equal scores, all of them exact
        with torch.no_grad():
            model.entity.weight.copy_(torch.from_numpy(random.integers(-1, 2, (40, 4))))
            model.relation.weight.copy_(torch.from_numpy(random.integers(-1, 2, (4, 4))))
    else:
        with torch.no_grad():
            model.relation.weight.copy_(torch.from_numpy(random.normal(size=(4, 4))))
    known = random.integers(0, [entities, 2, entities], (count, 3))
    test = known[: max(1, count // 3)]
    expected = brute_force(model, row_of, test.tolist(), set(map(tuple, known.tolist())))
    before = ranking._CHUNK
    ranking._CHUNK = 5  # several chunks, the last one short
    try:
        found = filtered_ranking(model, row_of, test, known, batch=batch)
    finally:
        ranking._CHUNK = before
    np.testing.assert_array_equal(found.ranks, expected)
    assert found.candidates == entities


@pytest.mark.parametrize("value", [0.0, 0.1])
def test_a_model_that_says_nothing_gains_nothing(value: float) -> None:
    model = KGE(1000, 1, 16)
    torch.nn.init.constant_(model.entity.weight, value)
    triples = np.array([[0, 0, 1], [5, 0, 999]])
    found = filtered_ranking(model, torch.arange(1000), triples, triples)
    assert found.ranks.tolist() == [500.5] * 4  # the middle of the 1,000


def test_mrr_and_hits() -> None:
    found = Ranking(np.array([1.0, 2.0, 10.0, 11.0]), 50)
    assert found.mrr == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)
    assert found.hits(10) == 0.75
    assert found.hits(1) == 0.25
    assert "MRR 0.4227, hits@10 75.0%" in repr(found)


def test_nothing_to_rank() -> None:
    none = np.empty((0, 3), np.int32)
    found = filtered_ranking(KGE(3, 1, 2), torch.arange(3), none, none)
    assert np.isnan(found.mrr)
