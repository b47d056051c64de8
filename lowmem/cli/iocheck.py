"""Measure what a disk can do, and what a DSA step of your table will cost on it.

  lowmem iocheck --directory . --rows 10M --dim 128 --batch 65536

Writes a test file into a folder of its own, removes it again, and takes about --seconds
in all, the import of torch included; ten seconds are the least. Where kernels are compiled
for the first time, that comes on top, and the report says so. Ctrl-C stops it and shows what
was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

HELP = "what the disk can do, in rows per second"

# The import of torch alone takes up to half of it.
_LEAST_S = 10.0
_ENDING_S = 1.2  # an interpreter with torch and numba takes that long to end
_STARTED_S = 3.0  # older than this, a process did something else before


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", default=".", help="where the store would be (default: .)")
    parser.add_argument("--rows", default="10M", help="rows of the table, like 10M (default: 10M)")
    parser.add_argument("--dim", type=int, default=128, help="weights a row (default: 128)")
    parser.add_argument("--batch", default="65536", help="ids of a training step (default: 65536)")
    parser.add_argument(
        "--access",
        choices=("uniform", "zipf"),
        default="uniform",
        help="which rows a batch asks for (default: uniform)",
    )
    parser.add_argument(
        "--seconds", type=float, default=_LEAST_S, help="time for everything (default, least: 10)"
    )
    parser.add_argument(
        "--cache-bytes",
        help="page cache that the store can have, like 4G (default: this machine's memory)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures in plain units; - is the terminal"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="write the picture")


def run(args: argparse.Namespace) -> int:
    # Torch takes seconds to import, and they count, as does what comes after the check.
    began = time.perf_counter() - _age() - _ENDING_S
    if args.seconds < _LEAST_S:
        raise ValueError(
            f"--seconds is {args.seconds:g}; loading torch alone may take half of ten: give "
            f"{_LEAST_S:g} or more (lowmem.iocheck() in a program that has it loaded takes 8)"
        )
    from tqdm.auto import tqdm

    from lowmem import iocheck
    from lowmem.units import parse_count

    for option, target in (("--json", args.json), ("--plot", args.plot)):
        if target and target != "-" and not Path(target).resolve().parent.is_dir():
            raise ValueError(f"{option} is {target!r}; there is no such folder to write it to")
    bar = tqdm(total=100, unit="%", bar_format="{l_bar}{bar}| {elapsed}", file=sys.stderr)

    def show(fraction: float, message: str) -> None:
        bar.set_description_str(message)
        bar.update(max(0, round(100 * fraction) - bar.n))

    before = signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        report = iocheck(
            args.directory,
            rows=parse_count(args.rows, "--rows"),
            dim=args.dim,
            batch=parse_count(args.batch, "--batch"),
            seconds=args.seconds,
            on_progress=show,
            access=args.access,
            cache_bytes=(
                parse_count(args.cache_bytes, "--cache-bytes") if args.cache_bytes else None
            ),
            began=began,
        )
    finally:
        bar.close()
        signal.signal(signal.SIGTERM, before)
    figures = json.dumps(report.to_json(), indent=2)
    if args.json == "-":
        print(figures)
    else:
        print(report.text())
    if args.json and args.json != "-":
        Path(args.json).write_text(figures + "\n")
    if args.plot:
        report.figure().savefig(args.plot, dpi=150)
    return 130 if report.interrupted else 0


def _age() -> float:
    """Seconds since this process began, where it began for this command; 0 where nobody says."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # seconds after the machine's start
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return age if 0.0 < age < _STARTED_S else 0.0


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends a check as Ctrl-C does, so that its files go, too."""
    raise KeyboardInterrupt
