"""What the I/O check predicts against what ``lowmem bench dsa`` then measures, hot and cold.

Both run on one directory, one after the other. A machine that others use changes in
between, so a comparison that fails is made again, both sides anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowmem.env import waiting_bytes

pytestmark = pytest.mark.slow

TOLERANCE = 0.35
ATTEMPTS = 3
GIB = 1 << 30
COLD = ("--cold-rows", "2500000", "--cold-batch", "65536", "--limit", "1")


def lowmem(*arguments: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "lowmem", *arguments, "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    return dict(json.loads(out.read_text()))


def measured(folder: Path, regime: str, ids: str, *more: str) -> float:
    result = lowmem(
        "bench", "dsa", "--regimes", regime, "--ids", ids, "--batch", "65536", "--dim", "128",
        "--contenders", "dsa", "--seconds", "2", "--directory", str(folder), *more,
        out=folder / "bench.json",
    )  # fmt: skip
    [row] = [row for row in result["rows"] if row["contender"] == "DSA"]
    return float(row["rows_per_s"])


def predicted(folder: Path, rows: int, ids: str, *more: str) -> dict[str, Any]:
    return lowmem(
        "iocheck", "--rows", str(rows), "--dim", "128", "--batch", "65536", "--access", ids,
        "--directory", str(folder), *more, out=folder / "check.json",
    )  # fmt: skip


@pytest.mark.parametrize("ids", ["uniform", "zipf"])
@pytest.mark.parametrize("regime", ["hot", "written-back", "cold-dropped", "cold-limit"])
def test_the_prediction_holds(tmp_path: Path, regime: str, ids: str) -> None:
    if regime == "cold-limit" and (sys.platform != "linux" or os.geteuid() != 0):
        pytest.skip("a memory limit needs root on Linux")
    waiting = waiting_bytes()
    if regime == "written-back" and waiting is None:
        pytest.skip("only Linux says how much changed data may wait")
    seen = []
    for _ in range(ATTEMPTS):
        if regime == "hot":
            guess = predicted(tmp_path, 1_000_000, ids)["dsa_rows_per_s_hot"]
            truth = measured(tmp_path, regime, ids, "--rows", "1e6")
        elif regime == "written-back":
            # All in memory, and more than may wait to be written: in turns so long that the
            # most of them run as a long run does.
            assert waiting is not None
            rows = int(1.2 * waiting / 1024)
            guess = predicted(tmp_path, rows, ids)["predicted_rows_per_s"]
            truth = measured(tmp_path, "hot", ids, "--rows", str(rows), "--seconds", "10")
        elif regime == "cold-dropped":
            guess = predicted(tmp_path, 1_000_000, ids)["dsa_rows_per_s_cold"]
            truth = measured(tmp_path, regime, ids, "--rows", "1e6", "--cold-batch", "65536")
        else:
            # The limit holds the page cache and a batch's own memory, and not the weights.
            cache = str(int(0.9 * GIB))
            figures = predicted(tmp_path, 2_500_000, ids, "--cache-bytes", cache)
            guess = figures["predicted_rows_per_s"]
            truth = measured(tmp_path, regime, ids, *COLD)
        seen.append((round(guess), round(truth), round(guess / truth, 2)))
        if abs(guess / truth - 1) <= TOLERANCE:
            print(f"{regime}, {ids}: predicted {guess:,.0f}, measured {truth:,.0f} rows/s")
            return
    pytest.fail(f"{regime}, {ids}: predicted, measured, ratio: {seen}")
