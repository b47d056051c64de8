"""The prediction: limits that are known without a model, and advice that follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lowmem.iocheck.batches import Batches, _scattered, most_ids, random_grads
from lowmem.iocheck.check import _page_cache
from lowmem.iocheck.filesystem import FileSystem, Kind
from lowmem.iocheck.patterns import Access, draw_ids
from lowmem.iocheck.predict import ENDURANCE_BYTES, Prediction, predict
from lowmem.iocheck.report import IOReport
from lowmem.iocheck.timing import StepCost, typical

ROWS, DIM, BATCH = 10_000_000, 128, 10_000
ROW_BYTES = 8 * DIM
STORE = ROWS * ROW_BYTES
HOT = StepCost(ids=5_000, seconds=0.01, distinct_rows=5_000, pages=5_000, steps=9)
# 1,000 pages in 0.102 s, of which 0.002 s are the update itself: 100 µs a page.
COLD = StepCost(1_000, 0.102, 1_000, 1_000, 9, write_back_s=0.05)


def expect(cache_bytes: float, cold: StepCost | None = COLD) -> Prediction:
    return predict(ROWS, ROW_BYTES, BATCH, "uniform", int(cache_bytes), HOT, cold, 1e-5)


def test_all_in_memory_costs_what_hot_steps_cost() -> None:
    future = expect(2 * STORE)
    assert future.hit_share == 1.0
    assert future.seconds_per_step == pytest.approx(0.02)  # twice the measured ids
    # Different rows, of which ten thousand ids have 9,995.
    assert future.rows_per_s == pytest.approx(9_995 / 0.02, rel=1e-3)


def test_nothing_in_memory_adds_a_read_for_every_page() -> None:
    # Ten thousand of ten million rows: hardly two of them on one page.
    assert expect(0).seconds_per_step_cold == pytest.approx(0.02 + 10_000 * 100e-6, rel=0.01)


def test_a_page_that_is_evicted_is_written() -> None:
    future = expect(0)
    assert future.seconds_per_step == pytest.approx(0.02 + 10_000 * 150e-6, rel=0.01)


def test_more_cache_is_never_slower() -> None:
    steps = [expect(share * STORE).seconds_per_step for share in (0, 0.2, 0.5, 0.9, 1.1)]
    assert steps == sorted(steps, reverse=True)
    assert expect(0.5 * STORE).hit_share == pytest.approx(0.5, abs=0.01)


def test_wear_counts_evicted_pages_and_never_more_than_the_disk_can_write() -> None:
    future = expect(0)
    pages_a_day = future.missing_pages_per_step * 86_400 / future.seconds_per_step
    assert future.written_bytes_per_day == pytest.approx(4096 * pages_a_day, rel=1e-6)
    assert future.endurance_share_per_day == future.written_bytes_per_day / ENDURANCE_BYTES
    assert expect(2 * STORE).written_bytes_per_day <= 4096 * 86_400 / 50e-6 * 1.001


def test_without_a_cold_figure_nothing_is_said_about_missing_pages() -> None:
    future = expect(0, cold=None)
    assert future.seconds_per_step is None
    assert future.rows_per_s_cold is None
    assert future.written_bytes_per_day is None
    assert expect(2 * STORE, cold=None).seconds_per_step == pytest.approx(0.02)


def test_a_stall_neither_hides_nor_rules() -> None:
    calm = [0.01] * 50
    assert typical(calm) == (pytest.approx(0.01), 0.0)
    stalled = [*calm, 60.0]
    assert typical(stalled)[0] == pytest.approx(0.01)
    # A stall in every stretch is no accident: it is what steps cost here.
    assert typical(([0.01] * 9 + [0.1]) * 5)[0] == pytest.approx(0.019)


@pytest.mark.parametrize("access", ["uniform", "zipf"])
@pytest.mark.parametrize("window", [50_000, 3_000])
def test_batches_repeat_ids_as_the_table_does(access: Access, window: int) -> None:
    rng = np.random.default_rng(0)
    batches = Batches(1_000_000, window, 4096, 4, access, rng)
    drawn = [len(np.unique(draw_ids(1_000_000, 4096, access, rng))) for _ in range(20)]
    if window > 4096:
        assert batches.distinct == pytest.approx(np.mean(drawn), rel=0.03)
    ids = [batches.ids(number).numpy() for number in range(8)]
    assert min(map(np.min, ids)) >= 0
    assert max(map(np.max, ids)) < window
    often = [np.bincount(part, minlength=window).argmax() for part in ids]
    assert access == "uniform" or len(set(often)) == 1  # the same row comes up most each time
    assert batches.grads(0).shape == (4096, 4)


@pytest.mark.parametrize("window", [1, 2, 4_194_304, 4_194_305, 5_000_000])
def test_every_row_of_a_window_has_one_place(window: int) -> None:
    places = _scattered(window, np.random.default_rng(0))
    assert np.array_equal(np.sort(places), np.arange(window))


def test_a_batch_of_wide_rows_has_fewer_ids() -> None:
    assert most_ids(100_000, 128) == 100_000
    assert most_ids(1 << 20, 128) == 1 << 17
    assert 4 * 100_000 * most_ids(10**6, 100_000) <= 128 << 20
    assert most_ids(10, 1 << 40) == 1
    for count, dim in ((3, 5), (1 << 17, 128), (7, 5_000_000)):
        assert random_grads(count, dim).shape == (count, dim)


def report(kind: Kind = "disk", cache: float = 2 * STORE, free: float = 1e12) -> IOReport:
    system = FileSystem("/x", "ext4", kind, "/", "/dev/x", int(free), int(free))
    ram = StepCost(BATCH, 0.1, BATCH, 0, 3)
    return IOReport(
        "/x", ROWS, DIM, BATCH, "uniform", 10.0, int(cache), system,
        method="direct", dsa_hot=HOT, dsa_cold=COLD, sparse_adam=ram, prediction=expect(cache),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (report(), "disk speed will not matter"),
        (report("network"), "network drive: do not"),
        (report("cloud-drive"), "cloud drive folder: do not"),
        (report("ram"), "is RAM"),
        (report(free=1e9), "will not fit: it needs 10.2 GB and 1.00 GB are free"),
        (report(cache=0), "slow for random rows"),
    ],
)
def test_advice(given: IOReport, words: str) -> None:
    assert words in given.advice
    assert given.advice.endswith(".")
    assert words in given.text()


@pytest.mark.parametrize(
    "ram",
    [
        StepCost(BATCH, 9_000.0, BATCH, 0, 1),  # one step, in which the machine stood still
        StepCost(BATCH, 0.3, BATCH, 0, 5, spread=0.9),
    ],
)
def test_a_busy_machine_makes_no_comparison(ram: StepCost) -> None:
    given = report()
    assert "5 times SparseAdam in RAM" in given.advice
    given.sparse_adam = ram
    assert "SparseAdam" not in given.advice
    assert "busy" in given.text()


def test_a_stopped_check_claims_no_disk_speed() -> None:
    given = report(cache=0.5 * STORE)
    given.dsa_cold, given.interrupted = None, True
    given.prediction = expect(0.5 * STORE, cold=None)
    assert "not measured" in given.text()
    assert "run the check to its end" in given.advice
    assert given.to_json()["predicted_rows_per_s"] is None
    given.figure()
    assert "no prediction" in repr(given)


def test_the_weights_take_their_part_of_the_memory_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem.env.available_memory_bytes", lambda: 10**10)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert 10**10 - _page_cache(10**6, 250) == pytest.approx(10**9 + (256 << 20))
    assert _page_cache(10**9, 250) == 0


def test_figures_are_looked_at_without_a_screen(tmp_path: Path) -> None:
    report().figure().savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000
