"""The short table of a long DSA result says what the long ones say."""

from __future__ import annotations

import pytest

from lowmem.bench.brief import brief
from lowmem.bench.contenders import NAMES
from lowmem.bench.report import Result


def row(workload: str, name: str, step_s: float, **more: float) -> dict[str, object]:
    return {"workload": workload, "contender": NAMES.get(name, name), "step_s": step_s, **more}


@pytest.fixture
def lines() -> list[str]:
    rows = [
        row("hot: a", "sparse-adam", 0.010, rows_per_s=1e5),
        row("hot: a", "memmap-random", 0.020, rows_per_s=5e4),
        row("hot: a", "dsa", 0.001, rows_per_s=1e6),
        row("fresh: b", "sparse-adam", 0.010, rows_per_s=1e5),
        row("fresh: b", "dsa", 0.004, rows_per_s=2.5e5, worst_stretch=0.75),
        row("end to end: c", "sparse-adam", 0.010, samples_per_s=7e3),
        row("end to end: c", "dsa", 0.005, samples_per_s=1.4e4),
        row("flat: d", "DSA, 1M rows", 0.001, rows_per_s=1e6, to_smallest=1.0),
        row("flat: d", "DSA, 40M rows", 0.002, rows_per_s=5e5, to_smallest=2.0),
    ]
    result = Result("dsa", "lowmem bench dsa", {"date": "2026-01-01"}, rows, [])
    return brief(result).splitlines()


def cells(lines: list[str], start: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_one_line_a_workload_with_dsa_against_its_peers(lines: list[str]) -> None:
    assert cells(lines, "hot: a") == [
        "hot: a", "100 k/s", "50.0 k/s", "1.00 M/s", "**10.0**", "**20.0**", "–",
    ]  # fmt: skip
    assert cells(lines, "fresh: b")[2:] == ["–", "250 k/s", "**2.5**", "–", "0.75"]
    assert cells(lines, "end to end: c")[1:4] == ["7.00 k/s", "–", "14.0 k/s"]


def test_heights_and_the_command_come_last(lines: list[str]) -> None:
    assert cells(lines, "DSA, 40M rows")[1:] == ["500 k/s", "2.00"]
    assert lines[-1].endswith("Command: `lowmem bench dsa`")
