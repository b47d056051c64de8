"""SIGKILL in what is no step: export, import, loading, repair, overwriting; and odd copies.

At every write, rename, removal and sync of it. What is left is refused or right, and doing it
again is the way out.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from dsa_faults import Net, Points, assert_same, in_child, one_step, outcome, run

from lowmem import DSA
from lowmem.cli import main
from lowmem.dsa.header import StoreError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks and kills"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
HOME = Path(".")


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def crash():
    """A run that dies after ten steps, with a checkpoint at 8."""

    def work():
        run(HOME, steps=10, close=False)
        os._exit(9)

    assert in_child(work) == 9


def fresh_copy():
    """The folder as it was prepared, for the next kill."""
    if not Path("prepared").exists():
        Path("prepared").mkdir()
        for name in ("m", "x", "c.pt"):
            if Path(name).is_dir():
                shutil.copytree(name, Path("prepared", name))
            elif Path(name).exists():
                shutil.copy(name, Path("prepared", name))
    for name in ("m", "x", "y"):
        shutil.rmtree(name, ignore_errors=True)
    Path("c.pt").unlink(missing_ok=True)
    for path in Path("prepared").iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, path.name)


def killed_everywhere(work, every=1):
    """Kill ``work`` at each point, whole and half; yields after each death, until none is left."""
    number = 0
    while True:
        for half in (False, True):
            fresh_copy()

            def child(number=number, half=half):
                Points(number, half).install()
                work()

            status = in_child(child)
            if status == 0:
                assert number, "it passes no point"
                return
            assert status == -signal.SIGKILL
            yield number
        number += every


def imported_or_refused(folder):
    try:
        return DSA.import_(folder)
    except (FileNotFoundError, StoreError):
        return None


def tables_of(folder):
    """What resuming a copy of the folder finds: an export that is resumed is none any more."""
    shutil.rmtree("look", ignore_errors=True)
    shutil.copytree(folder, "look", ignore=shutil.ignore_patterns("LOCK"))
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="look", mode="resume") as opt:
        return {k: v for k, v in outcome(net, opt).items() if "exp_avg" in k and k[0] in "ab"}


def test_export(never_killed):
    """Over an export of an earlier step, so that half of it could be taken for whole."""
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(10):
            one_step(net, opt, step)
            if step == 7:
                opt.save_checkpoint("c.pt", net)
                opt.export("x")
        old, new = None, outcome(net, opt)

    def work():
        again = Net()
        opt = DSA(again.parameters(), lr=0.1, directory="m", mode="resume")
        opt.export("x")

    fresh_copy()
    old = tables_of("x")
    for _ in killed_everywhere(work):
        if imported_or_refused("x"):
            found = tables_of("x")
            assert any(all(torch.equal(found[k], kind[k]) for k in found) for kind in (old, new))
        # The training itself goes on as if nothing were, and the export can be made again.
        again = Net()
        with DSA(again.parameters(), lr=0.1, directory="m", mode="resume") as opt:
            assert opt.load_checkpoint("c.pt", again) == 8
            opt.export("x")
        DSA.import_("x")
        assert_same(run(HOME), never_killed)


def test_import(never_killed):
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(8):
            one_step(net, opt, step)
        opt.save_checkpoint("c.pt", net)
        opt.export("x")
    expected = tables_of("x")
    shutil.rmtree("m")
    for _ in killed_everywhere(lambda: DSA.import_("x", to="y")):
        if list(Path("y").glob("table-*.rows")):
            with contextlib.suppress(StoreError):
                found = tables_of("y")
                assert all(torch.equal(found[name], expected[name]) for name in expected)
        if Path("y/MANIFEST.part").exists() or not list(Path("y").glob("table-*.rows")):
            DSA.import_("x", to="y")
        # else it was whole when the end came: a store of its own, which no import writes over
        shutil.rmtree("m", ignore_errors=True)
        os.rename("y", "m")
        assert_same(run(HOME), never_killed)


def test_loading_a_checkpoint(never_killed):
    run(HOME, steps=10)  # closed at 10, with a checkpoint at 8: loading takes rows back

    def work():
        net = Net()
        opt = DSA(net.parameters(), lr=0.1, directory="m", mode="resume")
        assert opt.load_checkpoint("c.pt", net) == 8

    for _ in killed_everywhere(work):
        assert_same(run(HOME), never_killed)


def test_repair(never_killed):
    crash()

    def work():
        assert main(["store", "repair", "m"]) == 0

    for number in killed_everywhere(work):
        if number % 2:
            assert main(["store", "repair", "m"]) == 0
        assert_same(run(HOME), never_killed)


def test_overwriting(never_killed):
    """The old run is refused or whole, never a part of it; and the new one can be begun again."""
    run(HOME)

    def work():
        net = Net()
        DSA(net.parameters(), lr=0.1, directory="m", mode="overwrite")

    refused = 0
    for _ in killed_everywhere(work):
        shutil.rmtree("look", ignore_errors=True)
        shutil.copytree(".", "look", ignore=shutil.ignore_patterns("look", "prepared", "LOCK"))
        try:
            assert_same(run(Path("look")), never_killed)
        except OSError:
            refused += 1
        Path("c.pt").unlink()
        assert_same(run(HOME), never_killed)
    assert refused


def test_a_folder_copied_while_it_is_trained_in(never_killed):
    """Any state of its files in any mixture: the copy is refused, or goes on right."""
    net, refused, right = Net(), 0, 0
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(12):
            if step % 4 == 0 and step:
                opt.save_checkpoint("c.pt", net)
            for later in range(step % 4 + 1):  # files of different moments
                part = sorted(path for path in Path("m").iterdir() if path.name != "LOCK")
                Path("y/m").mkdir(parents=True, exist_ok=True)
                for path in part[later::2]:
                    shutil.copy(path, "y/m")
            if Path("c.pt").exists():
                shutil.copy("c.pt", "y")
                shutil.copytree("y", "z", dirs_exist_ok=True)
                try:
                    found = run(Path("z"))
                except (OSError, ValueError):
                    refused += 1
                else:
                    right += 1
                    assert_same(found, never_killed)
                shutil.rmtree("z")
            one_step(net, opt, step)
    assert refused + right


def test_the_second_table_is_made_after_the_commit_and_a_crash_comes_between(never_killed):
    def work():
        run(HOME, steps=7, close=False)  # a commit at 4; the second table is made at 6
        os._exit(9)

    assert in_child(work) == 9
    assert Path("m/table-001.rows").exists()
    assert_same(run(HOME), never_killed)


@pytest.mark.parametrize("shift", [-40_000, 40_000])
def test_a_clock_that_is_set_back_or_forward(never_killed, shift):
    crash()
    for path in [*Path("m").iterdir(), Path("c.pt")]:
        status = path.stat()
        os.utime(path, (status.st_atime + shift, status.st_mtime + shift))
    assert_same(run(HOME), never_killed)


def test_what_is_lost_does_not_depend_on_the_seed_of_hashes():
    """Sets and dicts are in another order in another process; a checkpoint must not be."""
    import subprocess

    script = """
import sys, torch; sys.path.insert(0, sys.argv[1])
from dsa_faults import run; from pathlib import Path
found = run(Path("."), steps=int(sys.argv[2]))
torch.save(found, "found.pt")
"""
    for seed, steps in (("0", 6), ("1", 10), ("2", 12)):
        subprocess.run(
            [sys.executable, "-c", script, os.path.dirname(os.path.dirname(__file__)), str(steps)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            timeout=300,
        )
    whole = run(HOME / "never") if (HOME / "never").mkdir() is None else None
    assert_same(torch.load("found.pt"), whole)
