"""A time budget that phases share: who is late takes from those who follow, not from the user."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_MEASURING = 0.35  # of the budget, at least; imports and compilation that leave less come on top
_MEASURING_S = 4.0  # and this long, or the whole of a smaller budget: less is too few steps
_SHORTEST_S = 0.02

OnProgress = Callable[[float, str], object]


class Stopped(Exception):
    """The person asked to stop; what was measured stays."""


class Budget:
    """Seconds for a list of phases, each with a weight.

    Args:
        seconds: the whole budget.
        weights: phase name to weight, in the order in which they run.
        on_progress: called with a fraction from 0 to 1 and what is going on.
        should_stop: asked often; true ends the check.
        began: ``time.perf_counter()`` when the budget began; now by default.
    """

    def __init__(
        self,
        seconds: float,
        weights: dict[str, float],
        on_progress: OnProgress | None,
        should_stop: Callable[[], bool] | None,
        began: float | None = None,
    ) -> None:
        self.start = time.perf_counter() if began is None else began
        self.seconds = seconds
        self.prepared_s = 0.0  # what passed before the first measurement
        self._late = 0.0
        self._left = dict(weights)
        self._on_progress = on_progress
        self._should_stop = should_stop

    def forgive_preparation(self) -> None:
        """Compiling for the first time may take long; the phases still get most of the time."""
        self.prepared_s = self.elapsed
        self._late = max(0.0, self.prepared_s + self._measuring(self.seconds) - self.seconds)

    @staticmethod
    def _measuring(seconds: float) -> float:
        return max(_MEASURING * seconds, min(_MEASURING_S, seconds))

    @property
    def enough(self) -> int:
        """The smallest whole number of seconds that preparation would have fitted into."""
        return math.ceil(max(self.prepared_s + _MEASURING_S, self.prepared_s / (1.0 - _MEASURING)))

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def remaining(self) -> float:
        return max(0.0, self.seconds + self._late - self.elapsed)

    def should_stop(self) -> bool:
        return self._should_stop is not None and bool(self._should_stop())

    def check(self) -> None:
        if self.should_stop():
            raise Stopped

    def progress(self, message: str, fraction: float | None = None) -> None:
        if self._on_progress is not None:
            done = self.elapsed / (self.seconds + self._late) if fraction is None else fraction
            self._on_progress(min(done, 1.0 if fraction is not None else 0.99), message)

    def begin(self, phase: str, message: str) -> float:
        """Seconds that a phase may take now: its share of what is left."""
        self.check()
        self.progress(message)
        total = sum(self._left.values())
        weight = self._left.pop(phase)
        return max(_SHORTEST_S, self.remaining * weight / total)
