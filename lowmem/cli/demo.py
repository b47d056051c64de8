"""(to be written)"""

from __future__ import annotations

import argparse

HELP = "(to be written)"


def configure(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    raise NotImplementedError
