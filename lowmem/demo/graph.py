"""A knowledge graph in memory: names, relations and numbered triples, and a split for testing."""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


class Names(Sequence[str]):
    """A read-only list of strings in two arrays: about a third of the memory of a Python list.

    Names hold no line breaks; that is what keeps them apart.
    """

    def __init__(self, text: bytes, offsets: np.ndarray) -> None:
        self._text = text
        self._offsets = offsets  # where each name begins; one more at the end

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        encoded = [name.encode() for name in names]
        sizes = np.fromiter((len(name) + 1 for name in encoded), np.int64, len(encoded))
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return cls(b"\n".join(encoded), offsets)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"name {index} of {len(self)}")
        index = int(index) % len(self)
        return self._text[self._offsets[index] : self._offsets[index + 1] - 1].decode()

    def __iter__(self) -> Iterator[str]:
        return iter(self._text.decode().split("\n")) if len(self) else iter(())

    def find(self, name: str) -> int | None:
        """The number of a name, or None."""
        wanted = name.encode()
        if b"\n" in wanted or not len(self):
            return None
        if self._text.startswith(wanted + b"\n") or self._text == wanted:
            return 0
        at = self._text.find(b"\n" + wanted + b"\n")
        if at < 0:
            if not self._text.endswith(b"\n" + wanted):
                return None
            at = len(self._text) - len(wanted) - 1
        return int(np.searchsorted(self._offsets, at + 1))

    def __repr__(self) -> str:
        return f"Names({len(self):,} in {len(self._text) + self._offsets.nbytes:,} bytes)"


@dataclass
class Graph:
    """Entities, relations and distinct triples.

    Attributes:
        entities: names; the number of an entity is its place here.
        relations: names of relations.
        triples: int32, shape (count, 3): head, relation, tail.
        facts: where it came from: files read, skipped by reason, seconds, complete or not.
    """

    entities: Names
    relations: list[str]
    triples: np.ndarray
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.triples.ndim != 2 or self.triples.shape[1] != 3:
            raise ValueError(f"triples must have shape (count, 3), got {self.triples.shape}")

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.entities):,} entities, {len(self.relations)} relations, "
            f"{len(self.triples):,} triples)"
        )

    def degrees(self) -> np.ndarray:
        """In how many triples each entity stands, as head or tail: int64, one an entity."""
        ends = self.triples[:, (0, 2)].ravel()
        return np.bincount(ends, minlength=len(self.entities))


def distinct(triples: np.ndarray, entities: int, relations: int) -> np.ndarray:
    """The triples without repeats, sorted; each is one 64-bit key while that is done."""
    if not len(triples):
        return triples.reshape(0, 3).astype(np.int32)
    if float(entities) ** 2 * max(relations, 1) >= 2.0**63:
        return np.unique(triples, axis=0).astype(np.int32)
    keys = triples[:, 0].astype(np.int64)
    keys *= relations
    keys += triples[:, 1]
    keys *= entities
    keys += triples[:, 2]
    keys.sort()
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])]
    result = np.empty((len(keys), 3), np.int32)
    keys, result[:, 2] = np.divmod(keys, entities)
    result[:, 0], result[:, 1] = np.divmod(keys, relations)
    return result


def split(graph: Graph, held_out: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Hold out some triples whose two entities and relation still occur among the rest.

    Args:
        graph: what to split.
        held_out: how many to hold out at most; fewer where a small graph has no more to give.

    Returns:
        (train, test), int32 of shape (count, 3).
    """
    triples = graph.triples
    order = np.random.default_rng(seed).permutation(len(triples))
    degrees = graph.degrees()
    uses = np.bincount(triples[:, 1], minlength=len(graph.relations))
    test: list[int] = []
    for index in order:
        if len(test) >= held_out:
            break
        head, relation, tail = (int(part) for part in triples[index])
        if head == tail or min(degrees[head], degrees[tail], uses[relation]) < 2:
            continue
        degrees[head] -= 1
        degrees[tail] -= 1
        uses[relation] -= 1
        test.append(int(index))
    keep = np.ones(len(triples), bool)
    keep[test] = False
    return triples[keep], triples[test]


def save(graph: Graph, path: Path) -> None:
    """Write a graph as one file that is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(
                file,
                text=np.frombuffer(graph.entities._text, np.uint8),
                offsets=graph.entities._offsets,
                triples=graph.triples,
                head=np.frombuffer(
                    json.dumps({"relations": graph.relations, "facts": graph.facts}).encode(),
                    np.uint8,
                ),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def load(path: Path) -> Graph:
    """Read a saved graph; checksums (of the zip container) and shapes are verified.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is torn, or is something else.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            head = json.loads(data["head"].tobytes())
            offsets, triples = data["offsets"], data["triples"]
            text = data["text"].tobytes()
        names = Names(text, offsets)
        relations = [str(name) for name in head["relations"]]
        sound = (
            offsets.dtype == np.int64
            and triples.dtype == np.int32
            and len(offsets) >= 1
            and int(offsets[-1]) == (len(text) + 1 if len(names) else 0)
            and bool((np.diff(offsets) > 0).all())
        )
        graph = Graph(names, relations, triples, dict(head["facts"]))
        if sound and len(triples):
            limit = np.array([len(names), len(relations), len(names)])
            sound = bool((triples.min(0) >= 0).all() and (triples.max(0) < limit).all())
    except FileNotFoundError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        EOFError,
        zipfile.BadZipFile,
    ) as e:
        raise ValueError(f"{path} is not a saved graph, or is damaged: {e}") from e
    if not sound:
        raise ValueError(f"{path} is not a saved graph, or is damaged: its parts do not fit")
    return graph
