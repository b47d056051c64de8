"""The method that every benchmark shares: check, warm up, interleave, repeat, take medians.

A contender is a few callables. Before anything is timed, ``check_equal`` runs the
contenders on the same input and drops those that compute something else. Then
``time_interleaved`` times them in turns, so that a machine that slows down halfway slows
all of them down.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm


@dataclass
class Contender:
    """One way to do the same job.

    Attributes:
        name: What the table calls it.
        step: The timed call.
        prepare: Called before each step, untimed, with the number of the step (from 0, the
            same numbers for every contender): gradients, caches to drop.
        outcome: What the steps computed, for ``check_equal``. Tensors may be the live ones.
        metrics: Further figures for the result's row, asked once, after the timing.
        close: Called once at the end, also after an error.
    """

    name: str
    step: Callable[[], object]
    prepare: Callable[[int], object] | None = None
    outcome: Callable[[], Sequence[Tensor]] | None = None
    metrics: Callable[[], dict[str, Any]] | None = None
    close: Callable[[], object] | None = None


@dataclass
class Timing:
    """Seconds of every timed step, one inner list a repeat."""

    repeats: list[list[float]] = field(default_factory=list)

    @property
    def samples(self) -> np.ndarray:
        return np.asarray([second for repeat in self.repeats for second in repeat])

    @property
    def median(self) -> float:
        """Seconds a step: the median over the repeats of each repeat's mean.

        The mean within a repeat counts a stall for what it costs; the median over the
        repeats leaves out the repeat in which the machine was busy with something else.
        """
        return float(np.median([np.mean(repeat) for repeat in self.repeats]))

    @property
    def spread(self) -> float:
        """Half of the interquartile range of the repeats' means, as a share of the median."""
        low, high = np.percentile([np.mean(repeat) for repeat in self.repeats], [25, 75])
        return float((high - low) / 2 / self.median) if self.median else 0.0

    @property
    def stall_share(self) -> float:
        """The share of all timed seconds that steps took beyond twice the middle one."""
        samples = self.samples
        return float(np.maximum(samples - 2 * np.median(samples), 0).sum() / samples.sum())

    def percentile(self, percent: float) -> float:
        """Seconds that this percentage of all timed steps stayed below."""
        return float(np.percentile(self.samples, percent))

    def row(self) -> dict[str, float | int]:
        """The figures as a result's row holds them: ``step_s``, ``spread``, ``p50_s`` …"""
        figures: dict[str, float | int] = {
            "step_s": self.median,
            "spread": self.spread,
            "best_s": float(self.samples.min()),
            "repeats": len(self.repeats),
            "steps": len(self.samples),
        }
        if len(self.samples) >= 20:  # below that a percentile is just the slowest step
            for percent in (50, 95, 99):
                figures[f"p{percent}_s"] = self.percentile(percent)
        return figures


