"""Reading folders of code: the same graph from any number of workers, cached, never torn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lowmem.demo import codegraph
from lowmem.demo import extract as extractor
from lowmem.demo.codegraph import code_graph, default_roots, find_files
from lowmem.demo.extract import extract
from lowmem.demo.graph import Graph


def named(graph: Graph) -> set[tuple[str, str, str]]:
    entities, relations = list(graph.entities), graph.relations
    return {(entities[h], relations[r], entities[t]) for h, r, t in graph.triples.tolist()}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    for i in range(90):
        folder = root / f"pkg{i % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"mod{i}.py").write_text(
            f"import os\nfrom pkg{(i + 1) % 5} import mod{i + 1} as calls\n"
            f"class C{i}(Base):\n    def run(self, x): return calls(x), len(x)\n"
        )
    (root / "pkg0" / "__init__.py").write_text("from . import mod0\n")
    (root / "pkg0" / "broken.py").write_text("def (")
    (root / "pkg0" / "__pycache__").mkdir()
    (root / "pkg0" / "__pycache__" / "cached.py").write_text("import never")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "other.py").write_text("import never")
    (root / "notes.txt").write_text("import never")
    return root


def read(tree: Path, cache: Path, **options) -> Graph:
    return code_graph([tree], cache=cache, progress=False, **options)


def test_the_graph_is_the_union_of_its_files(tree: Path, tmp_path: Path) -> None:
    expected = set()
    for path in tree.glob("pkg*/*.py"):
        if path.stem == "broken":
            continue
        package = path.stem == "__init__"
        module = path.parent.name if package else f"{path.parent.name}.{path.stem}"
        expected |= set(extract(path.read_text(), module, package))
    graph = read(tree, tmp_path / "cache")
    assert named(graph) == expected
    assert len(graph.triples) == len(expected)
    assert len(set(graph.entities)) == len(graph.entities)
    assert graph.facts["files"] == 92
    assert graph.facts["files_read"] == 91
    assert graph.facts["skipped"] == {"syntax": 1}
    assert graph.facts["complete"]


def test_workers_do_not_change_the_result(tree: Path, tmp_path: Path) -> None:
    one = read(tree, tmp_path / "1", workers=1)
    three = read(tree, tmp_path / "3", workers=3)
    assert list(one.entities) == list(three.entities)
    assert one.relations == three.relations
    np.testing.assert_array_equal(one.triples, three.triples)


def test_cached_until_a_file_changes(tree: Path, tmp_path: Path, monkeypatch) -> None:
    cache = tmp_path / "cache"
    first = read(tree, cache)
    (path,) = cache.iterdir()

    with monkeypatch.context() as patch:
        patch.setattr(codegraph, "_read", None)  # would fail if it were called
        again = read(tree, cache)
    assert again.facts["cached"] == str(path)
    assert named(again) == named(first)

    (tree / "pkg1" / "new.py").write_text("import brand_new\n")
    fresh = read(tree, cache)
    assert fresh.facts["cached"] is None
    assert ("pkg1.new", "imports", "brand_new") in named(fresh)
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize("damage", ["half", "empty", "flipped", "text"])
def test_a_damaged_cache_is_read_anew(tree: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    first = read(tree, cache)
    (path,) = cache.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "half":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = bytearray()
    elif damage == "flipped":
        data[len(data) // 2] ^= 0x10
    else:
        data = bytearray(b"not a graph")
    path.write_bytes(data)
    again = read(tree, cache)
    assert again.facts["cached"] is None
    assert named(again) == named(first)
    assert read(tree, cache).facts["cached"] == str(path)


def test_a_cache_that_cannot_be_written_is_no_error(tree: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert len(read(tree, blocked).triples)


def test_the_time_budget_ends_the_reading(tree: Path, tmp_path: Path, monkeypatch) -> None:
    slow = tmp_path / "slow.py"
    source = Path(extractor.__file__).read_text()
    slow.write_text(
        source.replace(
            "    for line in requests:", "    for line in requests:\n        SLEEP"
        ).replace("SLEEP", "import time; time.sleep(0.4)")
    )
    monkeypatch.setattr(extractor, "__file__", str(slow))
    cache = tmp_path / "cache"
    graph = read(tree, cache, workers=1, seconds=1.2)
    assert not graph.facts["complete"]
    assert 0 < graph.facts["files_read"] < 92
    assert graph.facts["seconds"] < 10
    # What was cut short serves the same budget again, but not a larger one.
    monkeypatch.undo()
    assert read(tree, cache, seconds=1.2).facts["cached"]
    assert read(tree, cache, seconds=60).facts["complete"]


def test_a_worker_that_dies_costs_its_files_only(tree: Path, tmp_path: Path, monkeypatch) -> None:
    deadly = tmp_path / "deadly.py"
    source = Path(extractor.__file__).read_text()
    deadly.write_text(
        source.replace(
            "    for line in requests:",
            "    import os\n    for line in requests:\n        b'broken' in line and os._exit(3)",
        )
    )
    monkeypatch.setattr(extractor, "__file__", str(deadly))
    graph = read(tree, tmp_path / "cache", workers=2)
    lost = graph.facts["skipped"]["reader died"]
    assert 0 < lost <= 24
    assert graph.facts["files_read"] == 92 - lost
    assert graph.facts["complete"]


def test_unreadable_folders_are_counted(tree: Path) -> None:
    def walk(top, onerror=None, **_):
        onerror(PermissionError("no"))
        yield from os_walk(top)

    os_walk = os.walk
    os.walk = walk
    try:
        files, skipped = find_files([tree])
    finally:
        os.walk = os_walk
    assert skipped == {"unreadable folder": 1}
    assert len(files) == 92


def test_odd_file_names_are_counted(tmp_path: Path) -> None:
    for name in ("fine.py", "two words.py", "line\nbreak.py"):
        (tmp_path / name).write_text("import os")
    files, skipped = find_files([tmp_path])
    assert [file[1] for file in files] == ["fine"]
    assert skipped == {"odd name": 2}


def test_default_roots_hold_the_standard_library_and_packages() -> None:
    modules = {module for _, module, _ in find_files(default_roots())[0]}
    assert {"json.decoder", "torch", "numpy.linalg"} <= modules


def test_works_without_a_main_guard_and_from_standard_input(tree: Path, tmp_path: Path) -> None:
    script = (
        "from lowmem.demo.codegraph import code_graph\n"
        f"g = code_graph([{str(tree)!r}], cache={str(tmp_path)!r}, progress=False, workers=2)\n"
        "print(len(g.triples))\n"
    )
    expected = len(read(tree, tmp_path / "other").triples)
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{expected}\n", done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0}, "seconds must be positive, got 0"),
        ({"seconds": float("nan")}, "seconds must be positive, got nan"),
        ({"limit": 0}, "limit must be at least 1, got 0"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
    ],
)
def test_bad_arguments(tree: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tree, tmp_path, **options)


def test_folders_without_code_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source below"):
        read(tmp_path, tmp_path)
    (tmp_path / "bad.py").write_text("def (")
    with pytest.raises(ValueError, match=r"no triple found in 0 files .*syntax"):
        read(tmp_path, tmp_path)
