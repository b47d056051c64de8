"""The training loop that `lowmem demo` and notebook 1 share."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from lowmem.demo.kge import KGE

LR = 0.05
GROUPS, TRIPLES, NEGATIVES = 16, 512, 256


@dataclass(frozen=True)
class Batch:
    """Table ids of one step, on the model's device; see `KGE.loss` for the shapes."""

    head: Tensor
    relation: Tensor
    tail: Tensor
    negative: Tensor
    rows: int  # distinct rows of the table among them


@dataclass(frozen=True)
class Step:
    """What one training step did.

    Attributes:
        step: its number, from 1.
        seconds: since the loop began.
        loss: mean over the batch.
        rows: distinct table rows that the optimizer updated.
        rows_per_s: those by the whole step's time: sampling, forward, backward, optimizer.
        optimizer_seconds: the share of the optimizer in that time, ``opt.step()`` alone.
        memory: see `memory_bytes`; measured a few times a second, else the last measure.
        triples: trained on, in this step.
    """

    step: int
    seconds: float
    loss: float
    rows: int
    rows_per_s: float
    optimizer_seconds: float
    memory: dict[str, int]
    triples: int


@dataclass
class History:
    """Every step of a run, and whether it was stopped by hand."""

    steps: list[Step] = field(default_factory=list)
    stopped: bool = False

    @property
    def seconds(self) -> float:
        return self.steps[-1].seconds if self.steps else 0.0

    def rows_per_s(self, optimizer_only: bool = False) -> float:
        """Rows updated per second over the whole run, or in ``opt.step()`` alone."""
        rows = sum(step.rows for step in self.steps)
        if optimizer_only:
            return rows / max(sum(step.optimizer_seconds for step in self.steps), 1e-9)
        return rows / max(self.seconds, 1e-9)

    def loss(self, last: int = 50) -> float:
        """The mean loss of the last steps."""
        return float(np.mean([step.loss for step in self.steps[-last:]] or [np.nan]))

    def __repr__(self) -> str:
        return (
            f"History({len(self.steps):,} steps in {self.seconds:.1f} s, loss {self.loss():.3f}, "
            f"{self.rows_per_s():,.0f} rows/s{', stopped' if self.stopped else ''})"
        )


def memory_bytes() -> dict[str, int]:
    """Measured bytes of this process: ``ram`` of its own, ``mapped`` file pages, ``vram``.

    ``mapped`` pages are the page cache's: the system takes them back when others need them.
    Where the system does not tell them apart, ``ram`` is all of it.
    """
    found = {"ram": 0, "mapped": 0, "vram": 0}
    try:
        with open("/proc/self/status") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name == "RssAnon":
                    found["ram"] = int(rest.split()[0]) * 1024
                elif name in ("RssFile", "RssShmem"):
                    found["mapped"] += int(rest.split()[0]) * 1024
    except OSError:
        try:
            import resource
            import sys

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found["ram"] = peak if sys.platform == "darwin" else peak * 1024
        except ImportError:
            pass
    if torch.cuda.is_available():
        found["vram"] = torch.cuda.memory_allocated()
    return found


