"""``iocheck``: a check in a time budget, and what happens when it ends early."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from lowmem import env

from . import scratch
from .budget import Budget, OnProgress, Stopped
from .filesystem import file_system
from .patterns import Access
from .phases import WEIGHTS, measure
from .predict import predict
from .report import IOReport

# Less is too few steps to say anything from, and could not be kept.
MIN_SECONDS = 8.0
_PUNCTUAL = 1.2  # times the seconds that were asked for: more is late, and said
_RESERVE_BYTES = 256 << 20  # memory that the page cache never gets: the system's own


def iocheck(
    directory: str | os.PathLike[str],
    rows: int,
    dim: int,
    batch: int,
    seconds: float = 10,
    on_progress: OnProgress | None = None,
    *,
    access: Access = "uniform",
    cache_bytes: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    began: float | None = None,
) -> IOReport:
    """Measure what a disk can do, and predict what a DSA step will cost there.

    A file of real data is written into a folder of its own inside ``directory``, read and
    written in every way that matters, used as the store of a real DSA optimizer, and
    removed, whatever happens.

    Args:
        directory: where the store would be; an existing folder.
        rows: rows of the embedding table.
        dim: weights a row.
        batch: ids of one training step, duplicates included.
        seconds: time budget for everything, at least 8 (default: 10). Measuring gets at least
            four seconds of it, and a third; where compilation for the first time leaves less,
            it takes longer, and the report's notes say so.
        on_progress: called as ``on_progress(fraction, message)`` with a fraction of 0 to 1.
        access: which rows a batch asks for: ``"uniform"`` (default) or ``"zipf"``, where the
            row of rank r comes up in proportion to r**-1.05.
        cache_bytes: page cache that the store can have. By default the memory that is
            available now, less the weights where they will lie in RAM.
        should_stop: asked several times a second; a true answer ends the check.
        began: ``time.perf_counter()`` when the seconds began, where that was before this
            call: a command counts what it needs to start.

    Returns:
        The report. After Ctrl-C, a stop or an error of the disk in the middle it holds what
        was measured until then, and ``interrupted`` is true.

    Raises:
        ValueError: a number outside its range, with the number.
        OSError: the directory does not exist, cannot be written, or is nearly full.
    """
    rows, dim, batch = _whole("rows", rows), _whole("dim", dim), _whole("batch", batch)
    if not seconds >= MIN_SECONDS or seconds > 3600:
        raise ValueError(f"seconds is {seconds!r}; a check takes from {MIN_SECONDS:g} to 3600")
    if access not in ("uniform", "zipf"):
        raise ValueError(f"access is {access!r}; choose 'uniform' or 'zipf'")
    if cache_bytes is not None and cache_bytes < 0:
        raise ValueError(f"cache_bytes is {cache_bytes!r}; it cannot be negative")
    path = scratch.check_directory(directory)
    budget = Budget(seconds, WEIGHTS, on_progress, should_stop, began)
    from lowmem.kernels import notice

    ready = notice.compiled()  # by somebody before: not now, then
    report = IOReport(
        directory=str(path),
        rows=rows,
        dim=dim,
        batch=batch,
        access=access,
        seconds=float(seconds),
        cache_bytes=_page_cache(rows, dim) if cache_bytes is None else int(cache_bytes),
        file_system=file_system(path),
        machine=env.report(),
    )
    try:
        with scratch.scratch_folder(path) as folder:
            try:
                measure(report, folder, budget)
            except (KeyboardInterrupt, Stopped):
                report.interrupted = True
            except OSError as error:
                if not report.rates:
                    raise
                report.interrupted = True
                report.notes.append(f"stopped by an error of the disk: {error}")
            _predict(report)
    except KeyboardInterrupt:  # a second one, while the files were being removed
        report.interrupted = True
    report.elapsed_s = budget.elapsed
    if report.elapsed_s > _PUNCTUAL * seconds and not report.interrupted:
        report.notes.append(_late(report, budget, notice.compiled() and not ready))
    budget.progress("stopped" if report.interrupted else "done", 1.0)
    return report


def _late(report: IOReport, budget: Budget, compiled: bool) -> str:
    """Why the check took longer than it was asked to, and what to ask for."""
    took = f"this took {report.elapsed_s:.1f} s, not {report.seconds:g}"
    if compiled and budget.enough > report.seconds:
        return (
            f"{took}: kernels were compiled, which happens once for a machine and a version; "
            "another check takes the time that it is given"
        )
    if budget.enough > report.seconds:
        return (
            f"{took}: to import torch and load the kernels alone took {budget.prepared_s:.1f} s, "
            f"so ask for at least {budget.enough} seconds here"
        )
    return f"{took}: single steps, reads or writes are slow here"


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if value != value or value in (float("inf"), float("-inf")) or int(value) != value:
        raise ValueError(f"{name} is {value!r}; it must be a whole number")
    if value < 1 or value > 1 << 50:
        raise ValueError(f"{name} is {value!r}; it must be at least 1 and below 2**50")
    return int(value)


def _page_cache(rows: int, dim: int) -> int:
    """Memory that the store's pages can have beside the weights."""
    import torch

    available = env.available_memory_bytes() or 0
    weights = 4 * rows * dim
    if torch.cuda.is_available() and weights < 0.8 * torch.cuda.mem_get_info()[0]:
        weights = 0
    return max(0, available - weights - _RESERVE_BYTES)


def _predict(report: IOReport) -> None:
    if report.dsa_hot is None:
        return
    write = report.rates.get("random_write_qd32")
    report.prediction = predict(
        report.rows,
        8 * report.dim,
        report.batch,
        report.access,
        report.cache_bytes,
        report.dsa_hot,
        report.dsa_cold,
        1.0 / write.iops if write and write.iops else 0.0,
        report.dsa_written,
    )
