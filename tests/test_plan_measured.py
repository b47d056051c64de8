"""The planner's figures against a process that allocates the thing and trains it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowmem.plan import Machine, plan

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to measure a process"
)
BIG = Machine("big", ram=10**15, disk=10**15)
MEASURE = Path(__file__).with_name("plan_measure.py")

slow = pytest.mark.slow
TABLES = [
    ("Adam", 500_000, 128, 4096, "float32"),
    pytest.param(("Adam", 300_000, 128, 65_536, "bfloat16"), marks=slow),
    pytest.param(("SparseAdam", 500_000, 128, 4096, "float32"), marks=slow),
    ("SparseAdam", 500_000, 128, 65_536, "float32"),
    pytest.param(("SparseAdam", 500_000, 64, 65_536, "bfloat16"), marks=slow),
    pytest.param(("SparseAdam", 100_000, 64, 262_144, "float32"), marks=slow),
    pytest.param(("DSA", 500_000, 128, 4096, "float32"), marks=slow),
    ("DSA", 500_000, 128, 65_536, "float32"),
    pytest.param(("DSA", 500_000, 64, 65_536, "bfloat16"), marks=slow),
    pytest.param(("DSA", 100_000, 64, 262_144, "float32"), marks=slow),
]
MODELS = [
    ("AdamW", 4096, 3, 1, "float32"),
    pytest.param(("AdamW", 4096, 3, 1, "bfloat16"), marks=slow),
    ("SlimAdamW", 4096, 3, 1, "float32"),
    pytest.param(("SlimAdamW", 4096, 3, 1, "bfloat16"), marks=slow),
]


def measure(case: tuple[Any, ...], directory: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(MEASURE), *map(str, case)],
        cwd=directory, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def close(planned: int, measured: int) -> bool:
    return abs(planned - measured) <= max(0.05 * measured, 64e6)


@pytest.mark.parametrize("case", TABLES, ids=lambda case: "-".join(map(str, case)))
def test_a_table_takes_what_was_planned(case: tuple[Any, ...], tmp_path: Path) -> None:
    choice, rows, dim, batch, dtype = case
    planned = plan(rows, dim, BIG, batch=batch, dtype=dtype)[choice]
    measured = measure(case, tmp_path)
    ram = planned.total("ram") - planned.bytes["ram"]["runtime"]
    assert close(ram, measured["ram"] - measured["runtime"])
    assert abs(planned.total("disk") - measured["disk"]) <= 0.02 * measured["disk"] + 1e6
    # The allowance for Python and torch is one figure for all: generous, not short.
    assert measured["runtime"] - 64e6 <= planned.bytes["ram"]["runtime"]


@pytest.mark.parametrize("case", MODELS, ids=lambda case: "-".join(map(str, case)))
def test_a_model_takes_what_was_planned(case: tuple[Any, ...], tmp_path: Path) -> None:
    choice, side, layers, _, dtype = case
    measured = measure(case, tmp_path)
    planned = plan(
        parameters=layers * side * side, machine=BIG, dtype=dtype, share=measured["share"]
    )[choice]
    ram = planned.total("ram") - planned.bytes["ram"]["runtime"]
    assert close(ram, measured["ram"] - measured["runtime"])
