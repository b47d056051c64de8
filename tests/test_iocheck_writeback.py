"""Writing back: the model against a simulation page by page, the thread on a real file."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from lowmem.iocheck.patterns import PAGE, Access, TableAccess, draw_ids
from lowmem.iocheck.predict import predict
from lowmem.iocheck.timing import StepCost
from lowmem.iocheck.writeback import Writer, dirtied_pages

ROW_BYTES = 1024


def simulated(rows: int, batch: int, waiting: int, access: Access) -> float:
    """Clean pages that a step changes, once a writer in the file's order keeps up with it."""
    rng = np.random.default_rng(0)
    place = rng.permutation(rows)
    pages = rows * ROW_BYTES // PAGE
    dirty = np.ones(pages, bool)
    at, changed = 0, []
    while len(changed) < 4_000:
        touched = np.unique(place[draw_ids(rows, batch, access, rng)] * ROW_BYTES // PAGE)
        changed.append(int((~dirty[touched]).sum()))
        dirty[touched] = True
        excess = int(dirty.sum()) - waiting
        while excess > 0:
            excess -= int(dirty[at])
            dirty[at] = False
            at = (at + 1) % pages
    return float(np.mean(changed[2_000:]))


@pytest.mark.parametrize("access", ["uniform", "zipf"])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_changed_pages_are_those_of_a_simulation(access: Access, share: float) -> None:
    rows, batch = 40_000, 300
    table = TableAccess(rows, ROW_BYTES, access)
    waiting = int(share * table.pages)
    expected = simulated(rows, batch, waiting, access)
    assert dirtied_pages(table, batch, waiting * PAGE) == pytest.approx(expected, rel=0.1)


def test_a_table_that_may_wait_as_a_whole_is_never_clean_again() -> None:
    table = TableAccess(1_000, ROW_BYTES, "uniform")
    assert dirtied_pages(table, 64, 1_000 * ROW_BYTES) == 0.0
    assert dirtied_pages(table, 64, 999 * ROW_BYTES) > 0.0


def test_a_step_is_no_faster_than_the_writing_that_it_causes() -> None:
    hot = StepCost(ids=1_000, seconds=0.001, distinct_rows=1_000, pages=1_000, steps=9)
    cold = StepCost(1_000, 0.1, 1_000, 1_000, 9, write_back_s=0.05)
    long = StepCost(500, 0.02, 500, 300, 9)
    given = (10_000_000, ROW_BYTES, 2_000, "uniform", 20 << 30, hot, cold, 1e-5)
    bound = predict(*given, long)
    assert bound.write_back_bound
    assert bound.seconds_per_step == pytest.approx(0.02 * 4)
    assert bound.seconds_per_step_hot == pytest.approx(0.002)
    assert not predict(*given).write_back_bound
    assert predict(*given).seconds_per_step == pytest.approx(0.002)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts and takes orders")
def test_the_writer_writes_what_it_was_granted(tmp_path: Path) -> None:
    size = 16 << 20
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as area:
            np.frombuffer(area, np.uint8)[::PAGE] = 1
            with Writer(file.fileno(), size, 60) as writer:
                if not writer.able:
                    pytest.skip("this file system takes no orders")
                writer.grant(2_000)
                writer.wait(lambda: False)
                assert writer.written >= 2_000


def test_a_stop_ends_the_waiting(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb+") as file, Writer(file.fileno(), PAGE, 60) as writer:
        writer.grant(1 << 40)
        writer.wait(lambda: True)


def test_the_thread_ends_by_itself_with_whoever_started_it_gone(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb+") as file:
        writer = Writer(file.fileno(), PAGE, 0.05).__enter__()
    writer._thread.join(timeout=30)  # nobody told it to end
    assert not writer._thread.is_alive()


def test_a_system_without_the_call_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no C library")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with open(tmp_path / "file", "wb+") as file:
        assert not Writer(file.fileno(), PAGE, 60).able
