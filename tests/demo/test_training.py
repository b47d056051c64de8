"""The loop learns, by any optimizer of torch's kind, and keeps what it has when it is stopped."""

from __future__ import annotations

import gc
import os
import signal
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lowmem import DSA
from lowmem.demo.graph import Graph, Names, distinct, split
from lowmem.demo.kge import KGE, scatter_ids
from lowmem.demo.ranking import filtered_ranking
from lowmem.demo.report import draw
from lowmem.demo.train import History, Step, batches, memory_bytes, train, training

ENTITIES, ROWS = 120, 1000


def families() -> Graph:
    """Entities in rings of twelve: ``next`` leads around a ring, ``with`` to all of it."""
    triples = []
    for e in range(ENTITIES):
        ring = e // 12 * 12
        triples.append((e, 0, ring + (e + 1) % 12))
        triples += [(e, 1, ring + k) for k in range(12)]
    array = distinct(np.array(triples, np.int32), ENTITIES, 2)
    return Graph(Names.of(f"e{i}" for i in range(ENTITIES)), ["next", "with"], array)


@pytest.fixture
def parts():
    graph = families()
    train_triples, test = split(graph, 60)
    row_of = torch.from_numpy(scatter_ids(ENTITIES, ROWS))
    data = batches(train_triples, row_of, 2, groups=4, size=64, negatives=32)
    return graph, test, row_of, data, KGE(ROWS, 2, 32)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        ),
    ],
)
def test_it_learns_far_beyond_the_untrained_table(tmp_path: Path, device: str) -> None:
    graph = families()
    train_triples, test = split(graph, 60)
    row_of = torch.from_numpy(scatter_ids(ENTITIES, ROWS))
    model = KGE(ROWS, 2, 32, device=device)
    data = batches(train_triples, row_of, 2, groups=4, size=64, negatives=32, device=device)
    before = filtered_ranking(model, row_of, test, graph.triples)
    with DSA(model.parameters(), lr=0.05, directory=tmp_path / "store") as optimizer:
        history = train(model, optimizer, data, ENTITIES, steps=200, progress=False)
        used = optimizer.state_bytes()
    after = filtered_ranking(model, row_of, test, graph.triples)
    assert before.mrr < 0.15
    assert after.mrr > 0.8
    assert history.steps[-1].loss < history.steps[0].loss / 2
    assert used["disk"] >= ROWS * 32 * 8


def test_rows_without_a_name_are_never_touched(parts, tmp_path: Path) -> None:
    _, _, row_of, data, model = parts
    before = model.entity.weight.detach().clone()
    with DSA(model.parameters(), lr=0.05, directory=tmp_path / "store") as optimizer:
        train(model, optimizer, data, ENTITIES, steps=20, progress=False)
    changed = (model.entity.weight.detach() != before).any(1)
    assert set(changed.nonzero()[:, 0].tolist()) == set(row_of.tolist())


def test_the_same_run_as_with_sparse_adam(parts, tmp_path: Path) -> None:
    graph, _, row_of, _, _ = parts

    class Both:
        """SparseAdam for the table and Adam for the relations, as people had to write it."""

        def __init__(self, model: KGE) -> None:
            self.each = [
                torch.optim.SparseAdam([model.entity.weight], lr=0.05),
                torch.optim.Adam(model.relation.parameters(), lr=0.05),
            ]
            self.param_groups = [group for one in self.each for group in one.param_groups]

        def step(self) -> None:
            for one in self.each:
                one.step()

        def zero_grad(self) -> None:
            for one in self.each:
                one.zero_grad()

    results = []
    for make in (Both, lambda m: DSA(m.parameters(), lr=0.05, directory=tmp_path / "store")):
        model = KGE(ROWS, 2, 32)
        data = batches(graph.triples, row_of, 2, groups=4, size=64, negatives=32)
        optimizer = make(model)
        history = train(model, optimizer, data, ENTITIES, steps=30, progress=False)
        results.append([step.loss for step in history.steps])
    optimizer.close()
    np.testing.assert_allclose(results[1], results[0], rtol=2e-3)


