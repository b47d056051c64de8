"""A person's own graph: a text file with one head, relation, tail a line, tabs between."""

from __future__ import annotations

import gzip
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from lowmem.demo.graph import Graph, Names, distinct


def read_triples(path: str | Path, *, progress: bool = True) -> Graph:
    """Read a tab-separated file of triples, plain or gzipped (told by its content), UTF-8.

    Lines are read one by one; names are kept once. Blank lines are passed over, repeated
    triples count once.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: a line has not three fields, or an empty one, or is not UTF-8, or the
            compressed data is damaged, or there is no triple at all; the message names the line.
    """
    path = Path(path)
    start = time.monotonic()
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    flat: array[int] = array("i")
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
        size = raw.seek(0, 2)
        raw.seek(0)
        with (
            gzip.open(raw) if compressed else raw as file,
            tqdm(
                total=size,
                desc=f"reading {path.name}",
                unit="B",
                unit_scale=True,
                mininterval=0.5,
                disable=not progress,
            ) as bar,
        ):
            count = 0
            for count, line in _lines(path, file):
                fields = line.split("\t")
                if len(fields) != 3 or not all(fields):
                    raise ValueError(
                        f"{path}, line {count}: expected head, relation and tail with tabs "
                        f"between, got {_said(fields)}: {line[:80]!r}"
                    )
                head, relation, tail = fields
                flat.append(entities.setdefault(head, len(entities)))
                flat.append(relations.setdefault(relation, len(relations)))
                flat.append(entities.setdefault(tail, len(entities)))
                if count % 20_000 == 0:
                    bar.update(raw.tell() - bar.n)
            bar.update(size - bar.n)
    if not flat:
        raise ValueError(f"{path}: no triple in it")
    triples = np.frombuffer(flat, np.int32).reshape(-1, 3)
    return Graph(
        Names.of(entities),
        list(relations),
        distinct(triples, len(entities), len(relations)),
        {"file": str(path), "lines": count, "seconds": round(time.monotonic() - start, 2)},
    )


def _lines(path: Path, file: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Numbered lines that are not blank, without their ends."""
    number = 0
    try:
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 text ({error})") from error
            line = line.rstrip("\r\n")
            if line:
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, after line {number}: damaged gzip data ({error})") from error


def _said(fields: list[str]) -> str:
    if len(fields) == 3:
        return "an empty field"
    return "1 field" if len(fields) == 1 else f"{len(fields)} fields"
