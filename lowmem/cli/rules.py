"""SNR records of an Adam run -> rules for SlimAdamW.

Reads the CSV that SNRTracker (or the published tracker) writes, takes for every layer the
axis set with the highest mean SNR above the cutoff, prints what was chosen, and writes
the rules for SlimAdamW(rules="rules/slimadam.json").
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowmem.slim.rules import Choice

_SHOWN = 20

HELP = "SNR records -> rules for SlimAdamW"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--snr_filename",
        "--snr-filename",
        required=True,
        metavar="FILE",
        help="CSV of SNR records, or the folder that holds it and no other CSV",
    )
    parser.add_argument(
        "--cutoff", "--snr_cutoff", type=float, default=1.0, help="SNR to exceed, default 1.0"
    )
    parser.add_argument(
        "--prefer",
        choices=("snr", "bytes"),
        default="snr",
        help="among axes above the cutoff: the highest SNR (default) or the most bytes saved",
    )
    parser.add_argument(
        "--burn_in", "--burn-in", type=int, default=0, help="ignore steps before this one"
    )
    parser.add_argument(
        "--out", default="rules/slimadam.json", metavar="FILE", help="default %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw SNR as a picture")


def run(args: argparse.Namespace) -> int:
    from lowmem.slim.records import read_records
    from lowmem.slim.rules import choose, rules_of
    from lowmem.slim.rulesfile import write_rules

    source = _records_file(args.snr_filename)
    records = read_records(source)
    _check_outputs(args, source)
    choices = choose(records, args.cutoff, args.prefer, args.burn_in)
    rules = rules_of(choices)
    print(table(choices))
    write_rules(args.out, rules)
    print(f"wrote {args.out}")
    if args.plot is not None:
        from lowmem.slim.plots import draw_snr

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        kept = [record for record in records if record.step >= args.burn_in]
        draw_snr(kept, args.cutoff).savefig(args.plot, dpi=120, format="png")
        print(f"wrote {args.plot}")
    return 0


def _records_file(given: str) -> str:
    """The file of records: ``given``, or the one CSV file in it where it is a folder."""
    folder = Path(given)
    if not folder.exists():
        raise FileNotFoundError(
            f"--snr_filename {given!r} does not exist; SNRTracker(save_dir=...) writes such a file"
        )
    if not folder.is_dir():
        return given
    files = sorted(path for path in folder.glob("*.csv") if path.is_file())
    if not files:
        raise ValueError(f"--snr_filename {given!r} is a folder without a .csv file")
    if len(files) > 1:
        names = ", ".join(str(path) for path in files[:_SHOWN])
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        raise ValueError(
            f"--snr_filename {given!r} is a folder of {len(files)} .csv files, one a run; name one "
            f"of them: {names}{more}"
        )
    print(f"records: {files[0]}")
    return str(files[0])


def _check_outputs(args: argparse.Namespace, source: str) -> None:
    taken = {Path(source).resolve(): "--snr_filename"}
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path is None:
            continue
        if Path(path).is_dir() or not Path(path).name:
            raise ValueError(f"{option} {str(path)!r} is a directory; give the name of a file")
        other = taken.setdefault(Path(path).resolve(), option)
        if other != option:
            raise ValueError(f"{option} would overwrite the file of {other}: {path}")
    if os.path.lexists(args.out) and not args.force:
        raise ValueError(
            f"{args.out} is there already and was not touched: --force overwrites it, and --out "
            "names another file"
        )


def table(choices: Sequence[Choice]) -> str:
    """Layer, shape, chosen axes, SNR and bytes saved; the total below."""
    lines = [("layer", "shape", "axes", "SNR", "bytes saved")]
    for choice in choices:
        snr = choice.shown_snr
        lines.append(
            (
                choice.key,
                " x ".join(map(str, choice.shape)),
                "-" if choice.axes is None else ", ".join(map(str, choice.axes)),
                "unknown" if snr is None else f"{snr:.3g}",
                f"{choice.bytes_before - choice.bytes_after:,}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    lines.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    text = [
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    before = sum(choice.bytes_before for choice in choices)
    saved = before - sum(choice.bytes_after for choice in choices)
    averaged = sum(choice.axes is not None for choice in choices)
    text.append(
        f"\n{averaged} of {len(choices)} averaged: {saved:,} of {before:,} bytes saved, "
        f"{saved / before:.2%} of the second moment"
    )
    if averaged < len(choices):
        text.append(
            "axes -: nothing passed the cutoff (the SNR shown is the best there was), "
            "or a vector, which is never averaged"
        )
    return "\n".join(text)
