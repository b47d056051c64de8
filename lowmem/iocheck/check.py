"""``iocheck``: the phases of a check, in a time budget, and what happens when one ends early."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from lowmem import env

from . import cache, scratch
from .budget import Budget, OnProgress, Stopped
from .engines import Disk
from .filesystem import file_system
from .in_memory import time_sparse_adam
from .patterns import PAGE, Access, TableAccess
from .predict import predict
from .report import IOReport
from .steps import SampleStore
from .writeback import waiting_bytes

_log = logging.getLogger("lowmem.iocheck")

BLOCK = 1 << 20
DEEP = 32
MIN_SECONDS = 1.0
_PUNCTUAL = 1.2  # times the seconds that were asked for: more is late, and said
# At least, whatever is left: without these steps, or with too few rows in them, what is
# predicted of a table larger than the memory is far from true.
_WRITTEN_S, _COLD_S = 0.5, 0.6
MAX_FILE_BYTES = 2 << 30
_RESERVE_BYTES = 256 << 20  # memory that the page cache never gets: the system's own

# Phase to weight. The order is the order of the run.
_WEIGHTS = {
    "rate": 2.0,
    "fill": 16.0,
    "sequential_write_qd32": 5.0,
    "sequential_write_qd1": 3.0,
    "sequential_read_qd32": 5.0,
    "sequential_read_qd1": 3.0,
    "random_read_qd1": 6.0,
    "random_read_qd32": 7.0,
    "random_write_qd1": 4.0,
    "random_write_qd32": 5.0,
    "hot": 16.0,
    "written": 12.0,
    "ram": 14.0,
    "cold": 20.0,  # behind "ram", because one cold step may take longer than its share
    "end": 6.0,
}


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
        seconds: time budget for everything, at least 1 (default: 10). Measuring gets at least
            four seconds of it and a third, or the whole of a smaller budget; where imports
            and compilation leave less, it takes longer, and the report's notes say so.
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
    budget = Budget(seconds, _WEIGHTS, on_progress, should_stop, began)
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
                _run(report, folder, budget)
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
        report.notes.append(_late(report, budget))
    budget.progress("stopped" if report.interrupted else "done", 1.0)
    return report


def _late(report: IOReport, budget: Budget) -> str:
    """Why the check took longer than it was asked to, and what to ask for."""
    took = f"this took {report.elapsed_s:.1f} s, not {report.seconds:g}"
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


def _run(report: IOReport, folder: Path, budget: Budget) -> None:
    """All phases. Writes into ``report`` as it goes, so that nothing measured is lost."""
    budget.progress("preparing", 0.0)
    with contextlib.closing(SampleStore(folder / "warm-up", 16, report.dim)) as small:
        small.compile()
    rng = np.random.default_rng()
    pool = scratch.random_pool()
    size, slow = _affordable(report, folder, pool, budget)
    rows = max(1, (size - PAGE) // (8 * report.dim))
    store = SampleStore(folder / "store", rows, report.dim)
    with contextlib.closing(store):
        depth = 8 if report.method == "direct" and not slow else 1
        disk = Disk(store.path, store.data_bytes, report.method, pool)
        with contextlib.closing(disk):
            report.engine = disk.engine
            _fill(report, store, disk, depth, budget)
            _measure_disk(report, store, disk, 4 if slow else DEEP, budget, rng)
        _measure_steps(report, store, budget, rng)


def _affordable(
    report: IOReport, folder: Path, pool: np.ndarray, budget: Budget
) -> tuple[int, bool]:
    """How large a file the fill phase can write, and whether the disk is a slow one.

    Writes a small file first, which also settles how the page cache is kept out of the way.
    """
    path = str(folder / "first-look")
    with open(path, "wb") as file:
        pool[: BLOCK // 4].tofile(file)
        file.flush()
        os.fsync(file.fileno())
    report.method, report.method_reason = cache.choose_method(path, BLOCK, report.file_system)
    free = report.file_system.free_bytes
    ceiling = min(MAX_FILE_BYTES, free // 2, (env.available_memory_bytes() or MAX_FILE_BYTES) // 6)
    disk = Disk(path, BLOCK, report.method, pool)
    with contextlib.closing(disk):
        if disk.engine == "linux-aio":  # compile the loop before anything is timed
            disk.measure(
                "read", PAGE, 1, 0.001, offsets=np.zeros(1, np.int64), should_stop=lambda: False
            )
        budget.forgive_preparation()
        seconds = budget.begin("rate", "a first look at the disk")
        offsets = np.arange(0, min(ceiling, 256 * BLOCK), BLOCK, dtype=np.int64)
        rate = disk.measure(
            "write", BLOCK, 1, seconds, offsets=offsets, should_stop=budget.should_stop
        )
        disk.sync()
    os.unlink(path)
    budget.check()
    share = budget.remaining * _WEIGHTS["fill"] / (sum(_WEIGHTS.values()) - _WEIGHTS["rate"])
    affordable = 0.8 * rate.bytes_per_s * share
    wanted = max(64 * BLOCK, PAGE + report.rows * 8 * report.dim)
    size = int(min(affordable, ceiling, wanted))
    return max(size, 8 * BLOCK, PAGE + 8 * report.dim), rate.bytes_per_s < 100e6


def _fill(report: IOReport, store: SampleStore, disk: Disk, depth: int, budget: Budget) -> None:
    """Real data in every row, on the disk, before anything is read."""
    seconds = budget.begin("fill", "writing the test file")
    blocks = max(1, store.data_bytes // BLOCK)
    offsets = PAGE + np.arange(blocks, dtype=np.int64) * BLOCK
    if store.data_bytes < BLOCK:
        offsets = np.array([PAGE], np.int64)
    done = disk.measure(
        "write", BLOCK, depth, 1.5 * seconds, offsets=offsets, once=True,
        should_stop=budget.should_stop,
    )  # fmt: skip
    disk.sync()
    budget.check()
    written = done.operations * BLOCK
    store.limit(min(written, store.data_bytes) if written < store.data_bytes - BLOCK else 1 << 62)
    report.test_file_bytes = min(written, store.data_bytes)
    status = os.stat(store.path)
    stored = getattr(status, "st_blocks", 1 << 62) * 512
    if stored < 0.9 * report.test_file_bytes:
        report.notes.append(
            f"the file system stores {stored / 1e6:.0f} MB for {report.test_file_bytes / 1e6:.0f} "
            "MB of incompressible data: it is sparse, deduplicated or not yet written, and the "
            "rates are not those of a disk"
        )


def _measure_disk(
    report: IOReport,
    store: SampleStore,
    disk: Disk,
    deep: int,
    budget: Budget,
    rng: np.random.Generator,
) -> None:
    blocks = max(1, report.test_file_bytes // BLOCK)
    sequential = PAGE + np.arange(blocks, dtype=np.int64) * BLOCK
    pages = max(1, report.test_file_bytes // PAGE)
    for name in _WEIGHTS:
        pattern, _, rest = name.partition("_")
        if pattern not in ("sequential", "random"):
            continue
        kind, _, depth = rest.partition("_qd")
        seconds = budget.begin(name, f"{pattern} {kind}s, queue depth {depth}")
        offsets = sequential if pattern == "sequential" else PAGE + rng.permutation(pages) * PAGE
        rate = disk.measure(
            cast(Literal["read", "write"], kind),
            BLOCK if pattern == "sequential" else PAGE,
            1 if depth == "1" else deep,
            0.93 * seconds,
            offsets=offsets,
            should_stop=budget.should_stop,
        )
        if rate.operations:
            report.rates[name] = rate


def _measure_steps(
    report: IOReport, store: SampleStore, budget: Budget, rng: np.random.Generator
) -> None:
    row_bytes = 8 * report.dim
    table = TableAccess(report.rows, row_bytes, report.access)
    step = table.step(report.batch, 0)
    large = store.is_large(report.store_bytes, report.cache_bytes)
    if large:
        # DSA's own choice, for a store of the person's size.
        store.use_single_pages()
    seconds = budget.begin("hot", "DSA steps, everything in memory")
    report.dsa_hot = store.time_hot(
        report.rows, report.batch, report.access, seconds, rng, budget.should_stop
    )
    seconds = budget.begin("ram", "SparseAdam in RAM")
    memory = (env.available_memory_bytes() or 1 << 30) // 4
    report.sparse_adam = time_sparse_adam(
        report.rows, report.dim, report.batch, report.access, seconds, memory, rng,
        budget.should_stop,
    )  # fmt: skip
    seconds = budget.begin("written", "DSA steps while pages are written back")
    waiting = waiting_bytes()
    if large and waiting is not None and table.pages * PAGE > waiting:
        report.writing_unknown = True  # also where the check is stopped in the middle of it
        if report.method != "cached: not a disk speed":
            report.dsa_written = store.time_written_back(
                table,
                waiting,
                max(seconds, min(_WRITTEN_S, report.seconds / 5)),
                budget.should_stop,
            )
        report.writing_unknown = report.dsa_written is None
    seconds = budget.begin("cold", "DSA steps, nothing in memory")
    if report.method != "cached: not a disk speed":
        report.dsa_cold = store.time_cold(
            max(1, round(step.distinct_rows)), step.touched_pages / table.pages,
            _round_trip(report), max(seconds, min(_COLD_S, report.seconds / 5)), rng,
            budget.should_stop,
        )  # fmt: skip
    budget.begin("end", "removing the test file")


def _round_trip(report: IOReport) -> float:
    """Seconds to read and write back a page among many."""
    rates = [report.rates.get(f"random_{kind}_qd32") for kind in ("read", "write")]
    return sum(1 / rate.iops for rate in rates if rate) or 1e-4


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
