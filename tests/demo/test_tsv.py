"""A person's own triples: what is written is what is read, and bad lines are named."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem.demo.tsv import read_triples

field = st.text(st.characters(exclude_characters="\t\n\r", exclude_categories=["Cs"]), min_size=1)
triple = st.tuples(field, field, field)


def read(path: Path) -> set[tuple[str, str, str]]:
    graph = read_triples(path, progress=False)
    names, relations = list(graph.entities), graph.relations
    rows = [(names[h], relations[r], names[t]) for h, r, t in graph.triples.tolist()]
    assert len(rows) == len(set(rows))
    assert len(names) == len(set(names))
    return set(rows)


@given(
    st.lists(triple, min_size=1, max_size=30),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_round_trip(
    tmp_path_factory, triples: list, end: str, compressed: bool, last_end: bool, bom: bool
) -> None:
    path = tmp_path_factory.mktemp("tsv") / "graph.tsv"
    data = (end.join("\t".join(t) for t in triples) + end * last_end).encode()
    if bom or data.startswith(b"\xef\xbb\xbf"):
        data = b"\xef\xbb\xbf" + data
    path.write_bytes(gzip.compress(data, 1) if compressed else data)
    assert read(path) == set(triples)


def test_blank_lines_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "g.tsv"
    path.write_text("a\tr\tb\n\n\na\tr\tb\nb\tr\ta\n\n")
    assert read(path) == {("a", "r", "b"), ("b", "r", "a")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"a b c", "line 3: expected head, relation and tail with tabs between, got 1 field"),
        (b"a\tb", "line 3: .* got 2 fields"),
        (b"a\tb\tc\td", "line 3: .* got 4 fields"),
        (b"a\t\tc", "line 3: .* got an empty field"),
        (b"a\tr\t", "line 3: .* got an empty field"),
        (b"a\t\xff\tc", "line 3: not UTF-8"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str, pack) -> None:
    path = tmp_path / "bad.tsv"
    path.write_bytes(pack(b"a\tr\tb\n\n" + line + b"\na\tr\tc\n"))
    with pytest.raises(ValueError, match=message) as caught:
        read_triples(path, progress=False)
    assert str(path) in str(caught.value)


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "cut.tsv.gz"
    text = "".join(f"e{i * i}\tr{i % 7}\te{i}\n" for i in range(20_000))
    data = bytearray(gzip.compress(text.encode()))
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"after line \d+: damaged gzip"):
        read_triples(path, progress=False)
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"cut.tsv.gz"):
        read_triples(path, progress=False)


@pytest.mark.parametrize("data", [b"", b"\n\n", gzip.compress(b""), b"\xef\xbb\xbf"])
def test_no_triple_at_all(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "none.tsv"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="no triple in it"):
        read_triples(path, progress=False)


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_triples(tmp_path / "absent.tsv")
    with pytest.raises(OSError, match="directory"):
        read_triples(tmp_path)