def test_batches_pass_over_every_triple_once_an_epoch() -> None:
    triples = np.array([(i, i % 3, i + 1) for i in range(10)])
    row_of = torch.arange(11) * 7  # rows, not entity numbers
    stream = batches(triples, row_of, 3, groups=2, size=2, negatives=3)
    seen: list[tuple[int, int, int]] = []
    for batch in islice(stream, 5):  # 20 triples: two epochs
        assert batch.head.shape == batch.relation.shape == batch.tail.shape == (2, 2)
        assert batch.negative.shape == (2, 3)
        ids = torch.cat([batch.head.ravel(), batch.tail.ravel(), batch.negative.ravel()])
        assert batch.rows == len(ids.unique())
        for h, r, t in zip(
            *(x.ravel().tolist() for x in (batch.head, batch.relation, batch.tail)), strict=True
        ):
            forward = (h // 7, r, t // 7) if r < 3 else (t // 7, r - 3, h // 7)
            seen.append(forward)
    expected = [tuple(t) for t in triples.tolist()]
    assert sorted(seen[:10]) == expected
    assert sorted(seen[10:]) == expected


def test_batches_larger_than_the_graph() -> None:
    batch = next(batches(np.array([[0, 0, 1]]), torch.arange(2), 1, groups=2, size=4, negatives=1))
    assert batch.head.numel() == 8
    with pytest.raises(ValueError, match="no triples"):
        next(batches(np.empty((0, 3), int), torch.arange(2), 1))


class Plain(torch.optim.SGD):
    pass


def loop(parts, **options) -> History:
    _, _, _, data, model = parts
    return train(
        model, Plain(model.parameters(), lr=0.01), data, ENTITIES, progress=False, **options
    )


def test_each_step_reports_itself(parts) -> None:
    heard: list[Step] = []
    history = loop(parts, steps=7, on_step=heard.append)
    assert heard == history.steps
    assert [step.step for step in heard] == list(range(1, 8))
    for step in heard:
        assert step.rows > 0
        assert step.triples == 256
        assert step.memory["ram"] > 0
        assert 0 < step.optimizer_seconds < step.rows / step.rows_per_s + 1e-9
    assert all(a.seconds < b.seconds for a, b in pairwise(heard))
    assert history.rows_per_s(optimizer_only=True) > history.rows_per_s() > 0
    assert not history.stopped


def test_the_rate_falls_to_a_hundredth(parts) -> None:
    _, _, _, data, model = parts
    optimizer = Plain(model.parameters(), lr=1.0)
    rates = [optimizer.param_groups[0]["lr"] for _ in training(model, optimizer, data, 9, steps=4)]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_seconds_end_it(parts) -> None:
    history = loop(parts, seconds=0.3)
    assert 0.3 <= history.seconds < 30
    assert len(history.steps) > 1


def test_seconds_or_steps(parts) -> None:
    with pytest.raises(ValueError, match="give seconds, or steps, or both"):
        loop(parts)
    assert len(loop(parts, seconds=1000, steps=3).steps) == 3


def test_ctrl_c_finishes_the_step_and_keeps_all(parts) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step: Step) -> None:
        if step.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    history = loop(parts, steps=1000, on_step=interrupt)
    assert history.stopped
    assert 5 <= len(history.steps) <= 6
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_is_an_interrupt(parts) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step: Step) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # signals are handled between two lines of Python
            pass

    with pytest.raises(KeyboardInterrupt):
        loop(parts, steps=1000, on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_picture_of_any_history(parts, tmp_path: Path) -> None:
    for name, history in (
        ("run", loop(parts, steps=40)),
        ("one", loop(parts, steps=1)),
        ("none", History()),
    ):
        draw(history, tmp_path / "new" / f"{name}.png", "title")
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_memory_is_of_this_process() -> None:
    gc.collect()  # what other tests left must not go while this one measures
    before = memory_bytes()["ram"]
    held = np.ones(400_000_000, np.uint8)
    grown = memory_bytes()["ram"] - before
    assert 250_000_000 < grown < 550_000_000
    assert held[-1]
