"""The figures of a result's row, from a run that has been timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from lowmem.bench.turns import Run

PAGE = 4096


def figures(
    run: Run, limits: dict[str, float], state: dict[str, int] | None = None, **labels: Any
) -> dict[str, Any]:
    """A result's row: labels, times, rates, traffic a step, and shares of the limits.

    ``rows_per_s`` counts different rows, ``ids_per_s`` gradient rows with duplicates.
    ``memory_share`` is the traffic that the step cannot avoid, 24 bytes a weight of each
    different row and 4 a gradient value, as a share of the memory's bandwidth.
    ``disk_share`` is the pages that were read and that the step needed, as a share of the
    disk's random 4 KiB reads at queue depth 32. ``limit_share`` is the larger one.
    ``rss_bytes`` is weights, gradient, what the contender holds and what a step takes for a
    while; ``cache_bytes``, pages of the state's file, come on top and can be taken back.
    ``read_bytes`` and ``written_bytes`` are the process's, as in ``/proc/self/io`` (written:
    what it made dirty); ``device_*`` are the device's, as in ``/proc/diskstats``.
    ``state`` is for a contender that is closed.
    """
    grads, timing = run.grads, run.timing
    steps = len(timing.samples)
    distinct = float(np.mean([grads.distinct(n) for n in range(min(8, run.number))]))
    state = run.way.state_bytes() if state is None else state
    step_s = timing.median
    row: dict[str, Any] = {
        **labels,
        "contender": run.way.name,
        "rows": grads.ids.rows,
        "dim": grads.dim,
        "batch": grads.batch,
        "ids": grads.ids.name,
        "distinct": distinct,
        "rows_per_s": distinct / step_s,
        "ids_per_s": grads.batch / step_s,
        **timing.row(),
        "major_faults": run.usage.major_faults / steps,
        "minor_faults": run.usage.minor_faults / steps,
        "read_bytes": run.usage.read_bytes / steps,
        "written_bytes": run.usage.written_bytes / steps,
        "stall_share": timing.stall_share,
        "gradient_bytes": run.gradient_bytes,
        "step_bytes": run.step_bytes,
        "cache_bytes": run.cache_bytes,
        "rss_bytes": (
            4 * grads.dim * grads.ids.rows
            + run.gradient_bytes
            + run.way.held_bytes
            + run.step_bytes
        ),
        **{f"{kind}_bytes": size for kind, size in state.items()},
    }
    if run.device_read is not None and run.device_written is not None:
        row["device_read_bytes"] = run.device_read / steps
        row["device_written_bytes"] = run.device_written / steps
    for percent in (50, 95, 99):  # of few steps too: a cold step takes seconds
        row[f"p{percent}_s"] = timing.percentile(percent)
    traffic = 24 * grads.dim * distinct + 4 * grads.dim * grads.batch
    if run.way.takes_dense:
        traffic = 28 * grads.dim * grads.ids.rows
    if limits.get("update_bytes_per_s"):
        row["memory_share"] = traffic / step_s / limits["update_bytes_per_s"]
    if limits.get("random_read_iops_qd32") and run.usage.read_bytes:
        pages = min(run.usage.read_bytes / steps / PAGE, touched_pages(run))
        row["disk_share"] = pages / step_s / limits["random_read_iops_qd32"]
    shares = [row[key] for key in ("memory_share", "disk_share") if key in row]
    if shares:
        row["limit_share"] = max(shares)
    return row


def touched_pages(run: Run) -> float:
    """Pages of the file that a step touches, on average."""
    counts = []
    for number in range(min(8, run.number)):
        rows = np.unique(run.grads.ids_at(number))
        count = 0
        for address, size in run.way.places():
            first = (address + rows * size) // PAGE
            last = (address + (rows + 1) * size - 1) // PAGE
            spans = np.concatenate([first + n for n in range(int((last - first).max()) + 1)])
            ends = np.tile(last, len(spans) // len(last))
            count += len(np.unique(spans[spans <= ends]))
        counts.append(count)
    return float(np.mean(counts))


def add_ratio(rows: list[dict[str, Any]], key: str, to: str) -> None:
    """Give each row ``key``: how many times as fast as the contender ``to`` it is."""
    base = next((row["step_s"] for row in rows if row["contender"] == to), None)
    if base:
        for row in rows:
            row[key] = base / row["step_s"]
