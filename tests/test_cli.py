"""The command as a whole: what it prints without a subcommand, and that Ctrl-C always ends it."""

from __future__ import annotations

import argparse
import sys
import time

import pytest

from lowmem import cli
from lowmem.cli import bench, main


def test_without_a_subcommand_it_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"lowmem {name} " in said


def test_a_ctrl_c_that_python_drops_comes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def run(args: argparse.Namespace) -> int:
        Interrupted()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            pass
        return 0

    before = sys.unraisablehook
    monkeypatch.setattr(bench, "run", run)
    assert main(["bench", "all"]) == 130
    assert "stopped" in capsys.readouterr().err
    assert sys.unraisablehook is before


def test_other_lost_errors_are_still_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ZeroDivisionError("in a destructor")

    def run(args: argparse.Namespace) -> int:
        Broken()
        return 7

    heard = []
    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    assert main(["bench", "all"]) == 7
    [lost] = heard
    assert lost.exc_type is ZeroDivisionError
