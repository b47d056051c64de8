"""A kernel that was compiled before any of the sources changed is compiled anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lowmem.kernels.cache import drop_stale


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "__pycache__").mkdir()
    for name, age in (("one.py", 30), ("two.py", 20), ("__pycache__/one.f-1.nbi", 10)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    return tmp_path


def test_a_cache_newer_than_every_source_stays(folder: Path) -> None:
    assert drop_stale(folder) == 0
    assert (folder / "__pycache__/one.f-1.nbi").exists()


@pytest.mark.parametrize("changed", ["one.py", "two.py"])
def test_a_change_of_any_source_drops_it(folder: Path, changed: str) -> None:
    os.utime(folder / changed, (1_000_000, 1_000_000))
    assert drop_stale(folder) == 1
    assert not (folder / "__pycache__/one.f-1.nbi").exists()
    assert drop_stale(folder) == 0


def test_no_cache_and_no_folder_are_no_errors(tmp_path: Path) -> None:
    assert drop_stale(tmp_path) == 0
    assert drop_stale(tmp_path / "missing") == 0
