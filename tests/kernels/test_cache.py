"""Compiled kernels: made anew after a change of their sources, and announced when they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem.kernels.cache import drop_stale


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "__pycache__").mkdir()
    for name, age in (("one.py", 30), ("two.py", 20), ("__pycache__/one.f-1.nbi", 10)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    return tmp_path


def test_a_cache_newer_than_every_source_stays(folder: Path) -> None:
    assert drop_stale(folder) == 0
    assert (folder / "__pycache__/one.f-1.nbi").exists()


@pytest.mark.parametrize("changed", ["one.py", "two.py"])
def test_a_change_of_any_source_drops_it(folder: Path, changed: str) -> None:
    os.utime(folder / changed, (1_000_000, 1_000_000))
    assert drop_stale(folder) == 1
    assert not (folder / "__pycache__/one.f-1.nbi").exists()
    assert drop_stale(folder) == 0


def test_no_cache_and_no_folder_are_no_errors(tmp_path: Path) -> None:
    assert drop_stale(tmp_path) == 0
    assert drop_stale(tmp_path / "missing") == 0


_STEP = """
import sys, torch, lowmem
assert "numba" not in sys.modules, "importing lowmem does not wait for numba"
table = torch.nn.Parameter(torch.zeros(20, 4))
with lowmem.DSA([table]) as opt:
    opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
"""


def test_the_first_process_says_why_it_is_silent_and_the_second_need_not(tmp_path: Path) -> None:
    environment = dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _STEP],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        said.append([line for line in done.stderr.splitlines() if "compiles" in line])
    (line,) = said[0]
    assert line == (
        "lowmem compiles its kernels for DSA, once per machine and version; this takes up to a "
        "minute"
    )
    assert said[1] == []


_TWO_MODULES = """
import logging, numba
from lowmem.kernels.notice import announce

def define(module):
    names = {"numba": numba, "__name__": module}
    exec("@numba.njit\\ndef one(a): return a", names)
    exec("@numba.njit\\ndef two(a): return one(a)", names)
    return names["two"]

logging.basicConfig(format="%(levelname)s %(message)s")
announce("ours", "SlimAdamW")
define("somebody's")(1)
print("before", flush=True)
ours = define("ours")
ours(1), ours(1.0)
"""


def test_only_our_kernels_and_only_once_an_optimizer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TWO_MODULES],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        "before",
        "WARNING lowmem compiles its kernels for SlimAdamW, once per machine and version; this "
        "takes up to a minute",
    ]


_CTRL_C = """
import signal, sys
import numba
import lowmem.kernels
from numba.core import event

class Press(event.Listener):
    def on_start(self, started): signal.raise_signal(signal.SIGINT)
    def on_end(self, ended): pass

names = {"numba": numba, "__name__": sys.argv[1]}
exec("@numba.njit\\ndef one(a): return a + 1\\ndef call(a): return one(a)", names)
with event.install_listener("numba:compile", Press()):
    try:
        names["call"](1)
    except KeyboardInterrupt:
        print("stopped with", len(names["one"].signatures))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, names["call"](1))
"""


@pytest.mark.parametrize(("module", "ready"), [("lowmem.made_up", 1), ("somebody's", 0)])
def test_ctrl_c_waits_for_a_kernel_of_ours(module: str, ready: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CTRL_C, module], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == [f"stopped with {ready}", "True 2"], done.stderr


def test_an_error_while_numba_waits_leaves_the_handler_alone(tmp_path: Path) -> None:
    code = """
import signal, threading
import numba
from numba.core.compiler_lock import global_compiler_lock
import lowmem.kernels

def ring(*_):
    raise TimeoutError

names = {"numba": numba, "__name__": "lowmem.made_up"}
exec("@numba.njit\\ndef one(a): return a + 1", names)
held, done = threading.Event(), threading.Event()

def hold():
    with global_compiler_lock:
        held.set()
        done.wait()

threading.Thread(target=hold).start()
held.wait()
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    names["one"](1)
except TimeoutError:
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
done.set()
print(names["one"](1))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.stdout.splitlines() == ["True", "2"], done.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_ctrl_c_ends_at_once_still_ends(tmp_path: Path) -> None:
    code = """
import signal
from lowmem import interrupts

signal.signal(signal.SIGINT, signal.SIG_DFL)
with interrupts.whole():
    signal.raise_signal(signal.SIGINT)
    print("whole", flush=True)
print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "whole\n"
    assert done.returncode == -signal.SIGINT