def check_equal(
    contenders: Sequence[Contender],
    *,
    against: str,
    steps: int = 3,
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> tuple[list[Contender], list[str]]:
    """Run every contender for some steps from the same start; keep those that agree.

    Args:
        contenders: Each with its own copy of the same starting point, and ``outcome``. One
            without ``outcome`` does a job of its own and is kept unchecked.
        against: Name of the contender that is right by definition.

    Returns:
        The contenders that agree (in order), and a sentence for each one that was dropped.
    """
    names = [contender.name for contender in contenders]
    if against not in names:
        raise ValueError(f"no contender is called {against!r}; there are {names}")
    ordered = sorted(contenders, key=lambda contender: contender.name != against)
    expected: list[Tensor] = []
    dropped: dict[str, str] = {}
    for contender in ordered:
        if contender.outcome is None:
            continue
        try:
            for number in range(steps):
                if contender.prepare is not None:
                    contender.prepare(number)
                contender.step()
            outcome = [tensor.detach().clone() for tensor in contender.outcome()]
        except (RuntimeError, ValueError, TypeError, OSError, MemoryError) as error:
            if contender.name == against:
                raise
            dropped[contender.name] = f"{contender.name} is left out: it failed with: {error}"
            continue
        if contender.name == against:
            expected = outcome
            continue
        reason = _difference(outcome, expected, rtol, atol)
        if reason:
            dropped[contender.name] = (
                f"{contender.name} is left out: it computes something else than {against}: {reason}"
            )
    kept = [contender for contender in contenders if contender.name not in dropped]
    return kept, [dropped[name] for name in names if name in dropped]


def _difference(
    outcome: Sequence[Tensor], expected: Sequence[Tensor], rtol: float, atol: float
) -> str:
    if len(outcome) != len(expected):
        return f"{len(outcome)} tensors instead of {len(expected)}"
    for index, (ours, theirs) in enumerate(zip(outcome, expected, strict=True)):
        try:
            torch.testing.assert_close(
                ours.to_dense(), theirs.to_dense(), rtol=rtol, atol=atol, check_dtype=False
            )
        except AssertionError as error:
            return f"tensor {index}: " + " ".join(str(error).split())
    return ""


def time_interleaved(
    contenders: Sequence[Contender],
    *,
    repeats: int = 5,
    steps: int = 1,
    warmup: int = 1,
    label: str = "",
    seconds: float | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the contenders in turns: ``repeats`` rounds of ``steps`` steps each.

    Args:
        warmup: Steps of each contender that are not timed, once, before the first round
            (compilers, first touches of memory, thread pools).
        label: What the progress bar says.
        seconds: A time budget. After it no further round starts, but never fewer than two
            rounds are run; a result says how many there were.

    The garbage collector is off while a round is timed. Each round starts with another
    contender, so that nobody always runs behind the same neighbour.
    """
    if repeats < 1 or steps < 1:
        raise ValueError(f"repeats and steps must be at least 1, got {repeats} and {steps}")
    timings = {contender.name: Timing() for contender in contenders}
    if len(timings) != len(contenders):
        raise ValueError(f"two contenders have one name: {[c.name for c in contenders]}")
    counters = dict.fromkeys(timings, 0)
    bar = tqdm(
        total=len(contenders) * (repeats + (warmup > 0)), desc=label, unit="round", leave=False
    )
    began = now()
    with bar:
        if warmup > 0:
            for contender in contenders:
                bar.set_postfix_str(f"warming up {contender.name}")
                _stretch(contender, warmup, counters, now)
                bar.update()
        for repeat in range(repeats):
            if seconds is not None and repeat >= 2 and now() - began > seconds:
                break
            turn = repeat % len(contenders) if contenders else 0
            for contender in [*contenders[turn:], *contenders[:turn]]:
                bar.set_postfix_str(contender.name)
                timings[contender.name].repeats.append(_stretch(contender, steps, counters, now))
                bar.update()
    return timings


def _stretch(
    contender: Contender, steps: int, counters: dict[str, int], now: Callable[[], float]
) -> list[float]:
    samples = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(steps):
            if contender.prepare is not None:
                contender.prepare(counters[contender.name])
            counters[contender.name] += 1
            began = now()
            contender.step()
            samples.append(now() - began)
    finally:
        if collecting:
            gc.enable()
    return samples


_UNSTEADY = 0.25  # of the median, half the interquartile range: a quiet machine has 0.02 to 0.1


def unsteady(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for those whose repeats lie far apart; none where they are alike."""
    worst: dict[str, float] = {}
    for row in rows:
        if row.get("spread", 0.0) > _UNSTEADY:
            worst[row["contender"]] = max(row["spread"], worst.get(row["contender"], 0.0))
    if not worst:
        return []
    said = ", ".join(f"{name} (spread {spread:.0%})" for name, spread in worst.items())
    return [
        f"The repeats of {said} lie far apart: the machine was busy with something else, so run "
        "it again for figures to rely on."
    ]


def close_all(contenders: Sequence[Contender]) -> None:
    """Close every contender, even if closing one fails; the first error is raised last."""
    errors = []
    for contender in contenders:
        try:
            if contender.close is not None:
                contender.close()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
