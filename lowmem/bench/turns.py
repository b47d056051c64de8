"""Timing optimizers in turns on one table, and the figures of a result's row."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lowmem.bench.contenders import Way, make
from lowmem.bench.counters import Device, Usage
from lowmem.bench.harness import Timing
from lowmem.bench.workloads import Gradients, Ids

PAGE = 4096


@dataclass
class Run:
    """One contender with one stream of gradients, and what was measured."""

    way: Way
    grads: Gradients
    timing: Timing = field(default_factory=Timing)
    usage: Usage = field(default_factory=Usage)
    device_read: int = 0
    device_written: int = 0
    number: int = 0
    dense: Tensor | None = None

    def load(self) -> None:
        """Put the next step's gradient where autograd would have left it."""
        if self.way.takes_dense:
            if self.dense is None:
                self.dense = self.grads.at(self.number).to_dense()
            self.way.param.grad = self.dense
        else:
            self.way.param.grad = self.grads.at(self.number)
        self.number += 1


def turn(
    run: Run,
    seconds: float,
    *,
    timed: bool = True,
    before: Callable[[], object] | None = None,
    most: int | None = None,
) -> list[float]:
    """Steps of one contender for so many seconds of step time, at least one.

    Args:
        timed: record the steps; a warm-up is not.
        before: called before each step, not timed.
        most: at most so many steps.
    """
    samples: list[float] = []
    spent = 0.0
    collecting = gc.isenabled()
    gc.disable()
    clock = time.perf_counter
    try:
        while not samples or (spent < seconds and (most is None or len(samples) < most)):
            run.load()
            if before is not None:
                before()
            usage = Usage.now()
            began = clock()
            run.way.step()
            took = clock() - began
            if timed:
                run.usage.add(usage, Usage.now())
            samples.append(took)
            spent += took
    finally:
        run.way.param.grad = None
        if collecting:
            gc.enable()
    if timed:
        run.timing.repeats.append(samples)
    return samples


def take_turns(
    runs: Sequence[Run],
    *,
    seconds: float,
    repeats: int = 5,
    device: Device | None = None,
    before: Callable[[], object] | None = None,
    label: str = "",
) -> None:
    """Warm up, then ``repeats`` rounds in which every contender has a turn.

    Each round starts with another contender, so that nobody always runs behind the same one.
    """
    with tqdm(total=len(runs) * (repeats + 1), desc=label, unit="turn", leave=False) as bar:
        for run in runs:
            bar.set_postfix_str(f"warming up {run.way.name}")
            turn(run, seconds / 2, timed=False, before=before)
            bar.update()
        for repeat in range(repeats):
            for place in range(len(runs)):
                run = runs[(repeat + place) % len(runs)]
                bar.set_postfix_str(run.way.name)
                seen = device.bytes() if device else (0, 0)
                turn(run, seconds, before=before)
                if device:
                    now = device.bytes()
                    run.device_read += now[0] - seen[0]
                    run.device_written += now[1] - seen[1]
                bar.update()


def figures(
    run: Run, limits: dict[str, float], state: dict[str, int] | None = None, **labels: Any
) -> dict[str, Any]:
    """A result's row: labels, times, rates, traffic a step, and shares of the limits.

    ``rows_per_s`` counts different rows, ``ids_per_s`` gradient rows with duplicates.
    ``memory_share`` is the traffic that the step cannot avoid, 24 bytes a weight of each
    different row and 4 a gradient value, as a share of the memory's bandwidth.
    ``disk_share`` is the pages that were read and that the step needed, as a share of the
    disk's random 4 KiB reads at queue depth 32. ``limit_share`` is the larger one.
    ``state`` is for a contender that is closed.
    """
    grads, timing = run.grads, run.timing
    steps = len(timing.samples)
    distinct = float(np.mean([grads.distinct(n) for n in range(min(8, run.number))]))
    state = run.way.state_bytes() if state is None else state
    step_s = timing.median
    row: dict[str, Any] = {
        **labels,
        "contender": run.way.name,
        "rows": grads.ids.rows,
        "dim": grads.dim,
        "batch": grads.batch,
        "ids": grads.ids.name,
        "distinct": distinct,
        "rows_per_s": distinct / step_s,
        "ids_per_s": grads.batch / step_s,
        **timing.row(),
        "major_faults": run.usage.major_faults / steps,
        "minor_faults": run.usage.minor_faults / steps,
        "read_bytes": run.usage.read_bytes / steps,
        "written_bytes": run.usage.written_bytes / steps,
        "device_read_bytes": run.device_read / steps,
        "device_written_bytes": run.device_written / steps,
        **{f"{kind}_bytes": size for kind, size in state.items()},
    }
    for percent in (50, 95, 99):  # of few steps too: a cold step takes seconds
        row[f"p{percent}_s"] = timing.percentile(percent)
    traffic = 24 * grads.dim * distinct + 4 * grads.dim * grads.batch
    if run.way.takes_dense:
        traffic = 28 * grads.dim * grads.ids.rows
    if limits.get("update_bytes_per_s"):
        row["memory_share"] = traffic / step_s / limits["update_bytes_per_s"]
    if limits.get("random_read_iops_qd32") and run.usage.read_bytes:
        pages = min(run.usage.read_bytes / steps / PAGE, touched_pages(run))
        row["disk_share"] = pages / step_s / limits["random_read_iops_qd32"]
    shares = [row[key] for key in ("memory_share", "disk_share") if key in row]
    if shares:
        row["limit_share"] = max(shares)
    return row


def touched_pages(run: Run) -> float:
    """Pages of the file that a step touches, on average."""
    counts = []
    for number in range(min(8, run.number)):
        rows = np.unique(run.grads.ids_at(number))
        count = 0
        for address, size in run.way.places():
            first = (address + rows * size) // PAGE
            last = (address + (rows + 1) * size - 1) // PAGE
            spans = np.concatenate([first + n for n in range(int((last - first).max()) + 1)])
            ends = np.tile(last, len(spans) // len(last))
            count += len(np.unique(spans[spans <= ends]))
        counts.append(count)
    return float(np.mean(counts))


def table(rows: int, dim: int) -> Tensor:
    """A weight table of ``(rows, dim)``, not yet touched where nobody touches it."""
    return torch.nn.Parameter(torch.empty(rows, dim))


def hot_ways(
    names: Sequence[str], param: Tensor, folder: Path, stack: contextlib.ExitStack
) -> list[Way]:
    """New contenders whose every row has been touched; ``stack`` closes them."""
    rows, dim = param.shape
    param.data.fill_(0.01)
    ways = []
    for name in names:
        way = make(name, param, folder)
        stack.callback(way.close)
        ways.append(way)
        turn(Run(way, Gradients(Ids("uniform", rows), 16, dim)), 0, timed=False)
        way.touch_all()
    return ways


def add_ratio(rows: list[dict[str, Any]], key: str, to: str) -> None:
    """Give each row ``key``: how many times as fast as the contender ``to`` it is."""
    base = next((row["step_s"] for row in rows if row["contender"] == to), None)
    if base:
        for row in rows:
            row[key] = base / row["step_s"]
