"""What ``lowmem bench dsa`` can be asked for, and its defaults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from lowmem.units import parse_count

REGIMES = (
    "first-step",
    "hot",
    "fresh",
    "end-to-end",
    "durability",
    "commit",
    "cold-dropped",
    "flat",
    "cold-limit",
)
QUICK = ("hot", "end-to-end", "fresh", "cold-dropped", "cold-limit")
IDS = ("uniform", "zipf", "zipf-ordered", "codegraph")
CONTENDERS = ("adam", "sparse-adam", "memmap", "memmap-random", "dsa")


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        found = [parse_count(part, "the number") for part in _names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers")
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
    """What a run measures, with the defaults of quick, ordinary and full runs filled in.

    ``few_ids`` are the kinds of ids for the regimes of which a quick run shows one.
    ``passes`` is how often a fresh run's ids would go through the table.
    ``disk_seconds`` is for each of the disk's limits; ``visits`` says how often a contender is
    made ready under the memory limit, and how many turns it has then.
    """

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
    disk_seconds: float
    visits: tuple[int, int]
    few_ids: list[str]
    repeats: int
    passes: float
    cycle: int
    cycles: int
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        quick, full = bool(args.quick), bool(args.full)
        if quick and full:
            raise ValueError("--quick and --full exclude each other; give one of them")

        def pick(given: Any, small: Any, usual: Any, large: Any) -> Any:
            return given or (small if quick else large if full else usual)

        grid = [1024, 8192, 65536]
        ids = pick(args.ids, ["uniform", "zipf"], ["uniform", "zipf"], list(IDS))
        settings = cls(
            regimes=args.regimes or list(QUICK if quick else REGIMES),
            ids=ids,
            few_ids=ids[:1] if quick else ids,
            names=args.contenders or list(CONTENDERS),
            fresh_names=("sparse-adam", "dsa") if quick else CONTENDERS[1:],
            batches=pick(args.batch, [8192], grid, [1024, 4096, 16384, 65536]),
            fresh_batches=pick(args.batch, [8192], [1024, 8192], grid),
            rows=pick(args.rows, [200_000], [1_000_000], [1_000_000, 10_000_000]),
            dims=pick(args.dim, [128], [128], [32, 128, 512]),
            flat_rows=sorted(
                pick(
                    args.flat_rows,
                    [200_000, 1_000_000],
                    [1_000_000, 10_000_000, 40_000_000],
                    [1_000_000, 10_000_000, 40_000_000],
                )
            ),
            flat_dim=args.dim[0] if args.dim else 128,
            cold_rows=pick(args.cold_rows, [400_000], [10_000_000], [10_000_000]),
            cold_batches=pick(args.cold_batch, [1024], [8192], grid),
            limit=int((args.limit or (0.15 if quick else 4)) * (1 << 30)),
            seconds=pick(args.seconds, 0.03, 0.4, 0.5),
            disk_seconds=0.3 if quick else 1.0,
            visits=(1, 5) if quick else (2, 3),
            repeats=5,
            passes=0.8 if quick else 1.5,
            cycle=50 if quick else 1000,
            cycles=3 if quick else 5,
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
