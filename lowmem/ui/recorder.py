"""What was measured over the steps of a run: data only, no picture."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = tuple[NDArray[np.float64], NDArray[np.float64]]


class Recorder:
    """Numbers over steps, by name; a name may hold several lines, each with a label.

    >>> recorder = Recorder()
    >>> recorder.log(0, loss=4.2, snr={"layer 0": 3.1, "layer 1": 0.4})
    >>> recorder.names
    ['loss', 'snr']
    >>> recorder.labels("snr")
    ['layer 0', 'layer 1']
    """

    def __init__(self) -> None:
        self._data: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        self.last_step: float | None = None

    def log(self, step: float, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Record values at a step. NaN and infinity are kept, and drawn as gaps.

        Args:
            step: where on the x axis; never smaller than the step before.
            values, named: name to number (also a tensor of one element), or to a mapping
                of label to number for several lines or the rows of a heat map.

        Raises:
            TypeError: a value is no number. Nothing of this call is then recorded.
            ValueError: the step is no finite number, or goes back.
        """
        place = _number(step, "step")
        if not np.isfinite(place):
            raise ValueError(f"step is {step!r}; it must be a finite number")
        if self.last_step is not None and place < self.last_step:
            raise ValueError(
                f"step is {place:g}, but {self.last_step:g} is recorded already; "
                "take a new recorder for a new run"
            )
        new = []
        for name, value in {**(values or {}), **named}.items():
            lines = value if isinstance(value, Mapping) else {"": value}
            for label, number in lines.items():
                new.append((name, str(label), _number(number, f"{name} {label}".strip())))
        for name, label, number in new:
            steps, numbers = self._data.setdefault(name, {}).setdefault(label, ([], []))
            steps.append(place)
            numbers.append(number)
        self.last_step = place

    @property
    def names(self) -> list[str]:
        return list(self._data)

    def labels(self, name: str) -> list[str]:
        """The labels of a name in the order of their first value; ``[""]`` for a single line."""
        return list(self._data.get(name, {}))

    def series(self, name: str, label: str = "") -> Series:
        """Steps and values of one line; both empty where nothing was recorded."""
        steps, numbers = self._data.get(name, {}).get(label, ([], []))
        return np.array(steps, dtype=np.float64), np.array(numbers, dtype=np.float64)

    def last(self, name: str, label: str = "") -> float | None:
        """The latest value of one line."""
        numbers = self._data.get(name, {}).get(label, ([], []))[1]
        return numbers[-1] if numbers else None

    def grid(self, name: str) -> tuple[NDArray[np.float64], list[str], NDArray[np.float64]]:
        """Steps, labels and a matrix (labels × steps) with NaN where nothing was recorded."""
        lines = self._data.get(name, {})
        steps = np.unique(np.concatenate([[], *(line[0] for line in lines.values())]))
        matrix = np.full((len(lines), len(steps)), np.nan)
        for row, (at, numbers) in enumerate(lines.values()):
            matrix[row, np.searchsorted(steps, at)] = numbers
        return steps, list(lines), matrix

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write everything as ``name,label,step,value`` lines."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "label", "step", "value"])
            writer.writerows(self._lines())

    def _lines(self) -> Iterable[tuple[str, str, float, float]]:
        for name, lines in self._data.items():
            for label, (steps, numbers) in lines.items():
                for step, number in zip(steps, numbers, strict=True):
                    yield name, label, step, number


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name} is {value!r:.80}; record a number, or a mapping of label to number"
        ) from None
