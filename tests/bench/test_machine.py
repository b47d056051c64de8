"""What stands beside every figure."""

from __future__ import annotations

from pathlib import Path

from lowmem.bench import machine


def test_bandwidth_counts_the_bytes_that_the_pattern_moves() -> None:
    figures = machine.memory_bandwidth(1 << 20, repeats=1)
    assert figures["bandwidth_array_bytes"] == 1 << 20
    for name in ("read", "write", "update"):
        assert 1e6 < figures[f"{name}_bytes_per_s"] < 1e13


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    if not Path("/proc/self/mountinfo").exists():
        assert machine.file_system("/") is None
        return
    assert machine.file_system("/proc/self") == "proc"
    assert machine.file_system("/") not in (None, "proc")


def test_the_record_names_versions_and_date_but_no_folder(tmp_path: Path) -> None:
    facts = machine.describe(tmp_path, bandwidth=False)
    assert {"date", "cpu", "torch", "numba", "python", "file_system", "kernel_threads"} <= set(
        facts
    )
    assert str(tmp_path) not in str(facts)
