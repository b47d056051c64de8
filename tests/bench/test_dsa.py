"""``lowmem bench dsa``: fair contenders, honest gradients, and nothing left behind."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.bench import contenders, dsa, regimes, space
from lowmem.bench.cold import evict_all, warm
from lowmem.bench.contenders import Disk, make_shared
from lowmem.bench.counters import PeakMemory, Usage, holding, mapped_bytes
from lowmem.bench.figures import touched_pages
from lowmem.bench.options import CONTENDERS
from lowmem.bench.report import Result
from lowmem.bench.turns import Run, table, turn, watch
from lowmem.bench.workloads import Gradients, Ids
from lowmem.cli import main

linux = pytest.mark.skipif(sys.platform != "linux", reason="page cache control is Linux only")
TINY = ["--rows", "4000", "--dim", "8", "--batch", "512", "--seconds", "0.002", "--ids", "uniform"]


# -- workloads -----------------------------------------------------------------------------


@given(
    name=st.sampled_from(["uniform", "zipf", "zipf-ordered"]),
    rows=st.integers(1, 3000),
    batch=st.integers(1, 300),
    number=st.integers(0, 1 << 41),
)
@settings(max_examples=50, deadline=None)
def test_ids_are_rows_of_the_table_and_the_same_for_everybody(name, rows, batch, number) -> None:
    ids = Ids(name, rows).at(number, batch)
    assert ids.dtype == np.int64
    assert ids.shape == (batch,)
    assert 0 <= ids.min() <= ids.max() < rows
    assert np.array_equal(ids, Ids(name, rows).at(number, batch))


def test_zipf_ids_come_as_often_as_zipf_says() -> None:
    rows, draws = 1000, 200_000
    counts = np.bincount(Ids("zipf-ordered", rows).at(0, draws), minlength=rows)
    law = np.arange(1, rows + 1) ** -1.05
    expected = draws * law / law.sum()
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected) + 1)


def test_scattered_zipf_has_the_same_frequencies_at_other_places() -> None:
    ordered = np.bincount(Ids("zipf-ordered", 500).at(3, 50_000), minlength=500)
    scattered = np.bincount(Ids("zipf", 500).at(3, 50_000), minlength=500)
    assert np.array_equal(np.sort(ordered), np.sort(scattered))
    assert np.argmax(scattered) != np.argmax(ordered) or not np.array_equal(ordered, scattered)


def test_a_hot_set_holds_so_many_rows_all_over_the_table() -> None:
    seen = np.unique(Ids("uniform", 100_000, hot=50).at(0, 5000))
    assert len(seen) == 50
    assert seen.max() - seen.min() > 50_000


def test_an_unknown_workload_is_named() -> None:
    with pytest.raises(ValueError, match="'zpif'"):
        Ids("zpif", 10)


def test_the_gradient_has_the_form_that_autograd_leaves() -> None:
    grads = Gradients(Ids("zipf", 300), 64, 5)
    ours = grads.at(2)
    layer = torch.nn.Embedding(300, 5, sparse=True)
    layer(torch.from_numpy(grads.ids_at(2))).sum().backward()
    theirs = layer.weight.grad
    for attribute in ("layout", "dtype", "shape", "is_sparse"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    assert not ours.is_coalesced()
    assert not theirs.is_coalesced()
    assert torch.equal(ours._indices(), theirs._indices())
    assert ours._values().shape == theirs._values().shape
    assert len(torch.unique(ours._indices())) < 64  # duplicates are there
    assert grads.distinct(2) == len(torch.unique(ours._indices()))


# -- contenders ----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 20])
def test_every_contender_computes_what_sparse_adam_computes(tmp_path: Path, dim: int) -> None:
    names, notes = regimes.equal(list(contenders.NAMES), tmp_path, dim)
    assert names == list(contenders.NAMES)
    assert notes == []


def test_a_contender_that_computes_something_else_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = contenders.Memmap.step

    def forgetful(self) -> None:
        step(self)
        self._count = 1  # a bias correction that never ends

    monkeypatch.setattr(contenders.Memmap, "step", forgetful)
    names, notes = regimes.equal(["memmap", "sparse-adam", "dsa"], tmp_path, 4)
    assert names == ["sparse-adam", "dsa"]
    assert "memmap is left out" in notes[0]


def test_contenders_on_one_file_see_each_others_bytes(tmp_path: Path) -> None:
    param = table(100, 4)
    memmap, disk = make_shared(["memmap"], param, tmp_path)
    assert isinstance(disk, Disk)
    for field in disk.store.fields.values():
        field[:] = 7
    assert all(torch.all(moment == 7) for moment in memmap.moments())
    assert memmap.state_bytes()["disk"] == 2 * 4 * 400
    for way in (memmap, disk):
        way.close()


@linux
def test_eviction_leaves_no_page_in_memory_and_warming_brings_pages_back(tmp_path: Path) -> None:
    from lowmem.iocheck.cache import resident_pages
    from lowmem.iocheck.filesystem import file_system

    if file_system(tmp_path).kind == "ram":
        pytest.skip("the folder for tests is RAM")
    rows, dim = 20_000, 128
    ways = make_shared(["memmap", "memmap-random"], table(rows, dim), tmp_path)
    for way in ways:
        way.touch_all()
    disk = ways[-1]
    assert isinstance(disk, Disk)
    with open(disk.store.path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        assert resident_pages(file.fileno(), 0, size) > 0
        evict_all(ways)
        assert resident_pages(file.fileno(), 4096, size - 4096) == 0
        disk.store.advise_random()
        budget = 4 << 20
        brought = warm(disk, Ids("uniform", rows), budget)
        assert 0.5 * budget < brought < 1.5 * budget
        deadline = time.monotonic() + 20
        while resident_pages(file.fileno(), 4096, size - 4096) * 4096 < 0.5 * budget:
            assert time.monotonic() < deadline, "the pages that were asked for never came"
            time.sleep(0.05)
    for way in ways:
        way.close()


def test_touched_pages_counts_every_page_of_every_region(tmp_path: Path) -> None:
    ways = make_shared(["memmap"], table(1000, 384), tmp_path)  # rows of 3,072 and 1,536 bytes
    for way in ways:
        run = Run(way, Gradients(Ids("uniform", 1000), 50, 384), number=1)
        pages = set()
        for address, size in way.places():
            for row in run.grads.ids_at(0):
                for byte in range(address + row * size, address + (row + 1) * size):
                    pages.add(byte // 4096)
        assert touched_pages(run) == len(pages)
    for way in ways:
        way.close()


# -- counters ------------------------------------------------------------------------------


def test_peak_memory_sees_what_is_taken_and_given_back() -> None:
    with PeakMemory() as peak:
        block = np.ones(8 << 20)
        time.sleep(0.05)
        del block
    assert 60 << 20 < peak.bytes < 100 << 20


@linux
def test_usage_counts_what_is_read_from_the_device(tmp_path: Path) -> None:
    from lowmem.iocheck.filesystem import file_system

    if file_system(tmp_path).kind == "ram":
        pytest.skip("the folder for tests is RAM")
    path = tmp_path / "data"
    path.write_bytes(os.urandom(4 << 20))
    contenders.drop_cache(path)
    usage, before = Usage(), Usage.now()
    path.read_bytes()
    usage.add(before, Usage.now())
    assert usage.read_bytes >= 4 << 20


@linux
def test_mapped_bytes_counts_the_touched_pages_of_a_mapping_once(tmp_path: Path) -> None:
    way = contenders.make("memmap", table(1024, 16), tmp_path)  # two files of 64 KiB
    for moment in way.moments():  # reads every page
        assert moment.sum() == 0
    places = [address for address, _ in way.places()]
    assert mapped_bytes(places) == 2 * 65536
    assert mapped_bytes([places[0], places[0] + 70]) == 65536
    assert mapped_bytes([]) == 0
    way.close()


def test_holding_sees_what_stays_and_not_what_went() -> None:
    with holding() as held:
        kept = np.ones(4 << 20)
        np.ones(8 << 20)
    assert 31 << 20 < held.bytes < 40 << 20
    assert kept.sum()


def test_memory_of_a_step_is_the_steps_own(tmp_path: Path) -> None:
    run = Run(
        contenders.make("sparse-adam", table(200_000, 8), tmp_path),
        Gradients(Ids("uniform", 200_000), 100_000, 8),
    )
    turn(run, 0)  # the state is made
    watch(run, 0)
    # It adds duplicate rows up in new tensors; ids and gradient were there before.
    assert run.gradient_bytes == 100_000 * 8 * 4
    assert run.gradient_bytes < run.step_bytes < 20 * run.gradient_bytes


def test_a_turn_takes_at_least_one_step_and_leaves_no_gradient(tmp_path: Path) -> None:
    way = contenders.make("sparse-adam", table(100, 4), tmp_path)
    run = Run(way, Gradients(Ids("uniform", 100), 8, 4))
    assert len(turn(run, 0)) == 1
    assert len(turn(run, float("inf"), most=7)) == 7
    assert len(turn(run, 0, timed=False)) == 1
    assert run.number == 9
    assert [len(repeat) for repeat in run.timing.repeats] == [1, 7]
    assert way.param.grad is None


# -- room ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_folder_goes_whatever_happens(tmp_path: Path, error: type[BaseException]) -> None:
    def run() -> None:
        with space.scratch(tmp_path) as folder:
            (folder / "state").write_bytes(b"x" * 1000)
            raise error

    with pytest.raises(error):
        run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="pids are looked up on POSIX only")
def test_folders_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"lowmem-bench-{ended.pid}-a").mkdir()
    (tmp_path / f"lowmem-bench-{os.getpid()}-b").mkdir()
    (tmp_path / "lowmem-bench-mine").mkdir()
    with space.scratch(tmp_path):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"lowmem-bench-{os.getpid()}-b", "lowmem-bench-mine"]


def test_too_little_space_is_said_with_both_figures(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"takes 1000000.0 GB of files and [\d.]+ GB are free"),
        space.part(tmp_path, 10**15),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_contenders_that_do_not_fit_in_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # 10 GB for 100M weights: 0.4 weights, 0.8 each for four, 1.2 for dense Adam; then 4 GB.
    monkeypatch.setattr(space.env, "available_memory_bytes", lambda: 10 * 10**9)
    assert space.that_fit(CONTENDERS, 10**6, 100) == (list(CONTENDERS), [])
    monkeypatch.setattr(space.env, "available_memory_bytes", lambda: 4 * 10**9)
    kept, said = space.that_fit(CONTENDERS, 10**6, 100)
    assert kept == ["sparse-adam", "memmap", "memmap-random", "dsa"]
    assert "adam is left out, it needs 1.2 GB" in said[0]


# -- the command ---------------------------------------------------------------------------


def test_quick_run_measures_every_regime_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    home, out = tmp_path / "files", tmp_path / "out.json"
    home.mkdir()
    regime = "hot,fresh,end-to-end,flat,durability,cold-dropped"
    words = ["--quick", "--regimes", regime, "--flat-rows", "4000,8000", *TINY]
    words += ["--directory", str(home), "--json", str(out), "--plot", str(tmp_path / "out.png")]
    assert main(["bench", "dsa", *words]) == 0
    assert list(home.iterdir()) == []
    result = Result.load(out)
    assert {row["regime"] for row in result.rows} == {*regime.split(","), "memory"}
    for row in result.rows:
        if row["regime"] in ("hot", "fresh", "cold-dropped"):
            assert row["rows_per_s"] > 0
            assert row["p50_s"] <= row["p95_s"] <= row["p99_s"]
            assert row["repeats"] >= 3
            assert {"major_faults", "read_bytes", "written_bytes", "disk_bytes"} <= row.keys()
            weights = 4000 * 8 * 4
            assert row["rss_bytes"] >= weights + row["gradient_bytes"] + row["step_bytes"]
            assert 0 <= row["stall_share"] < 1
    fresh = {row["contender"]: row for row in result.rows if row["regime"] == "fresh"}
    ratios = np.divide(fresh["SparseAdam, RAM"]["stretch_s"], fresh["DSA"]["stretch_s"])
    assert fresh["DSA"]["worst_stretch"] == pytest.approx(ratios.min(), rel=1e-4)
    journal = {row["contender"]: row for row in result.rows if row["regime"] == "durability"}
    assert len(journal) == 3
    assert journal["DSA, no journal"]["steady"] == 1.0
    assert journal["DSA, journal"]["commit_s"] > 0
    hot = {row["contender"] for row in result.rows if row["regime"] == "hot"}
    assert hot == set(contenders.NAMES.values())
    memory = {row["batch"]: row["step_bytes"] for row in result.rows if row["regime"] == "memory"}
    # Two arrays of 64-bit keys at least: memory of a step that the allocator must not hide.
    assert memory[65536] > 2 * 65536 * 8 > memory[1024]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "times as fast as SparseAdam" in capsys.readouterr().out


def test_cold_under_a_memory_limit(tmp_path: Path) -> None:
    from lowmem.bench.cgroup import unavailable

    if unavailable():
        pytest.skip(unavailable())
    out = tmp_path / "out.json"
    words = ["--quick", "--regimes", "cold-limit", "--cold-rows", "60000", "--limit", "0.1"]
    words += ["--dim", "128", "--cold-batch", "256", "--ids", "uniform", "--seconds", "0.002"]
    assert main(["bench", "dsa", *words, "--directory", str(tmp_path), "--json", str(out)]) == 0
    rows = {row["contender"]: row for row in Result.load(out).rows}
    assert rows.keys() == {"memmap", "memmap, MADV_RANDOM", "DSA"}
    assert rows["DSA"]["to_memmap"] == pytest.approx(
        rows["memmap"]["step_s"] / rows["DSA"]["step_s"], rel=1e-4
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--regimes", "warm"], "no 'warm'; choose from first-step, hot"),
        (["--ids", "zpif"], "no 'zpif'"),
        (["--contenders", "adamw"], "no 'adamw'"),
        (["--quick", "--full"], "exclude each other"),
    ],
)
def test_a_wrong_choice_is_named(words: list[str], message: str, capsys) -> None:
    assert main(["bench", "dsa", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--rows", "0"], ["--rows", "ten"], ["--batch", ""], ["--limit", "-1"], ["--seconds", "nan"]],
)
def test_a_wrong_number_is_a_usage_error(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "dsa", *words])
    error = capsys.readouterr().err
    assert any(words in error for words in ("above 0", "whole number", "10000000"))


@pytest.mark.slow
def test_the_first_step_of_a_process(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--regimes", "first-step", *TINY, "--directory", str(tmp_path), "--json", str(out)]
    assert main(["bench", "dsa", "--quick", *words]) == 0
    rows = {row["contender"]: row for row in Result.load(out).rows}
    first, later = rows["DSA, the first run ever"], rows["DSA, every later run"]
    assert first["first_step_s"] > later["first_step_s"] > later["second_step_s"] > 0
    assert rows["SparseAdam, RAM"]["import_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("text", ["1M", "1e6", "1_000_000", "1000k", "1000000"])
def test_counts_are_written_as_elsewhere(text: str) -> None:
    parser = argparse.ArgumentParser()
    dsa.configure(parser)
    assert parser.parse_args(["--rows", f"{text},2M"]).rows == [1_000_000, 2_000_000]


def test_a_state_larger_than_the_memory_needs_no_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowmem import env
    from lowmem.bench import cgroup

    monkeypatch.setattr(cgroup, "unavailable", lambda: "no root")
    monkeypatch.setattr(env, "available_memory_bytes", lambda: 600_000)
    out = tmp_path / "out.json"
    words = ["--quick", "--regimes", "cold-limit", "--cold-rows", "1000,20_000", "--dim", "8"]
    words += ["--cold-batch", "64", "--ids", "uniform", "--seconds", "0.001", "--json", str(out)]
    assert main(["bench", "dsa", *words, "--directory", str(tmp_path)]) == 0
    rows = Result.load(out).rows
    assert {row["rows"] for row in rows} == {20_000}  # 1,000 rows would fit
    assert {row["contender"] for row in rows} == {"memmap", "memmap, MADV_RANDOM", "DSA"}


def test_without_control_groups_the_result_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowmem.bench import cgroup

    monkeypatch.setattr(cgroup, "unavailable", lambda: "this system has no memory control groups")
    args = SimpleNamespace(
        quick=True, full=False, regimes=["cold-limit"], ids=["uniform"], contenders=["dsa"],
        batch=None, rows=None, dim=[4], flat_rows=None, cold_rows=[1000], cold_batch=None,
        limit=None, seconds=0.01, directory=tmp_path, command_line="lowmem bench dsa",
    )  # fmt: skip
    result = dsa.run(args)
    assert result.rows == []
    assert any("no memory control groups" in note for note in result.notes)


def test_a_stopped_run_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(regimes, "fresh", stop)
    words = ["--quick", "--regimes", "hot,fresh", *TINY, "--directory", str(tmp_path)]
    assert main(["bench", "dsa", *words, "--contenders", "sparse-adam,dsa"]) == 130
    assert "hot: DSA is" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "lowmem", "bench", "dsa", "--quick", "--regimes"]
    words = ["hot", "--seconds", "60", *TINY[:4], "--directory", str(tmp_path)]
    process = subprocess.Popen([*command, *words], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("lowmem-bench-*/*/dsa/*.rows")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(sent)
        assert process.wait(60) == 130
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []
