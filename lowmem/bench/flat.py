"""Does a step's cost, or its memory, depend on how many rows the table has?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lowmem.bench.contenders import NAMES, Disk
from lowmem.bench.counters import Device, holding
from lowmem.bench.figures import figures
from lowmem.bench.turns import Run, table, take_turns, watch
from lowmem.bench.workloads import Gradients, Ids

# Their pages, one a row in a tall table, are few enough for the system not to start writing
# them back meanwhile.
HOT_ROWS = 100_000


def flat(
    folder: Path,
    *,
    rows: Sequence[int],
    dim: int,
    batch: int,
    memory_batches: Sequence[int],
    seconds: float,
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """DSA on tables of several heights, the same number of hot rows scattered over each.

    The weights and the file are reserved in full; memory is taken by the hot rows only. The
    result has a row a height with the cost of a step against the lowest table's, and a row a
    height and batch with the most memory that the steps took beyond weights, gradient and
    page cache.
    """
    hot = min(HOT_ROWS, *rows)
    with contextlib.ExitStack() as stack:
        runs = []
        for count in rows:
            ids = Ids("uniform", count, hot=hot)
            param = table(count, dim)
            home = folder / f"{count}"
            home.mkdir()
            with holding() as held:
                way = Disk(param, home)
                stack.callback(way.close)
            way.held_bytes = held.bytes
            way.name = f"{NAMES['dsa']}, {count / 1e6:g}M rows"
            chosen = ids.hot_rows
            assert chosen is not None
            with torch.no_grad():
                param[torch.from_numpy(chosen)] = 0.01
            # By steps, so that no row comes for the first time while it is timed; and once
            # more after they were written back, so that none is clean.
            way.touch(chosen)
            way.flush()
            way.touch(chosen)
            runs.append(Run(way, Gradients(ids, batch, dim)))
        label = f"flat: dim {dim}, {hot:,} hot rows scattered over the table, batch {batch:,}"
        take_turns(runs, seconds=seconds, device=Device(folder), label=label)
        for run in runs:
            row = figures(run, limits, regime="flat", workload=label)
            base = runs[0].timing.median
            row["to_smallest"] = row["step_s"] / base
            del row["rss_bytes"]  # the weights are not all in memory
            yield row
        for run in runs:
            for size in memory_batches:
                probe = Run(run.way, Gradients(run.grads.ids, size, dim))
                watch(probe, float("inf"))
                yield {
                    "regime": "memory",
                    "workload": f"memory that steps take beyond weights, gradient and page "
                    f"cache, dim {dim}",
                    "contender": f"{run.way.name}, batch {size:,}",
                    "rows": run.grads.ids.rows,
                    "dim": dim,
                    "batch": size,
                    "gradient_bytes": probe.gradient_bytes,
                    "step_bytes": probe.step_bytes,
                }
