"""The model against complex arithmetic, one triple at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.demo.kge import KGE, fill_normal, scatter_ids


def complex_row(values: torch.Tensor) -> list[complex]:
    values = values.detach()
    half = len(values) // 2
    return [complex(float(values[k]), float(values[k + half])) for k in range(half)]


def naive_score(model: KGE, head: int, relation: int, tail: int) -> float:
    h = complex_row(model.entity.weight[head])
    r = complex_row(model.relation.weight[relation])
    t = complex_row(model.entity.weight[tail])
    return sum((a * b * c.conjugate()).real for a, b, c in zip(h, r, t, strict=True))


def random_model(rows: int, relations: int, dim: int, seed: int = 0) -> KGE:
    model = KGE(rows, relations, dim, seed=seed, scale=1.0)
    with torch.no_grad():
        model.relation.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return model


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 8), st.integers(0, 9))
def test_score_is_complex(rows: int, relations: int, half: int, seed: int) -> None:
    model = random_model(rows, relations, 2 * half, seed)
    every = [(h, r, t) for h in range(rows) for r in range(2 * relations) for t in range(rows)]
    head, relation, tail = torch.tensor(every).T
    expected = [naive_score(model, *triple) for triple in every]
    torch.testing.assert_close(
        model.score(head, relation, tail).double(),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-4,
        atol=1e-4,
    )


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_loss_is_cross_entropy_with_raised_negatives(
    groups: int, triples: int, negatives: int, seed: int
) -> None:
    model = random_model(6, 2, 4, seed)
    random = np.random.default_rng(seed)
    head, tail = random.integers(0, 6, (2, groups, triples))
    relation = random.integers(0, 4, (groups, triples))
    negative = random.integers(0, 6, (groups, negatives))
    total = 0.0
    for g in range(groups):
        for i in range(triples):
            true = naive_score(model, head[g, i], relation[g, i], tail[g, i])
            terms = [true]
            for n in negative[g]:
                if n != tail[g, i]:  # the true tail is not its own rival
                    false = naive_score(model, head[g, i], relation[g, i], n)
                    terms.append(false + math.log(max(50 / negatives, 1)))
            total += math.log(sum(math.exp(x - true) for x in terms))
    found = model.loss(*map(torch.from_numpy, (head, relation, tail, negative)), 50)
    assert found.item() == pytest.approx(total / (groups * triples), rel=1e-4, abs=1e-5)


def test_the_table_gets_one_sparse_gradient_and_the_relations_a_dense_one() -> None:
    model = KGE(100, 3, 8)
    ids = torch.tensor([[1, 5], [5, 7]])
    model.loss(ids, ids % 3, ids + 20, ids + 40, 100).backward()
    gradient = model.entity.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert set(gradient._indices()[0].tolist()) == {1, 5, 7, 21, 25, 27, 41, 45, 47}
    assert model.relation.weight.grad is not None
    assert not model.relation.weight.grad.is_sparse


def test_initial_values_do_not_depend_on_threads() -> None:
    tables = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            table = torch.full((300_000, 2), float("nan"))
            fill_normal(table, 0.5, 7)
            tables.append(table)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=0)
    assert abs(tables[0].mean().item()) < 0.01
    assert tables[0].std().item() == pytest.approx(0.5, rel=0.01)
    assert tables[0].unique().numel() > 500_000  # no chunk repeats another


@settings(max_examples=200)
@given(st.integers(1, 5000), st.data())
def test_scattered_ids_are_distinct_rows(rows: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, rows))
    ids = scatter_ids(count, rows)
    assert len(np.unique(ids)) == count
    assert ((ids >= 0) & (ids < rows)).all()
    np.testing.assert_array_equal(ids, scatter_ids(rows, rows)[:count])


def test_scattered_ids_look_random() -> None:
    ids = scatter_ids(100_000, 10_000_000)
    # Evenly over the table: each tenth holds a tenth, to five standard deviations.
    tenths = np.bincount(ids // 1_000_000, minlength=10)
    assert np.abs(tenths - 10_000).max() < 5 * math.sqrt(10_000 * 0.9)
    # Neighbours are far apart: independent places differ by a third of the table on average.
    assert np.abs(np.diff(ids)).mean() == pytest.approx(10_000_000 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 2), "at least one row"),
        ((1, 0, 2), "at least one row"),
        ((1, 1, 3), "dim must be even .* got 3"),
        ((1, 1, 0), "dim must be even .* got 0"),
    ],
)
def test_bad_sizes(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KGE(*arguments)


def test_more_entities_than_rows() -> None:
    with pytest.raises(ValueError, match=r"11 entities but the table only 10 rows; raise --rows"):
        scatter_ids(11, 10)
