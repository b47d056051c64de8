"""The phases of a check, one after the other, each in its share of the time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, cast

import numpy as np

from lowmem import env
from lowmem.env import waiting_bytes

from . import cache, scratch
from .budget import Budget
from .engines import Disk
from .in_memory import time_sparse_adam
from .patterns import PAGE, TableAccess
from .report import IOReport
from .steps import SampleStore

BLOCK = 1 << 20
DEEP = 32
# At least, whatever is left: without these steps, or with too few rows in them, what is
# predicted of a table larger than the memory is far from true.
_WRITTEN_S, _COLD_S = 0.5, 0.6
MAX_FILE_BYTES = 2 << 30

# Phase to weight. The order is the order of the run.
WEIGHTS = {
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


def measure(report: IOReport, folder: Path, budget: Budget) -> None:
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
    share = budget.remaining * WEIGHTS["fill"] / (sum(WEIGHTS.values()) - WEIGHTS["rate"])
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
    for name in WEIGHTS:
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
