"""Steps, timed so that one stall neither hides nor rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

STRETCHES = 5
SURE_STEPS = 3
_SURE_SPREAD = 0.4
_LEAST_S = 0.15  # where making the batches has used up the time: a few steps, unless slow ones


@dataclass(frozen=True)
class StepCost:
    """Measured: steps of ``ids`` ids, and what they touched.

    ``seconds`` and ``spread`` are those of ``typical``. ``write_back_s`` is how long it took
    after a step until the touched pages were on disk.
    """

    ids: int
    seconds: float
    distinct_rows: int
    pages: int
    steps: int
    write_back_s: float = 0.0
    spread: float = 0.0

    @property
    def rows_per_s(self) -> float:
        """Different rows updated in a second, as ``lowmem bench dsa`` counts them."""
        return self.distinct_rows / self.seconds

    @property
    def few(self) -> bool:
        """Whether these are too few steps to tell how far they lie apart."""
        return self.steps < SURE_STEPS

    @property
    def unlike(self) -> bool:
        """Whether the steps lie too far apart: something else ran at the same time."""
        return self.spread > _SURE_SPREAD

    @property
    def sure(self) -> bool:
        """Whether the steps were enough, and alike enough, to be compared with others."""
        return not (self.few or self.unlike)


def typical(times: Sequence[float]) -> tuple[float, float]:
    """Seconds of a step, and how far stretches of steps lie apart.

    The steps are cut into up to five stretches. The mean of a stretch counts a stall for
    what it costs; the median over the stretches leaves out the one in which the machine was
    busy with something else: the way in which ``lowmem bench`` counts.

    Returns:
        The median of the stretches' means, and half of their interquartile range as a share
        of it.
    """
    stretches = np.array_split(np.asarray(times), min(STRETCHES, len(times)))
    means = [float(np.mean(stretch)) for stretch in stretches]
    low, middle, high = np.percentile(means, [25, 50, 75])
    return float(middle), float((high - low) / 2 / middle) if middle else 0.0


def time_steps(
    step: Callable[[int], object], seconds: float, should_stop: Callable[[], bool]
) -> list[float]:
    """Seconds of each step: at least one, and three unless they are slow."""
    seconds = max(seconds, _LEAST_S)
    times: list[float] = []
    begin = time.perf_counter()
    for number in range(100_000):
        spent = time.perf_counter() - begin
        late = spent > seconds * (1.0 if number >= SURE_STEPS else 1.5)
        if number and (late or should_stop()):
            break
        start = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - start)
    return times
