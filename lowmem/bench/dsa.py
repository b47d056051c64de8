"""DSA against SparseAdam, dense Adam and plain memmap: hot, fresh and cold, in one run.

  hot           every row touched before, everything in memory
  fresh         from the first step of a new state on, in stretches
  end-to-end    forward, backward and step of an embedding model, hot
  flat          the same hot rows in taller and taller tables, and the memory of a step
  durability    the undo journal: first touches after a commit, and steady state
  cold-dropped  the state dropped from the page cache before each step
  cold-limit    10 GB of state, 4 GiB of memory for the page cache (needs root and Linux)

Gradients are as autograd leaves them, not coalesced and with duplicates; the whole
`opt.step()` is timed. Contenders take turns; figures are medians over their turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem.bench.report import Column, Result

REGIMES = ("hot", "fresh", "end-to-end", "flat", "durability", "cold-dropped", "cold-limit")
IDS = ("uniform", "zipf", "zipf-ordered", "codegraph")
CONTENDERS = ("adam", "sparse-adam", "memmap", "memmap-random", "dsa")
COLUMNS = [
    Column("contender", "contender", "text"),
    Column("rows_per_s", "rows/s", "rows/s"),
    Column("samples_per_s", "samples/s", "rows/s"),
    Column("p50_s", "step p50", "s"),
    Column("p95_s", "p95", "s"),
    Column("p99_s", "p99", "s"),
    Column("spread", "spread", "share"),
    Column("to_sparse", "× SparseAdam", "number"),
    Column("worst_stretch", "in its worst stretch", "number"),
    Column("first_step_s", "first step", "s"),
    Column("to_memmap", "× memmap", "number"),
    Column("to_random", "× sorted, random", "number"),
    Column("to_smallest", "cost a step, × lowest", "number"),
    Column("first_touch", "cost after a commit, × none", "number"),
    Column("steady", "steady, × none", "number"),
    Column("commit_s", "commit", "s"),
    Column("limit_share", "of the limit", "share"),
    Column("major_faults", "major faults", "number"),
    Column("read_bytes", "read", "bytes"),
    Column("written_bytes", "written", "bytes"),
    Column("ram_bytes", "state RAM", "bytes"),
    Column("disk_bytes", "state disk", "bytes"),
    Column("gradient_bytes", "gradient", "bytes"),
    Column("peak_bytes", "peak memory", "bytes"),
]


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        found = [int(float(part)) for part in _names(text)]
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers") from None
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must hold whole numbers above 0")
    return found


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--regimes", type=_names, metavar="LIST", help=f"of {', '.join(REGIMES)}")
    add("--ids", type=_names, metavar="LIST", help=f"of {', '.join(IDS)}")
    add("--contenders", type=_names, metavar="LIST", help=f"of {', '.join(CONTENDERS)}")
    add("--batch", type=_numbers, metavar="LIST", help="ids a step (1024,8192,65536)")
    add("--rows", type=_numbers, metavar="LIST", help="rows of the table (1e6)")
    add("--dim", type=_numbers, metavar="LIST", help="weights a row (128)")
    add("--flat-rows", type=_numbers, metavar="LIST", help="tables to compare (1e6,1e7,4e7)")
    add("--cold-rows", type=_numbers, metavar="LIST", help="rows under the memory limit (1e7)")
    add("--cold-batch", type=_numbers, metavar="LIST", help="ids a step, cold (8192)")
    add("--limit", type=_positive, metavar="GIB", help="the memory limit (4)")
    add("--seconds", type=_positive, metavar="S", help="of a contender's turn")
    add("--full", action="store_true", help="every workload, dims 32 to 512, up to 10M rows")


@dataclass
class Settings:
    """What a run measures, with the defaults of quick, ordinary and full runs filled in."""

    regimes: list[str]
    ids: list[str]
    names: list[str]
    fresh_names: tuple[str, ...]
    batches: list[int]
    fresh_batches: list[int]
    rows: list[int]
    dims: list[int]
    flat_rows: list[int]
    flat_dim: int
    cold_rows: list[int]
    cold_batches: list[int]
    limit: int
    seconds: float
    repeats: int
    cycle: int
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        quick, full = bool(args.quick), bool(args.full)
        if quick and full:
            raise ValueError("--quick and --full exclude each other; give one of them")

        def pick(given: Any, small: Any, usual: Any, large: Any) -> Any:
            return given or (small if quick else large if full else usual)

        grid = [1024, 8192, 65536]
        dims = pick(args.dim, [128], [128], [32, 128, 512])
        settings = cls(
            regimes=args.regimes or list(REGIMES),
            ids=pick(args.ids, ["uniform", "zipf"], ["uniform", "zipf"], list(IDS)),
            names=args.contenders or list(CONTENDERS),
            fresh_names=("sparse-adam", "dsa") if quick else CONTENDERS[1:],
            batches=pick(args.batch, [8192], grid, [1024, 4096, 16384, 65536]),
            fresh_batches=pick(args.batch, [8192], [8192], grid),
            rows=pick(args.rows, [200_000], [1_000_000], [1_000_000, 10_000_000]),
            dims=dims,
            flat_rows=sorted(
                pick(
                    args.flat_rows,
                    [200_000, 1_000_000],
                    [1_000_000, 10_000_000, 40_000_000],
                    [1_000_000, 10_000_000, 40_000_000],
                )
            ),
            flat_dim=args.dim[0] if args.dim else 128 if full else 32,
            cold_rows=pick(args.cold_rows, [400_000], [10_000_000], [10_000_000]),
            cold_batches=pick(args.cold_batch, [4096], [8192], grid),
            limit=int((args.limit or (0.15 if quick else 4)) * (1 << 30)),
            seconds=pick(args.seconds, 0.05, 0.4, 0.5),
            repeats=3 if quick else 5,
            cycle=100 if quick else 1000,
        )
        for option, given, known in (
            ("regimes", settings.regimes, REGIMES),
            ("ids", settings.ids, IDS),
            ("contenders", settings.names, CONTENDERS),
        ):
            for one in given:
                if one not in known:
                    raise ValueError(f"--{option}: no {one!r}; choose from {', '.join(known)}")
        return settings


def run(args: argparse.Namespace) -> Result:
    """Measure what ``args`` asks for; see ``configure``.

    Raises:
        ValueError: an option that is not there.
        OSError: too little space in ``--directory``, with both figures.
    """
    settings = Settings.of(args)
    from lowmem.bench import machine, regimes
    from lowmem.bench.space import scratch
    from lowmem.bench.summary import summary

    facts = machine.describe(args.directory or Path.cwd(), quick=bool(args.quick))
    limits = {key: value for key, value in facts.items() if key.endswith("_per_s")}
    with scratch(args.directory) as folder:
        settings.names, said = regimes.equal(settings.names, folder, settings.dims[0])
        settings.notes += said
        found: list[dict[str, Any]] = []
        try:
            for row in _measure(settings, folder, limits):
                found.append(row)
        except KeyboardInterrupt:
            if not found:
                raise
            settings.notes.append("Stopped before the end: what had been measured is here.")
    facts |= {key: value for key, value in limits.items() if "iops" in key}
    notes = [*summary(found), *settings.notes]
    return Result("dsa", args.command_line, facts, found, COLUMNS, main="rows_per_s", notes=notes)


def _measure(
    settings: Settings, folder: Path, limits: dict[str, float]
) -> Iterator[dict[str, Any]]:
    for count in settings.rows:
        for dim in settings.dims:
            yield from _one_table(settings, folder, count, dim, limits)
    if "flat" in settings.regimes:
        yield from _flat(settings, folder, limits)
    if "cold-limit" in settings.regimes:
        yield from _cold(settings, folder, limits)


def _one_table(
    settings: Settings, folder: Path, rows: int, dim: int, limits: dict[str, float]
) -> Iterator[dict[str, Any]]:
    from lowmem.bench import regimes
    from lowmem.bench.durability import durability
    from lowmem.bench.space import part, that_fit
    from lowmem.bench.training import end_to_end

    names, said = that_fit(settings.names, rows, dim)
    settings.notes += said
    if not names:
        return
    common: dict[str, Any] = {"rows": rows, "dim": dim, "limits": limits}
    state = 8 * rows * dim
    on_disk = state * sum(name not in ("adam", "sparse-adam") for name in names)
    if "hot" in settings.regimes:
        with part(folder, on_disk) as home:
            yield from regimes.hot(
                names,
                home,
                ids=settings.ids,
                batches=settings.batches,
                seconds=settings.seconds,
                **common,
            )
    if "fresh" in settings.regimes:
        for ids in settings.ids:
            for batch in settings.fresh_batches:
                with part(folder, state) as home:
                    yield from regimes.fresh(
                        [name for name in names if name in settings.fresh_names],
                        home,
                        ids=ids,
                        batch=batch,
                        repeats=settings.repeats,
                        **common,
                    )
    if "end-to-end" in settings.regimes:
        with part(folder, on_disk) as home:
            yield from end_to_end(
                names,
                home,
                ids=settings.ids,
                batch=settings.fresh_batches[0],
                seconds=settings.seconds,
                **common,
            )
    if "durability" in settings.regimes and "dsa" in names:
        with part(folder, 6 * state) as home:  # three stores, and their journals at worst
            yield from durability(
                home,
                ids=settings.ids[:1],
                batch=settings.fresh_batches[0],
                steps=settings.cycle,
                repeats=3,
                **common,
            )
    if "cold-dropped" in settings.regimes and "dsa" in names:
        with part(folder, state) as home:
            yield from regimes.dropped(
                names,
                home,
                ids=settings.ids,
                batches=settings.cold_batches,
                seconds=settings.seconds,
                **common,
            )


def _flat(settings: Settings, folder: Path, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    import shutil

    from lowmem.bench.flat import flat
    from lowmem.bench.space import part

    dim, rows = settings.flat_dim, list(settings.flat_rows)
    while len(rows) > 1 and 8 * dim * sum(rows) * 1.1 > shutil.disk_usage(folder).free:
        settings.notes.append(
            f"flat: {rows[-1]:,} rows are left out; the files of all tables would take "
            f"{8 * dim * sum(rows) / 1e9:.0f} GB"
        )
        rows.pop()
    with part(folder, 8 * dim * sum(rows)) as home:
        yield from flat(
            home,
            rows=rows,
            dim=dim,
            batch=8192,
            memory_batches=[1024, 8192, 65536],
            seconds=settings.seconds,
            limits=limits,
        )


def _cold(settings: Settings, folder: Path, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    from lowmem.bench.cgroup import unavailable
    from lowmem.bench.cold import under_limit
    from lowmem.bench.space import part

    reason = unavailable()
    if reason:
        settings.notes.append(
            f"cold by memory limit: not available, {reason}. Give --rows whose state is larger "
            "than the memory to see it here"
        )
        return
    for rows in settings.cold_rows:
        with part(folder, 8 * rows * settings.dims[0]) as home:
            yield from under_limit(
                home,
                limit=settings.limit,
                rows=rows,
                dim=settings.dims[0],
                ids=settings.ids,
                batches=settings.cold_batches,
                names=settings.names,
                seconds=3 * settings.seconds,
                limits=limits,
            )
