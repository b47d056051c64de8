"""The rules file: what is written is read back, and no file does worse than a ValueError."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.slim.rulesfile import Part, Split, fit_rule, read_rules, write_rules

axes = st.none() | st.lists(st.integers(-4, 9), unique=True, min_size=1).map(tuple)
part = st.builds(Part, st.integers(1, 99), axes, st.text(max_size=4))
rule = axes | st.builds(
    Split,
    st.integers(-3, 9),
    st.lists(part, min_size=1, max_size=4).map(tuple),
    st.integers(1, 5),
)


@settings(max_examples=100, deadline=None)
@given(rules=st.dictionaries(st.text(max_size=9), rule, max_size=5))
def test_what_is_written_is_read_back(rules, tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "made" / "rules.json"
    write_rules(path, rules)
    assert read_rules(path) == rules
    assert [p.name for p in path.parent.iterdir()] == ["rules.json"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["split", "parts", "repeat", "size", "axes", "name"]) | st.text(),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=40) | st.text(max_size=40) | json_values)
def test_no_file_does_worse_than_a_value_error(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "rules.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(ValueError):
        for name, each in read_rules(path).items():
            fit_rule(each, (4, 6), name)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "rules.json"
    write_rules(path, {"a": [1]})
    with pytest.raises(TypeError):
        write_rules(path, {"a": "x"})
    assert read_rules(path) == {"a": (1,)}
    assert [p.name for p in tmp_path.iterdir()] == ["rules.json"]


def test_a_file_of_the_published_form_is_one_that_people_can_read(tmp_path):
    path = tmp_path / "rules.json"
    write_rules(path, {"h.0.weight": (1,), "h.0.bias": None})
    assert path.read_text() == '{\n    "h.0.weight": [1],\n    "h.0.bias": null\n}\n'
    path.write_text('{\n "_orig_mod.w": [\n  0,\n  1\n ],\n "ln": null,\n "e": []\n}')
    assert read_rules(path) == {"_orig_mod.w": (0, 1), "ln": None, "e": None}


def test_a_file_too_large_to_be_rules_is_not_read(tmp_path):
    path = tmp_path / "rules.json"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match="too large"):
        read_rules(path)
