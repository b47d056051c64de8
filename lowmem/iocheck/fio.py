"""The measurements of a report as jobs for ``fio``, for those who doubt these."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import IOReport

_LEAST_BYTES = 1 << 20


def commands(report: IOReport) -> list[str]:
    """One command a measurement."""
    return [f"{_common(report)} {job}" for job in _jobs(report)]


def one_command(report: IOReport) -> list[str]:
    """All measurements in one command, one after the other, as lines that can be pasted."""
    jobs = _jobs(report)
    if not jobs:
        return []
    pairs = [" ".join(jobs[start : start + 2]) for start in range(0, len(jobs), 2)]
    lines = [f"{_common(report)} --stonewall", *(f"  {pair}" for pair in pairs)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _common(report: IOReport) -> str:
    size = max(report.test_file_bytes, _LEAST_BYTES)
    direct = int(report.method == "direct")
    return (
        f"fio --filename=lowmem-fio.tmp --size={size} --ioengine=libaio --direct={direct} "
        "--time_based --runtime=5"
    )


def _jobs(report: IOReport) -> list[str]:
    jobs = []
    for name, rate in report.rates.items():
        pattern, kind = name.split("_")[:2]
        job = ("rand" if pattern == "random" else "") + kind
        block = f"{rate.block_bytes >> 10}k"
        jobs.append(f"--name={job}{rate.depth} --rw={job} --bs={block} --iodepth={rate.depth}")
    return jobs