def batches(
    triples: np.ndarray,
    row_of: Tensor,
    relations: int,
    *,
    groups: int = GROUPS,
    size: int = TRIPLES,
    negatives: int = NEGATIVES,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Iterator[Batch]:
    """Endless batches of ``groups * size`` triples: shuffled epochs, each triple in one direction.

    Args:
        triples: entity numbers, shape (count, 3).
        row_of: the table row of each entity.
        relations: how many there are; a triple asked backwards gets its relation's number plus
            this.
        groups, size: groups a batch and triples a group.
        negatives: entities that each group compares with, drawn uniformly.
    """
    if not len(triples):
        raise ValueError("no triples to train on")
    random = np.random.default_rng(seed)
    rows = row_of.cpu().numpy()
    count = groups * size
    order = random.permutation(len(triples))
    at = 0
    while True:
        parts: list[np.ndarray] = []
        need = count
        while need:
            if at == len(order):
                order, at = random.permutation(len(triples)), 0
            parts.append(order[at : at + need])
            at += len(parts[-1])
            need -= len(parts[-1])
        chosen = triples[np.concatenate(parts)].astype(np.int64)
        backwards = random.random(count) < 0.5
        head = rows[np.where(backwards, chosen[:, 2], chosen[:, 0])]
        tail = rows[np.where(backwards, chosen[:, 0], chosen[:, 2])]
        relation = chosen[:, 1] + relations * backwards
        negative = rows[random.integers(0, len(rows), groups * negatives)]
        distinct = len(np.unique(np.concatenate([head, tail, negative])))

        def to(ids: np.ndarray) -> Tensor:
            return torch.from_numpy(ids.reshape(groups, -1)).to(device, non_blocking=True)

        yield Batch(to(head), to(relation), to(tail), to(negative), distinct)


def training(
    model: KGE,
    optimizer: torch.optim.Optimizer | Any,
    data: Iterator[Batch],
    entities: int,
    *,
    seconds: float | None = None,
    steps: int | None = None,
) -> Iterator[Step]:
    """Train, and give back what each step did; stop iterating whenever you like.

    The learning rate falls in a straight line to a hundredth over the given seconds or steps.

    Args:
        model, optimizer: what to train, with what.
        data: see `batches`.
        entities: of the graph, for the loss.
        seconds, steps: how long; with both, whichever ends first.
    """
    if seconds is None and steps is None:
        raise ValueError("give seconds, or steps, or both")
    start = time.perf_counter()
    rates = [group["lr"] for group in optimizer.param_groups]
    memory, measured = memory_bytes(), start
    before, number = start, 0
    while True:
        done = 0.0 if steps is None else number / steps
        if seconds is not None:
            done = max(done, (before - start) / seconds)
        if done >= 1:
            return
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * max(1 - done, 0.01)
        batch = next(data)
        loss = model.loss(batch.head, batch.relation, batch.tail, batch.negative, entities)
        loss.backward()
        value = loss.item()  # also waits for a GPU, so that the optimizer is timed alone
        at = time.perf_counter()
        optimizer.step()
        now = time.perf_counter()
        optimizer.zero_grad()
        number += 1
        if now - measured > 0.2:
            memory, measured = memory_bytes(), now
        yield Step(
            step=number,
            seconds=now - start,
            loss=value,
            rows=batch.rows,
            rows_per_s=batch.rows / max(now - before, 1e-9),
            optimizer_seconds=now - at,
            memory=memory,
            triples=batch.head.numel(),
        )
        before = now


def train(
    model: KGE,
    optimizer: torch.optim.Optimizer | Any,
    data: Iterator[Batch],
    entities: int,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    on_step: Callable[[Step], None] | None = None,
    progress: bool = True,
) -> History:
    """`training` with a progress bar. Ctrl-C ends it after the step at hand, and keeps it all.

    Args:
        on_step: called after each step; for live pictures.
        progress: show a bar with the loss and rows per second.
    """
    history = History()
    total = steps if steps is not None else round(seconds or 0, 1)
    with (
        _interrupt_flag() as interrupted,
        tqdm(
            total=total,
            desc="training",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f}{unit}{postfix}",
            unit=" steps" if steps is not None else " s",
            mininterval=0.5,
            disable=not progress,
        ) as bar,
    ):
        shown = shown_at = 0.0
        rows = 0
        for step in training(model, optimizer, data, entities, seconds=seconds, steps=steps):
            history.steps.append(step)
            if on_step is not None:
                on_step(step)
            rows += step.rows
            if step.seconds - shown_at >= 0.5 or interrupted.is_set():
                bar.set_postfix_str(
                    f"loss {step.loss:.3f}, {rows / (step.seconds - shown_at):,.0f} rows/s",
                    refresh=False,
                )
                done = step.step if steps is not None else min(step.seconds, total)
                bar.update(done - shown)
                shown, shown_at, rows = done, step.seconds, 0
            if interrupted.is_set():
                history.stopped = True
                break
        else:
            bar.update(total - shown)
    return history


class _interrupt_flag:
    """While it is open, the first Ctrl-C only sets a flag; the second is a KeyboardInterrupt.

    A step is never left half done. Off the main thread, where signals cannot be had, it does
    nothing.
    """

    def __enter__(self) -> threading.Event:
        self.flag = threading.Event()
        self.before: Any = None
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._set)
        return self.flag

    def _set(self, number: int, frame: FrameType | None) -> None:
        if self.flag.is_set():
            raise KeyboardInterrupt
        self.flag.set()

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)
