"""Side-by-side benchmarks on this machine: every contender in one run.

  lowmem bench dsa      the disk optimizer against SparseAdam, dense Adam and plain memmap
  lowmem bench slim     the slim optimizer against AdamW, Adafactor and others
  lowmem bench quality  what averaging the second moment does to the final loss
  lowmem bench all      all three

Every result carries the machine, the versions, the file system and the date.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HELP = "side-by-side benchmarks on this machine"

WORKLOADS = {
    "dsa": "DSA against SparseAdam, dense Adam and plain memmap",
    "slim": "SlimAdamW against AdamW and its kin",
    "quality": "final loss with and without averaging",
}
STOPPED = 130  # the exit status after Ctrl-C, as shells have it
# What fits into a minute when all three share it; each on its own shows more.
_SHARED_MINUTE = {
    "dsa": ["--regimes", "hot,cold-dropped"],
    "slim": [],
    "quality": ["--seeds", "1", "--steps", "40"],
}


class _LazyParser(argparse.ArgumentParser):
    """Loads its workload only when it is the one that parses, so `lowmem --help` stays quick."""

    workload: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        name, self.workload = self.workload, None
        module = _module(name) if name else None
        if module is not None:
            self.description = module.__doc__
            module.configure(self)
        return super().parse_known_args(args, namespace)


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        dest="benchmark", metavar="BENCHMARK", required=True, parser_class=_LazyParser
    )
    for name, text in WORKLOADS.items():
        subparser = commands.add_parser(
            name,
            help=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a result holds the command as it was given, less the paths
        )
        _common(subparser)
        subparser.workload = name
    _common(commands.add_parser("all", help="all of them, one after the other", allow_abbrev=False))


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="under a minute: smaller, fewer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where files go (default: here)"
    )


def _module(name: str) -> ModuleType | None:
    """The workload's module, or ``None`` where this version has none."""
    full = f"lowmem.bench.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        return None


def _per_benchmark(path: Path | None, name: str) -> Path | None:
    """``all`` writes one file a benchmark: ``out.json`` becomes ``out-dsa.json``."""
    return path and path.with_name(f"{path.stem}-{name}{path.suffix}")


def run(args: argparse.Namespace) -> int:
    for path in (args.json, args.plot):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{path}: its folder does not exist; make it first")
    if args.directory is not None and not args.directory.is_dir():
        raise ValueError(f"--directory {args.directory}: no such folder; make it first")
    if args.benchmark != "all":
        return _run_one(args.benchmark, args)
    status = 0
    for name in WORKLOADS:
        module = _module(name)
        if module is None:
            print(f"lowmem bench {name}: not in this version, skipped", file=sys.stderr)
            continue
        parser = argparse.ArgumentParser()
        _common(parser)
        module.configure(parser)
        words = ["--quick", *_SHARED_MINUTE[name]] if args.quick else []
        one = parser.parse_args(words)
        one.given = ["bench", name, *words]
        one.directory, one.benchmark = args.directory, name
        one.json = _per_benchmark(args.json, name)
        one.plot = _per_benchmark(args.plot, name)
        print(f"== {command_line(one)}")
        status = max(status, _run_one(name, one))
        print()
        if status == STOPPED:
            break
    return status


def command_line(args: argparse.Namespace) -> str:
    """The command that was given, without the folders and files of this machine."""
    hidden = {"--json", "--plot", "--directory"}
    words: list[str] = []
    skip = False
    for word in args.given:
        if skip:
            skip = False
        elif word in hidden:
            skip = True
        elif not any(word.startswith(f"{name}=") for name in hidden):
            words.append(word)
    return shlex.join(["lowmem", *words])


def _run_one(name: str, args: argparse.Namespace) -> int:
    module = _module(name)
    if module is None:
        raise ValueError(f"this version has no benchmark {name!r} (lowmem.bench.{name} is missing)")
    args.command_line = command_line(args)
    result: Any = module.run(args)
    print(result.table())
    if args.json is not None:
        result.save(args.json)
        print(f"wrote {args.json}")
    if args.plot is not None:
        result.plot(args.plot)
        print(f"wrote {args.plot}")
    return STOPPED if result.stopped else 0
