"""DSA against SparseAdam, dense Adam and plain memmap: hot, fresh and cold, in one run.

  hot           every row touched before, everything in memory
  fresh         from the first step of a new state on, in stretches
  cold-limit    10 GB of state, 4 GiB of memory for the page cache (needs root and Linux)
  cold-dropped  the state dropped from the page cache before each step

Gradients are as autograd leaves them, not coalesced and with duplicates; the whole
`opt.step()` is timed. Contenders take turns; figures are medians over their turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem.bench.report import Column, Result

REGIMES = ("hot", "fresh", "cold-limit", "cold-dropped")
COLUMNS = [
    Column("contender", "contender", "text"),
    Column("rows_per_s", "rows/s", "rows/s"),
    Column("p50_s", "step p50", "s"),
    Column("p95_s", "p95", "s"),
    Column("p99_s", "p99", "s"),
    Column("spread", "spread", "share"),
    Column("to_sparse", "× SparseAdam", "number"),
    Column("worst_stretch", "× in its worst stretch", "number"),
    Column("first_step_s", "first step", "s"),
    Column("to_memmap", "× memmap", "number"),
    Column("to_random", "× sorted, random", "number"),
    Column("memory_share", "of memory bandwidth", "share"),
    Column("disk_share", "of disk reads", "share"),
    Column("major_faults", "major faults/step", "number"),
    Column("read_bytes", "read/step", "bytes"),
    Column("written_bytes", "written/step", "bytes"),
    Column("ram_bytes", "state RAM", "bytes"),
    Column("disk_bytes", "state disk", "bytes"),
]
_PREFIX = "lowmem-bench-"


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        found = [int(float(part.replace("_", ""))) for part in _names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must hold whole numbers above 0")
    return found


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--regimes", type=_names, metavar="LIST", help=f"of {', '.join(REGIMES)}")
    add("--ids", type=_names, metavar="LIST", help="of uniform, zipf, zipf-ordered, codegraph")
    add("--batch", type=_numbers, metavar="LIST", help="ids a step, such as 1024,8192,65536")
    add("--rows", type=_numbers, metavar="LIST", help="rows of the table, such as 1e6")
    add("--dim", type=_numbers, metavar="LIST", help="32, 128, 512")
    add("--cold-rows", type=_numbers, metavar="N", help="rows under the memory limit (1e7)")
    add("--limit", type=float, default=4.0, metavar="GIB", help="the memory limit (4)")
    add("--seconds", type=float, metavar="S", help="of a contender's turn")
    add("--contenders", type=_names, metavar="LIST", help="of adam, sparse-adam, memmap, …")
    add("--full", action="store_true", help="the whole grid: the better part of an hour")


def run(args: argparse.Namespace) -> Result:
    """Measure what ``args`` asks for; see ``configure``."""
    from lowmem.bench import machine, regimes
    from lowmem.bench.cgroup import unavailable
    from lowmem.bench.cold import under_limit
    from lowmem.bench.contenders import NAMES

    quick = bool(args.quick)
    chosen = args.regimes or list(REGIMES)
    ids = args.ids or ["uniform", "zipf"]
    batches = args.batch or ([8192] if quick else [1024, 8192, 65536])
    rows = args.rows or ([200_000] if quick else [1_000_000])
    dims = args.dim or [128]
    cold_rows = (args.cold_rows or [1_000_000 if quick else 10_000_000])[0]
    limit = int(args.limit * (1 << 30)) if not quick else 400 << 20
    seconds = args.seconds or (0.1 if quick else 0.4)
    names = args.contenders or list(NAMES)
    for kind, given, known in (
        ("regimes", chosen, REGIMES),
        ("contenders", names, tuple(NAMES)),
    ):
        wrong = [one for one in given if one not in known]
        if wrong:
            raise ValueError(f"--{kind}: no {wrong[0]!r}; choose from {', '.join(known)}")

    found: list[dict[str, Any]] = []
    notes: list[str] = []
    facts = machine.describe(args.directory or Path.cwd(), quick=quick)
    limits = {key: value for key, value in facts.items() if str(key).endswith("_per_s")}
    with scratch(args.directory) as folder:
        names, said = regimes.equal(names, folder, dims[0])
        notes += said
        for count in rows:
            for dim in dims:
                common = {"rows": count, "dim": dim, "limits": limits}
                if "hot" in chosen:
                    with part(folder, 24 * count * dim) as home:
                        found += regimes.hot(
                            names, home, ids=ids, batches=batches, seconds=seconds, **common
                        )
                if "fresh" in chosen:
                    for name in ids:
                        for batch in batches:
                            with part(folder, 8 * count * dim) as home:
                                found += regimes.fresh(
                                    [one for one in names if one != "adam"],
                                    home,
                                    ids=name,
                                    batch=batch,
                                    repeats=3 if quick else 5,
                                    **common,
                                )
                if "cold-dropped" in chosen:
                    with part(folder, 8 * count * dim) as home:
                        found += regimes.dropped(
                            names, home, ids=ids, batches=batches[-1:], seconds=seconds, **common
                        )
        if "cold-limit" in chosen:
            reason = unavailable()
            if reason:
                notes.append(f"cold by memory limit: not available here, {reason}")
            else:
                with part(folder, 8 * cold_rows * dims[0]) as home:
                    more, disk = under_limit(
                        home,
                        limit=limit,
                        rows=cold_rows,
                        dim=dims[0],
                        ids=ids,
                        batches=args.batch or [8192],
                        names=names,
                        seconds=0.2 if quick else 1.5,
                        memory_limits=limits,
                    )
                    found += more
                    limits.update(disk)
    facts |= {key: value for key, value in limits.items() if "iops" in key}
    return Result("dsa", args.command_line, facts, found, COLUMNS, main="rows_per_s", notes=notes)


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """A folder of this run's own, gone when the block is left, also by Ctrl-C or SIGTERM."""
    home = Path(directory or Path.cwd())
    for old in home.glob(f"{_PREFIX}*"):
        match = re.match(re.escape(_PREFIX) + r"(\d+)-", old.name)
        if match and not _alive(int(match.group(1))):
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=home))

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def part(folder: Path, needed: int) -> Iterator[Path]:
    """A subfolder for one regime, after a look at the space; its files go with it."""
    free = shutil.disk_usage(folder).free
    if needed * 1.02 > free:
        raise OSError(
            f"{folder.parent}: this takes {needed / 1e9:.1f} GB of files and {free / 1e9:.1f} GB "
            "are free; choose another --directory, fewer --rows or --cold-rows, or --regimes"
        )
    home = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
