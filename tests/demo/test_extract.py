"""What is read from a source file, written out by hand."""

from __future__ import annotations

import io
import json
from array import array
from pathlib import Path

import pytest

from lowmem.demo import extract as extractor
from lowmem.demo.extract import extract, extract_files, serve

CASES = {
    "imports, and what they stand for": (
        "pkg.mod",
        False,
        """
import os.path
import numpy as np
from . import sibling
from ..up import thing as other

def f():
    np.linalg.norm()
    other()
    os.path.join()
""",
        {
            ("pkg", "contains", "pkg.mod"),
            ("pkg.mod", "imports", "os.path"),
            ("pkg.mod", "imports", "numpy"),
            ("pkg.mod", "imports", "pkg"),
            ("pkg.mod", "imports_name", "pkg.sibling"),
            ("pkg.mod", "imports", "up"),
            ("pkg.mod", "imports_name", "up.thing"),
            ("pkg.mod", "defines", "pkg.mod.f"),
            ("pkg.mod.f", "calls", "numpy.linalg.norm"),
            ("pkg.mod.f", "calls", "up.thing"),
            ("pkg.mod.f", "calls", "os.path.join"),
        },
    ),
    "a package's own relative imports": (
        "pkg.sub",
        True,
        "from . import a\nfrom ..x import y\n",
        {
            ("pkg", "contains", "pkg.sub"),
            ("pkg.sub", "imports", "pkg.sub"),
            ("pkg.sub", "imports_name", "pkg.sub.a"),
            ("pkg.sub", "imports", "pkg.x"),
            ("pkg.sub", "imports_name", "pkg.x.y"),
        },
    ),
    "a class": (
        "m",
        False,
        """
import abc

class Base: pass

class A(Base, abc.ABC, Generic[T]):
    size: int
    limit = 3

    @property
    def area(self): return self.size

    @functools.wraps(f)
    def grow(self, by=1, *rest, **more):
        self.extent = by
        self.area()
        self.unknown()
        super().grow()
""",
        {
            ("m", "imports", "abc"),
            ("m", "defines", "m.Base"),
            ("m", "defines", "m.A"),
            ("m.A", "inherits", "m.Base"),
            ("m.A", "inherits", "abc.ABC"),
            ("m.A", "inherits", "Generic"),
            ("m.A", "has_attribute", ".size"),
            ("m.A", "has_attribute_type", "int"),
            ("m.A", "has_attribute", ".limit"),
            ("m.A", "defines_method", "m.A.area"),
            ("m.A.area", "decorated_by", "property"),
            ("m.A.area", "uses", ".size"),
            ("m.A", "defines_method", "m.A.grow"),
            ("m.A.grow", "decorated_by", ".wraps"),
            ("m.A.grow", "has_parameter", "by="),
            ("m.A.grow", "has_parameter", "rest="),
            ("m.A.grow", "has_parameter", "more="),
            ("m.A", "has_attribute", ".extent"),
            ("m.A.grow", "calls", "m.A.area"),
            ("m.A.grow", "calls", ".unknown"),
            ("m.A.grow", "calls", ".grow"),
            ("m.A.grow", "calls", "super"),
        },
    ),
    "annotations, errors, keywords, variables": (
        "m",
        False,
        """
def f(a: "list[int]", /, b: int | None = None, *, c: dict[str, T]) -> tuple[str, ...]:
    try:
        total = g(a, key=b)(more=1)
    except (KeyError, ValueError) as e:
        raise TypeError(h()) from e
    x.y.z = total
""",
        {
            ("m", "defines", "m.f"),
            ("m.f", "has_parameter", "a="),
            ("m.f", "takes", "list"),
            ("m.f", "takes", "int"),
            ("m.f", "has_parameter", "b="),
            ("m.f", "has_parameter", "c="),
            ("m.f", "takes", "dict"),
            ("m.f", "takes", "str"),
            ("m.f", "takes", "T"),
            ("m.f", "returns", "tuple"),
            ("m.f", "returns", "str"),
            ("m.f", "has_variable", "total="),
            ("m.f", "calls", "g"),
            ("g", "called_with", "key="),
            ("m.f", "catches", "KeyError"),
            ("m.f", "catches", "ValueError"),
            ("m.f", "raises", "TypeError"),
            ("m.f", "calls", "h"),
            ("m.f", "sets", ".z"),
        },
    ),
    "functions in functions, and module level": (
        "m",
        False,
        """
async def outer():
    def inner(): late()
    return inner
def late(): pass
if late: outer()
""",
        {
            ("m", "defines", "m.outer"),
            ("m.outer", "defines", "m.outer.inner"),
            ("m.outer.inner", "calls", "m.late"),
            ("m", "defines", "m.late"),
            ("m", "uses", "m.late"),
            ("m", "calls", "m.outer"),
        },
    ),
    "nothing": ("m", False, "", set()),
}


@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_triples_of(case: str) -> None:
    module, is_package, source, expected = CASES[case]
    triples = extract(source, module, is_package)
    assert set(triples) == expected
    assert len(triples) == len(set(triples))


def test_relative_imports_beyond_the_top_do_not_fail() -> None:
    assert extract("from ....... import x\nfrom . import y\n", "m") == []


def test_deep_nesting_is_read_or_refused_but_never_recurses_away() -> None:
    chain = "x" + ".a" * 5000 + "()"
    try:
        triples = extract(f"def f():\n    {chain}\n", "m")
    except (RecursionError, MemoryError):
        return  # this Python's own parser gave up
    assert ("m.f", "calls", ".a") in triples


def test_files_that_cannot_be_read_are_counted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(extractor, "MAX_SOURCE_BYTES", 1000)
    sources = {
        "good.py": b"import os\n",
        "latin.py": "# -*- coding: latin-1 -*-\nimport caf\xe9\n".encode("latin-1"),
        "bom.py": b"\xef\xbb\xbfimport bom\n",
        "syntax.py": b"def (:\n",
        "python2.py": b"print 'hello'\n",
        "null.py": b"x = 1\0\n",
        "bytes.py": b"x = '\xff\xfe'\n",
        "codec.py": b"# coding: no-such-codec\n",
        "huge.py": b"#" * 1001,
    }
    for name, data in sources.items():
        (tmp_path / name).write_bytes(data)
    files = [(str(tmp_path / name), name[:-3], False) for name in [*sources, "absent.py"]]
    names, flat, skipped = extract_files(files)
    triples = {tuple(names[i] for i in flat[at : at + 3]) for at in range(0, len(flat), 3)}
    assert triples == {
        ("good", "imports", "os"),
        ("latin", "imports", "café"),
        ("bom", "imports", "bom"),
    }
    assert skipped == {"syntax": 5, "too large": 1, "unreadable": 1}


def test_the_worker_answers_over_pipes(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import b\n")
    request = json.dumps([[str(path), "a", False]]).encode() + b"\n"
    replies = io.BytesIO()
    serve(io.BytesIO(request * 2), replies)
    replies.seek(0)
    for _ in range(2):
        text_size, data_size, skipped = json.loads(replies.readline())
        assert replies.read(text_size).decode().split("\n") == ["a", "imports", "b"]
        assert array("i", replies.read(data_size)).tolist() == [0, 1, 2]
        assert skipped == {}
    assert replies.read() == b""
