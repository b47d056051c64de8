"""What coming back after a crash costs: the same steps with and without an undo journal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from lowmem.bench.contenders import Disk
from lowmem.bench.counters import Device
from lowmem.bench.figures import figures
from lowmem.bench.turns import Run, counted, table, turn
from lowmem.bench.workloads import WORKLOADS, Gradients, Ids
from lowmem.dsa.optimizer import Durability

NAMES: dict[Durability, str] = {
    "none": "DSA, no journal",
    "process": "DSA, journal",
    "power": "DSA, journal and syncs",
}
_STRETCHES = 10


def durability(
    folder: Path,
    *,
    rows: int,
    dim: int,
    ids: Sequence[str],
    batch: int,
    steps: int,
    repeats: int,
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Hot steps between two commits, ``steps`` of them, for every promise.

    The first stretch after a commit saves each row at its first touch; ``first_touch`` is
    its cost against no journal, and ``steady`` that of the second half of the cycle. A
    commit is timed by itself.
    """
    param = table(rows, dim)
    param.data.fill_(0.01)
    each = max(1, steps // _STRETCHES)
    with contextlib.ExitStack() as stack:
        ways = {}
        for kind in NAMES:
            home = folder / kind
            home.mkdir()
            ways[kind] = way = Disk(param, home, durability=kind)
            stack.callback(way.close)
            way.name = NAMES[kind]
            way.touch_all()
        device = Device(folder)
        total = len(ids) * len(NAMES) * (repeats + 1)
        bar = stack.enter_context(tqdm(total=total, desc="durability", unit="cycle", leave=False))
        for source in [Ids(name, rows) for name in ids]:
            grads = Gradients(source, batch, dim)
            runs = {kind: Run(way, grads) for kind, way in ways.items()}
            cycles: dict[Durability, list[list[float]]] = {kind: [] for kind in NAMES}
            commits: dict[Durability, list[float]] = {kind: [] for kind in NAMES}
            for repeat in range(-1, repeats):  # the first is a warm-up, and makes the journal
                for kind, run in runs.items():
                    bar.set_postfix_str(NAMES[kind])
                    if kind != "none":
                        began = time.perf_counter()
                        ways[kind].commit()
                        commits[kind].append(time.perf_counter() - began)
                    with counted(run, device if repeat >= 0 else None):
                        samples = turn(run, float("inf"), timed=repeat >= 0, most=each * _STRETCHES)
                    if repeat >= 0:
                        cycles[kind].append(
                            [sum(samples[at * each : (at + 1) * each]) for at in range(_STRETCHES)]
                        )
                    bar.update()
            label = (
                f"commit every {each * _STRETCHES:,} steps, hot: {WORKLOADS[source.name]}, "
                f"{rows / 1e6:g}M × {dim}, batch {batch:,}"
            )
            median = {kind: np.median(times, axis=0) for kind, times in cycles.items()}
            half = _STRETCHES // 2
            for kind, run in runs.items():
                row = figures(run, limits, regime="durability", workload=label)
                mine, base = median[kind], median["none"]
                row["stretch_s"] = mine.tolist()
                row["steps_a_run"] = each * _STRETCHES
                row["first_touch"] = float(mine[0] / base[0])
                row["steady"] = float(mine[half:].sum() / base[half:].sum())
                if commits[kind]:
                    row["commit_s"] = float(np.median(commits[kind][1:] or commits[kind]))
                yield row
