"""One sentence of advice from a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem.units import short_bytes

from .predict import IN_MEMORY

if TYPE_CHECKING:
    from .report import IOReport


def advice(report: IOReport) -> str:
    """What to do, the first reason that applies deciding."""
    system, future = report.file_system, report.prediction
    if system.kind == "ram":
        return "This folder is RAM: moments stored here take memory like any others; name a disk."
    if system.kind in ("network", "cloud-drive"):
        name = "a network drive" if system.kind == "network" else "a cloud drive folder"
        return f"This is {name}: do not keep a store here; use a local disk and copy when done."
    if report.store_bytes > system.free_bytes:
        return (
            f"The store will not fit: it needs {short_bytes(report.store_bytes)} and "
            f"{short_bytes(system.free_bytes)} are free."
        )
    if future is None:
        return "Nothing to advise yet: the check ended before the steps were timed; run it again."
    if future.rows_per_s is None or future.seconds_per_step is None:
        reason = "was not measured" if report.interrupted else "cannot be measured here"
        return (
            f"Only {100 * future.hit_share:.0f} % of the pages will be in memory, and what the "
            f"others cost {reason}: "
            + ("run the check to its end." if report.interrupted else "try another directory.")
        )
    speed = f"{future.rows_per_s:,.0f} rows per second ({future.seconds_per_step:.3g} s a step)"
    basis = report.dsa_written if future.write_back_bound else report.dsa_hot
    if basis is not None and not basis.sure:
        reason = "too few steps were timed" if basis.few else "the machine was busy meanwhile"
        more = " with more seconds" if basis.few else ""
        return (
            f"A first guess is {speed}, with {100 * future.hit_share:.0f} % of the pages from "
            f"memory, but {reason}: run it again{more} before you decide on this."
        )
    ratio = _to_sparse_adam(report, future.seconds_per_step)
    beside = f", {_times(ratio)} SparseAdam in RAM" if ratio is not None else ""
    if future.hit_share > IN_MEMORY and future.write_back_bound:
        return (
            f"Everything fits in the page cache, but more of it changes than the system lets wait "
            f"to be written: expect {speed}{beside} in a long run, bound by writing."
        )
    if future.hit_share > IN_MEMORY and report.writing_unknown:
        return (
            "Everything fits in the page cache, but more of it changes than the system lets wait "
            f"to be written, and what that costs is not known: expect at most {speed}, and less "
            "in a long run; run it again with more seconds."
        )
    if future.hit_share > IN_MEMORY:
        return (
            f"Everything fits in the page cache ({short_bytes(future.store_bytes)} of "
            f"{short_bytes(future.cache_bytes)}), disk speed will not matter: "
            f"expect {speed}{beside}."
        )
    waiting = 1.0 - future.seconds_per_step_hot / future.seconds_per_step
    verdict = f"Expect {speed}{beside}, {100 * future.hit_share:.0f} % of the pages from memory"
    if waiting < 0.5:
        return f"{verdict}; the disk is fast enough for this."
    if ratio is None or ratio >= 0.1:
        return (
            f"{verdict}: most of a step waits for the disk, so it is worth it where "
            f"SparseAdam's {short_bytes(12 * report.rows * report.dim)} do not fit in memory."
        )
    return (
        f"{verdict}: this disk is slow for random rows; prefer a local SSD, more memory, or a "
        "smaller table."
    )


def _to_sparse_adam(report: IOReport, step_s: float) -> float | None:
    """How many times as fast as SparseAdam in RAM; ``None`` where that is not known well."""
    ram = report.sparse_adam
    if ram is None or not report.comparable:
        return None
    return ram.seconds * report.batch / ram.ids / step_s


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
