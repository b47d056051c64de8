"""How far Adam's second moment is from its means: the measure, and when to take it.

``snr(v, axes)`` is the mean over the kept axes of (mean of v) squared over (variance of v),
both over ``axes``: the signal-to-noise ratio of "When Can You Get Away with Low Memory
Adam?". Replacing v by its mean costs a relative squared error of 1/(1 + SNR) a slice, so
above 1 the mean says more about v than is lost.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.slim.moments import slice_moments
from lowmem.slim.records import (
    MAX_STEP,
    Record,
    as_whole,
    format_records,
    header,
    is_writable,
    read_records,
)
from lowmem.slim.report import some_names
from lowmem.slim.rules import derive_rules
from lowmem.slim.rulesfile import Split
from lowmem.slim.second_moments import SecondMoment, foreign, second_moments, splits_of

logger = logging.getLogger(__name__)

Axes = tuple[int, ...]


def snr(v: Tensor, axes: int | Sequence[int]) -> float:
    """The mean over the kept axes of (mean of ``v``)² / (variance of ``v``) over ``axes``.

    The variance is the population's. A slice of one repeated value counts as infinitely
    compressible. An all-zero slice tells nothing and is left out; a tensor that is all zero
    gives 0.

    Args:
        v: A second moment, any shape, floating point or integer, on any device.
        axes: What to average over; negative axes count from the end.

    Raises:
        TypeError: ``v`` is not a real dense tensor.
        ValueError: ``v`` is empty, or ``axes`` is empty, out of range or repeated.

    Example:
        >>> snr(torch.tensor([[1.0, 3.0], [2.0, 6.0]]), 1)
        4.0
    """
    if not isinstance(v, Tensor) or v.is_complex() or v.layout != torch.strided:
        kind = f"{v.layout} {v.dtype}" if isinstance(v, Tensor) else type(v).__name__
        raise TypeError(f"v must be a dense tensor of real numbers, got {kind}")
    if v.numel() == 0:
        raise ValueError(f"v is empty: its shape is {tuple(v.shape)}")
    listed = isinstance(axes, Iterable) and getattr(axes, "ndim", 1) > 0
    given: tuple[Any, ...] = tuple(axes) if listed else (axes,)  # type: ignore[arg-type]
    if not given:
        raise ValueError("axes names no axis")
    wanted = []
    for axis in given:
        place = as_whole(axis)
        if place is None or not -v.dim() <= place < v.dim():
            raise ValueError(f"axis {axis!r} does not exist: v has the shape {tuple(v.shape)}")
        wanted.append(place)
    resolved = tuple(sorted(axis % v.dim() for axis in wanted))
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"axes names an axis twice: {given}")
    return float(slice_moments(v, [resolved])[0, 0])


class _OnClassToo:
    """A method that is given a new object where it is called on the class."""

    def __init__(self, function: Callable[..., SNRTracker]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(
        self, instance: SNRTracker | None, owner: type[SNRTracker]
    ) -> Callable[[str | os.PathLike[str]], SNRTracker]:
        if instance is not None:
            return functools.partial(self.function, instance)

        def load(path: str | os.PathLike[str]) -> SNRTracker:
            return self.function(owner(save_dir=Path(path).parent), path)

        return load


class SNRTracker:
    """Measures the SNR of every second moment at set steps, and keeps the records.

    What is measured is written at once, whole lines at a time, to a file of this run's own in
    ``save_dir``, ``snr_DATE-TIME_SUFFIX.csv``: a run that dies keeps it. ``tracker.path`` is
    its path, and is logged once; ``save_all_results`` gives it the name that you like, and
    ``load`` reads such a file back.

    Args:
        start_step: The first step to measure at.
        early_freq: From then on measure at every multiple of this ...
        early_step_threshold: ... below this step,
        late_freq: and at every multiple of this from that step on.
        save_dir: Folder for the records, made if it is not there.
        all_axes: Measure every subset of axes of every tensor. By default tensors of up to
            two dimensions get every subset; convolutions get fan-in, fan-out (with the
            kernel's area and without), the area and everything; other stacks of matrices get
            the subsets of the last two axes.

    Example:
        >>> tracker = SNRTracker()
        >>> for step in range(1, steps + 1):
        ...     train(batch)
        ...     if tracker.should_measure(step):
        ...         tracker.measure_and_save(model=model, optimizer=optimizer, step=step)
        >>> tracker.save_all_results("snr.csv")
        >>> rules = tracker.rules()
    """

    def __init__(
        self,
        start_step: int = 1,
        early_freq: int = 100,
        late_freq: int = 1000,
        early_step_threshold: int = 1000,
        save_dir: str | os.PathLike[str] = "snr_data",
        *,
        all_axes: bool = False,
    ) -> None:
        for name, value, least in (
            ("start_step", start_step, 0),
            ("early_freq", early_freq, 1),
            ("late_freq", late_freq, 1),
            ("early_step_threshold", early_step_threshold, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
        os.makedirs(save_dir, exist_ok=True)
        self.start_step = start_step
        self.early_freq = early_freq
        self.late_freq = late_freq
        self.early_step_threshold = early_step_threshold
        self.save_dir = Path(save_dir)
        self.all_axes = all_axes
        self.records: list[Record] = []
        self.path: Path | None = None
        self._steps: set[int] = set()
        self._written = 0  # records that the file at `path` holds,
        self._size = 0  # in this many bytes
        self._model: weakref.ref[nn.Module] | None = None
        self._splits: dict[int, Split] = {}  # of that model
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        where = f"in {self.path}" if self.path else "(no file yet)"
        return f"<SNRTracker: {len(self.records)} records of {len(self._steps)} steps {where}>"

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles find the model's splits anew, and write to a file of their own.
        state = dict(self.__dict__)
        state.update(_model=None, _splits={}, path=None, _written=0, _size=0)
        return state

    def should_measure(self, step: int) -> bool:
        """Whether ``step`` is one to measure at: ``start_step``, then the multiples."""
        if step <= self.start_step:
            return step == self.start_step
        frequency = self.early_freq if step < self.early_step_threshold else self.late_freq
        return step % frequency == 0

    def measure_and_save(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, step: int
    ) -> None:
        """Measure every second moment that ``optimizer`` holds for ``model``'s parameters.

        Parameters without a state yet are skipped. So are those of which the optimizer keeps
        means already, as SlimAdamW does by its rules, with one warning that names them:
        measure AdamW, or SlimAdamW without rules.

        Raises:
            TypeError: ``model`` has no ``named_parameters``, ``optimizer`` no ``state``.
            ValueError: the optimizer keeps no second moments, or has no parameter of
                ``model``; ``step`` is no whole number.
            OSError: the records cannot be written (they stay in ``records``).
        """
        if not hasattr(model, "named_parameters"):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if not hasattr(optimizer, "state"):
            raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
        whole = as_whole(step)
        if whole is None or not 0 <= whole <= MAX_STEP:
            raise ValueError(f"step must be a whole number from 0 to {MAX_STEP}, got {step!r}")
        step = whole
        if step in self._steps:
            self._warn_once(
                f"step {step} is measured already; the first measurement is kept. "
                "A new run needs a new SNRTracker."
            )
            return
        if self._model is None or self._model() is not model:
            self._model, self._splits = weakref.ref(model), splits_of(model)
        if left_out := foreign(model, optimizer):
            self._warn_once(left_out)
        moments, averaged = second_moments(model, optimizer, self._splits)
        if averaged:
            self._warn_once(
                f"not measured, because this {type(optimizer).__name__} keeps their exp_avg_sq "
                f"averaged already: {some_names(averaged)}. The SNR of means is infinite over the "
                "axes that they were taken over and too high over the others; measure a run of "
                "torch.optim.AdamW, or of SlimAdamW without rules"
            )
        if not moments and not averaged:
            self._warn_once(
                f"no second moments at step {step}, so nothing is measured: this "
                f"{type(optimizer).__name__} holds none for this model's parameters. Adam's are "
                "there after its first step; other optimizers, as SGD, have none"
            )
            return
        records = self._measure(moments, step)
        if not records:
            return
        self.records += records
        self._steps.add(step)
        self._write()

    def save_all_results(self, filename: str | os.PathLike[str]) -> Path | None:
        """Write all records to ``filename`` in ``save_dir`` (or to an absolute path).

        The file is whole or not there. The unfinished file of this run goes away, and later
        measurements go to the new one. Returns its path; ``None`` where nothing was measured.
        """
        if not self.records:
            logger.warning("no SNR was measured: %s is not written", os.fspath(filename))
            return None
        target = self.save_dir / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (header() + format_records(self.records)).encode()
        aside = _write_aside(target, text)
        os.replace(aside, target)
        if self.path is not None and self.path != target:
            self.path.unlink(missing_ok=True)
        self.path, self._written, self._size = target, len(self.records), len(text)
        return target

    def _load(self, path: str | os.PathLike[str]) -> SNRTracker:
        """Take in the records of a file, in front of what is measured from now on.

        Works on the class too, ``SNRTracker.load(path)``, and gives a new tracker then.

        Raises:
            ValueError: a line is malformed, or a step of the file is already in ``records``.
        """
        loaded = read_records(path)
        steps = {record.step for record in loaded}
        if steps & self._steps:
            raise ValueError(
                f"{os.fspath(path)} holds step {min(steps & self._steps)}, which this tracker "
                "has already; load it into a new SNRTracker"
            )
        self.records += loaded
        self._steps |= steps
        return self

    load = _OnClassToo(_load)

    def rules(self, cutoff: float = 1.0, prefer: str = "snr", burn_in: int = 0) -> dict[str, Any]:
        """Rules from the records so far, as ``derive_rules`` gives them.

        Raises:
            ValueError: nothing is measured yet.
        """
        if not self.records:
            raise ValueError(
                "this tracker has no records yet: call measure_and_save(model=, optimizer=, step=) "
                "after optimizer steps, or load(path) records of another run"
            )
        return derive_rules(self.records, cutoff, prefer, burn_in)

    def _measure(self, moments: Sequence[SecondMoment], step: int) -> list[Record]:
        wanted: list[tuple[SecondMoment, Axes]] = []
        pending: dict[torch.device, list[Tensor]] = {}
        order: dict[torch.device, list[int]] = {}
        for moment in moments:
            if not is_writable(moment.key):
                self._warn_once(
                    f"{moment.key[:80]!r} is not measured: SNR records are lines, and this name "
                    "does not fit one"
                )
                continue
            sets = moment.axis_sets(self.all_axes)
            if not sets:
                continue
            measured = slice_moments(moment.values, [moment.view_axes(axes) for axes in sets])
            pending.setdefault(measured.device, []).append(measured)
            order.setdefault(measured.device, []).extend(
                range(len(wanted), len(wanted) + len(sets))
            )
            wanted += [(moment, axes) for axes in sets]
        numbers: dict[int, list[float]] = {}
        for device, tensors in pending.items():  # one trip to the host a device
            rows = torch.cat(tensors).to("cpu", torch.float64).tolist()
            numbers.update(zip(order[device], rows, strict=True))
        records = []
        for i, (moment, axes) in enumerate(wanted):
            ratio, mean_sqr, var, scale = numbers[i]
            records.append(
                Record(
                    step, moment.key, moment.shape, axes, ratio, mean_sqr * scale**2, var * scale**2
                )
            )
        return records

    def _write(self) -> None:
        """Append what is not in the file yet, behind the last line that is known to be whole."""
        try:
            if self.path is None or not self.path.exists():
                self.path = self._new_file()
                self._size = self._written = 0
            elif self.path.stat().st_size < self._size:  # somebody cut it: write it anew
                self._size = self._written = 0
            text = format_records(self.records[self._written :])
            if self._size == 0:
                text = header() + text
            with open(self.path, "r+b") as file:
                file.seek(self._size)
                file.truncate()
                file.write(text.encode())
        except OSError as error:
            # Training goes on: the records are kept here and written with the next ones.
            self._warn_once(f"SNR records cannot be written now ({error}); they are kept in memory")
            return
        self._written = len(self.records)
        self._size += len(text.encode())

    def _new_file(self) -> Path:
        self.save_dir.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        handle, name = tempfile.mkstemp(".csv", f"snr_{stamp}_", self.save_dir)
        os.close(handle)
        _share(Path(name))
        logger.info("SNR records of this run go to %s", name)
        return Path(name)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)


def _share(path: Path) -> None:
    """Give a file the mode that ``open`` would have given it; ``mkstemp`` makes it private."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, 0o666 & ~umask)


def _write_aside(target: Path, text: bytes) -> Path:
    """A whole file with ``text`` beside ``target``, to be renamed to it."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    aside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        _share(aside)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return aside
