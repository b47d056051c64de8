"""Timing optimizers in turns on one table."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lowmem.bench.contenders import NAMES, Way, make
from lowmem.bench.counters import (
    Device,
    PeakMemory,
    Usage,
    holding,
    mapped_bytes,
    trim,
)
from lowmem.bench.figures import add_ratio, figures
from lowmem.bench.harness import Timing
from lowmem.bench.workloads import WORKLOADS, Gradients, Ids

_WATCHED = 10  # steps whose memory is watched


@dataclass
class Run:
    """One contender with one stream of gradients, and what was measured.

    ``device_*`` stay ``None`` where the system does not count. ``step_bytes`` is the most
    memory that a step took for a while, ``cache_bytes`` what of the state's file was mapped.
    """

    way: Way
    grads: Gradients
    timing: Timing = field(default_factory=Timing)
    usage: Usage = field(default_factory=Usage)
    device_read: int | None = None
    device_written: int | None = None
    step_bytes: int = 0
    cache_bytes: int = 0
    number: int = 0
    dense: Tensor | None = None

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient that lies there when the step begins."""
        count = self.grads.ids.rows if self.way.takes_dense else self.grads.batch
        return 4 * self.grads.dim * count

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


def watch(run: Run, seconds: float, before: Callable[[], object] | None = None) -> list[float]:
    """A few steps that are not timed, at least one; the memory that they take is noted."""
    for number in range(run.number, run.number + _WATCHED):
        run.grads.ids_at(number)  # made now: they are not the step's memory
    if run.way.takes_dense:
        run.load()
    trim()  # what earlier steps gave back must not serve this one unseen
    with PeakMemory() as peak:
        samples = turn(run, seconds, timed=False, before=before, most=_WATCHED)
    run.step_bytes = max(run.step_bytes, peak.bytes)
    return samples


def warm_up(run: Run, seconds: float, before: Callable[[], object] | None = None) -> None:
    """Steps that are not timed, at least one; the first few are watched."""
    left = seconds - sum(watch(run, seconds, before))
    if left > 0:
        turn(run, left, timed=False, before=before)


@contextlib.contextmanager
def counted(run: Run, device: Device | None) -> Iterator[None]:
    """Add what the device reads and writes meanwhile to the run, and look at its cached pages."""
    if device is None or not device.known:
        yield
    else:
        seen = device.bytes()
        yield
        now = device.bytes()
        run.device_read = (run.device_read or 0) + now[0] - seen[0]
        run.device_written = (run.device_written or 0) + now[1] - seen[1]
    run.cache_bytes = mapped_bytes([address for address, _ in run.way.places()])


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
            warm_up(run, seconds / 2, before)
            bar.update()
        for repeat in range(repeats):
            for place in range(len(runs)):
                run = runs[(repeat + place) % len(runs)]
                bar.set_postfix_str(run.way.name)
                with counted(run, device):
                    turn(run, seconds, before=before)
                bar.update()


def meet(
    ways: Sequence[Way],
    folder: Path,
    title: str,
    *,
    regime: str,
    ids: Sequence[str],
    batches: Sequence[int],
    seconds: float,
    limits: dict[str, float],
    against: dict[str, str],
    before: Callable[[], object] | None = None,
    kind: type[Run] = Run,
) -> Iterator[dict[str, Any]]:
    """Rows of the result: contenders on one table, with every kind of ids and every batch.

    Args:
        title: of the regime; the workload's follows it.
        against: the key of a ratio, and the contender (of ``NAMES``) that it is taken to.
        before: called before each step, not timed.
    """
    rows, dim = ways[0].param.shape
    device = Device(folder)
    for source in [Ids(name, rows) for name in ids]:
        for batch in batches:
            grads = Gradients(source, batch, dim)
            runs = [kind(way, grads) for way in ways]
            for way in ways:
                way.flush()  # what is dirty now is not written back in somebody's turn
            label = f"{title}: {WORKLOADS[source.name]}, {size(rows, dim)}, batch {batch:,}"
            take_turns(runs, seconds=seconds, device=device, before=before, label=label)
            group = [figures(run, limits, regime=regime, workload=label) for run in runs]
            for key, name in against.items():
                add_ratio(group, key, NAMES[name])
            yield from group


def size(rows: int, dim: int) -> str:
    return f"{rows / 1e6:g}M × {dim}"


def table(rows: int, dim: int) -> Tensor:
    """A weight table of ``(rows, dim)``, not yet touched where nobody touches it."""
    return torch.nn.Parameter(torch.empty(rows, dim))


def hot_ways(
    names: Sequence[str], folder: Path, stack: contextlib.ExitStack, *, rows: int, dim: int
) -> list[Way]:
    """New contenders on one table, whose every row has been touched; ``stack`` closes them."""
    param = table(rows, dim)
    param.data.fill_(0.01)
    ways = []
    for name in names:
        with holding() as held:
            way = make(name, param, folder)
            stack.callback(way.close)
            ways.append(way)
            turn(Run(way, Gradients(Ids("uniform", rows), 16, dim)), 0, timed=False)
            way.touch_all()
        way.held_bytes = held.bytes
    return ways
