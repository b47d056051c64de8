"""Names, distinct triples, the split, and saving: against plain Python lists and sets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem.demo.graph import Graph, Names, distinct, load, save, split

words = st.lists(
    st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=6),
    unique=True,
)


@given(words, st.text(max_size=3))
def test_names_are_a_list(names: list[str], other: str) -> None:
    packed = Names.of(names)
    assert len(packed) == len(names)
    assert list(packed) == names
    assert [packed[i] for i in range(len(names))] == names
    assert packed[-2:] == names[-2:]
    for wanted in [*names, other]:
        assert packed.find(wanted) == (names.index(wanted) if wanted in names else None)
    with pytest.raises(IndexError):
        packed[len(names)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 6))))
def test_distinct_is_a_sorted_set(triples: list[tuple[int, int, int]]) -> None:
    array = np.array(triples, np.int32).reshape(-1, 3)
    expected = sorted(set(triples))
    for entities in (7, 2**32):  # by 64-bit keys, and the way for graphs too large for them
        assert [tuple(row) for row in distinct(array, entities, 4).tolist()] == expected


def small(count: int, seed: int = 0) -> Graph:
    random = np.random.default_rng(seed)
    triples = distinct(random.integers(0, [30, 3, 30], (count, 3)).astype(np.int32), 30, 3)
    return Graph(Names.of(f"e{i}" for i in range(30)), ["a", "b", "c"], triples, {"files": 1})


@given(st.integers(1, 200), st.integers(0, 50), st.integers(0, 5))
def test_held_out_entities_and_relations_stay_in_training(count: int, held: int, seed: int) -> None:
    graph = small(count, seed)
    train, test = split(graph, held, seed)
    assert len(test) <= held
    assert Counter(map(tuple, train.tolist())) + Counter(map(tuple, test.tolist())) == Counter(
        map(tuple, graph.triples.tolist())
    )
    assert set(test[:, (0, 2)].ravel()) <= set(train[:, (0, 2)].ravel())
    assert set(test[:, 1]) <= set(train[:, 1])


def test_save_and_load(tmp_path: Path) -> None:
    graph = small(100)
    save(graph, tmp_path / "deep" / "g.npz")
    again = load(tmp_path / "deep" / "g.npz")
    assert list(again.entities) == list(graph.entities)
    assert again.relations == graph.relations
    assert again.facts == graph.facts
    np.testing.assert_array_equal(again.triples, graph.triples)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["g.npz"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "g.npz"
    save(small(10), path)
    before = path.read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space"):
        save(small(100), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_load_refuses_parts_that_do_not_fit(tmp_path: Path) -> None:
    graph = small(50)
    graph.triples[3, 2] = 30  # there is no such entity
    save(graph, tmp_path / "g.npz")
    with pytest.raises(ValueError, match="damaged: its parts do not fit"):
        load(tmp_path / "g.npz")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.npz")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    np.savez(tmp_path / "g.npz", head=np.array([Bomb()], object))
    with pytest.raises(ValueError, match="is not a saved graph"):
        load(tmp_path / "g.npz")
    assert not (tmp_path / "exploded").exists()
