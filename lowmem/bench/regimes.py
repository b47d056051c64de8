"""The conditions under which the contenders meet in one process: hot, fresh, cache dropped."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from lowmem.bench.cold import evict_all
from lowmem.bench.contenders import NAMES, Disk, Way, make, make_shared
from lowmem.bench.counters import Device, holding, take_back
from lowmem.bench.figures import add_ratio, figures
from lowmem.bench.harness import Contender, check_equal
from lowmem.bench.limits import disk_limits, fill_random
from lowmem.bench.turns import (
    Run,
    counted,
    meet,
    size,
    table,
    turn,
    watch,
)
from lowmem.bench.workloads import WORKLOADS, Gradients, Ids
from lowmem.dsa.header import HEADER_BYTES
from lowmem.env import available_memory_bytes

Rows = Iterator[dict[str, Any]]
_STRETCHES = 10


def equal(names: Sequence[str], folder: Path, dim: int) -> tuple[list[str], list[str]]:
    """The contenders that compute what SparseAdam computes, and a sentence for each other one.

    A small table, gradients with many duplicates, weights and both moments compared.
    """
    rows, batch = 5_000, 4_096
    grads = Gradients(Ids("zipf", rows), batch, dim)
    contenders, ways = [], []
    for name in dict.fromkeys([*names, "sparse-adam"]):
        param = table(rows, dim)
        with torch.no_grad():
            param.copy_(torch.linspace(-1, 1, rows * dim).view(rows, dim))
        home = folder / "equal"
        home.mkdir(exist_ok=True)
        way = make(name, param, home)
        ways.append(way)
        run = Run(way, grads)

        def prepare(number: int, run: Run = run) -> None:
            run.load()

        def outcome(way: Way = way) -> list[torch.Tensor]:
            return [way.param, *way.moments()]

        contenders.append(Contender(name, way.step, prepare, None if way.takes_dense else outcome))
    try:
        kept, notes = check_equal(contenders, against="sparse-adam", steps=5)
    finally:
        for way in ways:
            way.close()
    return [contender.name for contender in kept if contender.name in names], notes


def hot(
    ways: Sequence[Way],
    folder: Path,
    *,
    ids: Sequence[str],
    batches: Sequence[int],
    seconds: float,
    limits: dict[str, float],
) -> Rows:
    """Every row was touched before (see ``hot_ways``), and everything is in memory."""
    return meet(
        ways,
        folder,
        "hot",
        regime="hot",
        ids=ids,
        batches=batches,
        seconds=seconds,
        limits=limits,
        against={"to_sparse": "sparse-adam"},
    )


def fresh(
    names: Sequence[str],
    folder: Path,
    *,
    rows: int,
    dim: int,
    ids: str,
    batch: int,
    limits: dict[str, float],
    repeats: int,
    passes: float,
) -> Rows:
    """From the first step on: no page of the state has been touched before.

    Half way, what is on disk is written back, so that the first write to each page after a
    write-back is in the figures, too. Before each run, and not timed, memory for twice the
    state is taken back from the host, where a virtual machine has lent it.
    """
    param = table(rows, dim)
    param.data.fill_(0.01)
    steps = max(_STRETCHES, round(passes * rows / batch / _STRETCHES) * _STRETCHES)
    each = steps // _STRETCHES
    grads = Gradients(Ids(ids, rows), batch, dim)
    label = f"fresh: {WORKLOADS[ids]}, {size(rows, dim)}, batch {batch:,}, first {steps:,} steps"
    firsts: dict[str, list[float]] = {name: [] for name in names}
    stretches: dict[str, list[list[float]]] = {name: [] for name in names}
    runs: dict[str, Run] = {}
    states: dict[str, dict[str, int]] = {}
    device = Device(folder)
    with tqdm(total=len(names) * repeats, desc=label, unit="run", leave=False) as bar:
        for repeat in range(repeats):
            for place in range(len(names)):
                name = names[(repeat + place) % len(names)]
                bar.set_postfix_str(NAMES[name])
                home = folder / f"fresh-{repeat}"
                home.mkdir(exist_ok=True)
                take_back(min(2 * 8 * rows * dim, (available_memory_bytes() or 0) // 4))
                with contextlib.ExitStack() as stack:
                    stack.callback(shutil.rmtree, home, ignore_errors=True)
                    with holding() as held:
                        way = make(name, param, home)
                        stack.callback(way.close)
                        run = runs.setdefault(name, Run(way, grads))
                        run.way, run.number = way, 0
                        with counted(run, device):
                            samples = turn(run, float("inf"), most=steps // 2)
                            way.flush()
                            samples += turn(run, float("inf"), most=steps - steps // 2)
                    run.timing.repeats[-2:] = [samples]
                    way.held_bytes, states[name] = held.bytes, way.state_bytes()
                    if repeat == repeats - 1:
                        watch(run, float("inf"))
                firsts[name].append(samples[0])
                stretches[name].append(
                    [sum(samples[at * each : (at + 1) * each]) for at in range(_STRETCHES)]
                )
                bar.update()
    group = [
        figures(runs[name], limits, states[name], regime="fresh", workload=label) for name in names
    ]
    add_ratio(group, "to_sparse", NAMES["sparse-adam"])
    base = np.median(stretches["sparse-adam"], axis=0) if "sparse-adam" in names else None
    for name, row in zip(names, group, strict=True):
        median = np.median(stretches[name], axis=0)
        row["first_step_s"] = float(np.median(firsts[name]))
        row["stretch_s"] = median.tolist()
        row["steps_a_run"] = steps
        if base is not None:
            row["stretch_ratio"] = (base / median).tolist()
            row["worst_stretch"] = float((base / median).min())
    yield from group


def dropped(
    names: Sequence[str],
    folder: Path,
    *,
    rows: int,
    dim: int,
    ids: Sequence[str],
    batches: Sequence[int],
    seconds: float,
    disk_seconds: float,
    limits: dict[str, float],
) -> Rows:
    """The state's file is written back and dropped from memory before each step."""
    param = table(rows, dim)
    param.data.fill_(0.01)
    with contextlib.ExitStack() as stack:
        ways = make_shared([name for name in names if name.startswith("memmap")], param, folder)
        for way in ways:
            stack.callback(way.close)
        path = next(way for way in ways if isinstance(way, Disk)).store.path
        fill_random(path, HEADER_BYTES, rows * dim * 8, "filling the state")
        evict_all(ways)
        limits.update(disk_limits(path, disk_seconds))
        yield from meet(
            ways,
            folder,
            "cold, cache dropped before each step",
            regime="cold-dropped",
            ids=ids,
            batches=batches,
            seconds=seconds,
            limits=limits,
            against={"to_memmap": "memmap", "to_random": "memmap-random"},
            before=lambda: evict_all(ways),
        )
