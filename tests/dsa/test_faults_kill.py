"""SIGKILL before, inside and after everything that changes a file or a row.

Each killed run is gone on with and must end bit for bit like one that was never killed. The
points are every write, rename, removal, sync and kernel call of the run itself.
"""

import os
import random
import shutil
import signal
import sys

import pytest
from dsa_faults import Points, assert_same, chosen, in_child, points_of_a_run, run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks and kills"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def points(tmp_path_factory, never_killed):
    names = points_of_a_run(tmp_path_factory.mktemp("points"))
    assert {"pwrite", "replace", "unlink", "make_records", "_run_kernel", "hash_rows"} <= set(names)
    return names


def killed(home, fatal, half, **options):
    def work():
        Points(fatal, half).install()
        run(home, **options)

    return in_child(work) == -signal.SIGKILL


def check(home, number, half, never_killed, **options):
    home.mkdir()
    assert killed(home, number, half, **options)
    assert_same(run(home, **options), never_killed)
    shutil.rmtree(home)


def test_killed_at_points_of_every_kind(tmp_path, never_killed, points):
    for number in chosen(points, 36):
        for half in (False, True):
            check(tmp_path / "k", number, half, never_killed)


@pytest.mark.slow
def test_killed_at_every_point(tmp_path, never_killed, points):
    for number in range(len(points)):
        for half in (False, True):
            check(tmp_path / "k", number, half, never_killed)


@pytest.mark.slow
def test_killed_at_every_third_point_with_power(tmp_path, never_killed):
    names = points_of_a_run(tmp_path, durability="power")
    for number in range(0, len(names), 3):
        check(tmp_path / "k", number, bool(number % 2), never_killed, durability="power")


def _killed_again_and_again(tmp_path, never_killed, runs):
    """Killed, killed while it comes back, and again: the roll back is interrupted, too."""
    rng = random.Random(1)
    for _ in range(runs):
        home = tmp_path / "k"
        home.mkdir()
        deaths = 0
        while deaths < 5 and killed(home, rng.randrange(90), rng.random() < 0.5):
            deaths += 1
        assert_same(run(home), never_killed)
        shutil.rmtree(home)


def test_killed_again_while_it_comes_back(tmp_path, never_killed):
    _killed_again_and_again(tmp_path, never_killed, 8)


@pytest.mark.slow
def test_killed_again_while_it_comes_back_at_length(tmp_path, never_killed):
    _killed_again_and_again(tmp_path, never_killed, 150)


def _killed_at_random_moments(tmp_path, never_killed, runs, longest):
    rng = random.Random(os.getpid())
    for _ in range(runs):
        home = tmp_path / "k"
        home.mkdir()
        in_child(lambda home=home: run(home), kill_after=rng.random() * longest)
        assert_same(run(home), never_killed)
        shutil.rmtree(home)


def test_killed_at_random_moments(tmp_path, never_killed):
    _killed_at_random_moments(tmp_path, never_killed, 12, 0.15)


@pytest.mark.slow
def test_killed_at_hundreds_of_random_moments(tmp_path, never_killed):
    _killed_at_random_moments(tmp_path, never_killed, 300, 0.25)


def test_killed_in_a_run_that_was_closed_after_its_last_commit(tmp_path, never_killed):
    """Close without a commit keeps the rows, and the way back for the crash that follows."""
    for fatal in (3, 8, 14):
        home = tmp_path / f"{fatal}"
        home.mkdir()
        run(home, steps=7)  # a checkpoint at 4, closed at 7
        assert killed(home, fatal, True)
        assert_same(run(home), never_killed)


def test_a_table_made_after_the_commit_goes_when_its_checkpoint_is_loaded(tmp_path, never_killed):
    home = tmp_path
    run(home, steps=7)  # a checkpoint at 4; the second table is made at 6; closed in order
    assert (home / "m" / "table-001.rows").exists()
    assert_same(run(home), never_killed)
