"""The ``lowmem`` command. One file of this folder is one subcommand.

A subcommand module has ``HELP`` (one line), ``configure(parser)`` and
``run(args) -> int``. It imports torch, numba or matplotlib inside ``run`` only, so
that ``--help`` answers at once.
"""

from __future__ import annotations

import _thread
import argparse
import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence

COMMANDS = ("demo", "plan", "iocheck", "rules", "bench", "store")

DESCRIPTION = """\
Train with Adam where Adam's states do not fit, and do it faster than Adam.

  lowmem plan     what fits on this machine, and which optimizer to take
  lowmem iocheck  what the disk can do, in rows per second
  lowmem demo     ten million entities, trained on real data, in three minutes
  lowmem rules    SNR records -> rules for SlimAdamW
  lowmem bench    side-by-side benchmarks on this machine
  lowmem store    look at, verify or repair a row store
"""


def build_parser() -> argparse.ArgumentParser:
    from lowmem import __version__

    parser = argparse.ArgumentParser(
        prog="lowmem", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"lowmem {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"lowmem.cli.{name}")
        subparser = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.configure(subparser)
        subparser.set_defaults(run=module.run)
    return parser


@contextlib.contextmanager
def _no_lost_interrupt() -> Iterator[None]:
    """Raise Ctrl-C again where Python drops it: in a destructor, or in a callback from C.

    While numba compiles or loads a kernel, LLVM calls back all the time, and what is raised
    in there is printed and forgotten.
    """
    before = sys.unraisablehook
    timers: list[threading.Timer] = []

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            # Not from in here, where it would be dropped as well.
            timers.append(threading.Timer(0.05, _thread.interrupt_main))
            timers[-1].start()
        else:
            before(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()  # too late: what was to be stopped has ended
            timer.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 is success, 1 a failed check, 2 bad input, 130 Ctrl-C."""
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    try:
        with _no_lost_interrupt():
            return args.run(args)
    except KeyboardInterrupt:
        print("\nlowmem: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except (ValueError, OSError) as error:
        print(f"lowmem {args.command}: {error}", file=sys.stderr)
        return 2
