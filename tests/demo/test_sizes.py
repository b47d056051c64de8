"""How large a table, on machines of any size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowmem import env
from lowmem.demo.sizes import choose_size

GB = 10**9


@pytest.fixture
def machine(monkeypatch):
    def make(memory: float, disk: float, vram: float | None = None) -> None:
        monkeypatch.setattr(env, "available_memory_bytes", lambda: int(memory * GB))
        usage = type("usage", (), {"free": int(disk * GB)})
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: vram is not None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int((vram or 0) * GB), 0))

    return make


def test_the_usual_size_on_16_gb_and_on_colab(machine) -> None:
    for memory in (14.0, 11.0):
        machine(memory, 65)
        size = choose_size(None, None, Path())
        assert (size.rows, size.dim, size.device, size.why) == (10_000_000, 128, "cpu", "")
        assert size.weight_bytes == 5_120_000_000
        assert size.state_bytes == 10_240_000_000


def test_a_gpu_is_used_when_the_table_fits_in_it(machine) -> None:
    machine(11, 65, vram=14.7)
    assert choose_size(None, None, Path()).device == "cuda"
    machine(11, 65, vram=4)
    assert choose_size(None, None, Path()).device == "cpu"


@given(st.floats(3.3, 40), st.floats(1.2, 40))
def test_a_smaller_table_fits_and_says_why(memory: float, disk: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env, "available_memory_bytes", lambda: int(memory * GB))
        usage = type("usage", (), {"free": int(disk * GB)})
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        size = choose_size(None, None, Path(), least_rows=1)
    assert size.rows >= 1
    assert size.weight_bytes <= memory * GB
    assert size.state_bytes <= disk * GB
    assert (size.rows < 10_000_000) == bool(size.why)
    if size.why:
        assert ("of memory" in size.why) or ("of disk space" in size.why)
        assert f"{size.rows:,} rows" in size.why


def test_what_was_asked_for_is_not_changed_silently(machine) -> None:
    machine(6, 65)
    with pytest.raises(ValueError, match=r"need 5.12 GB of memory .* try --rows [\d,]+ or fewer"):
        choose_size(10_000_000, None, Path())
    machine(60, 6)
    with pytest.raises(ValueError, match=r"need 10.24 GB of disk space"):
        choose_size(10_000_000, None, Path())


def test_more_entities_than_rows(machine) -> None:
    machine(60, 65)
    with pytest.raises(ValueError, match="600,000 entities but the table only 5,000 rows; raise"):
        choose_size(5_000, None, Path(), least_rows=600_000)
    assert choose_size(None, None, Path(), least_rows=11_000_000).rows == 11_000_000
    machine(3.3, 65)
    with pytest.raises(ValueError, match="600,000 entities need a smaller --dim"):
        choose_size(None, None, Path(), least_rows=600_000)


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert choose_size(1000, 8, tmp_path / "a" / "b").rows == 1000
