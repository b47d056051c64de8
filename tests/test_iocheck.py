"""The I/O check as a whole: what it reports, what it leaves behind, and how it ends early."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowmem import iocheck
from lowmem.iocheck import IOReport, budget, cache, check, engines, phases, timing
from lowmem.iocheck.filesystem import file_system
from lowmem.kernels import notice

TABLE: dict[str, Any] = {"rows": 200_000, "dim": 32, "batch": 2_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def report(folder: Path) -> IOReport:
    return iocheck(folder, **TABLE, seconds=8)


@pytest.fixture(autouse=True)
def short_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget too small to predict from shows the same phases."""
    monkeypatch.setattr(check, "MIN_SECONDS", 1.0)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A folder that must be as empty after the test as before."""
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_everything_is_measured_and_nothing_is_left(report: IOReport, folder: Path) -> None:
    figures = report.to_json()
    assert not report.interrupted
    missing = [name for name, value in figures.items() if value is None]
    if report.method != "cached: not a disk speed":
        # All of so small a table may wait to be written, so there are no steps beside writing.
        assert all(name.startswith("measured_dsa_written_") for name in missing)
    for name in (
        "random_read_iops_qd1",
        "random_read_iops_qd32",
        "random_write_iops_qd1",
        "random_write_iops_qd32",
        "sequential_read_bytes_per_s",
        "sequential_write_bytes_per_s",
        "dsa_rows_per_s_hot",
        "sparse_adam_rows_per_s",
        "predicted_seconds_per_step",
        "written_bytes_per_day",
    ):
        assert figures[name] > 0, name
    assert json.loads(json.dumps(figures)) == figures
    assert list(folder.iterdir()) == []


def test_latencies_are_ordered(report: IOReport) -> None:
    for rate in report.rates.values():
        assert 0 < rate.latency_p50_us <= rate.latency_p95_us <= rate.latency_p99_us


def test_a_depth_one_rate_is_its_latency_turned_over(report: IOReport) -> None:
    rate = report.rates["random_read_qd1"]
    assert rate.iops * rate.latency_p50_us / 1e6 <= 1.05


def test_it_shows_itself(report: IOReport) -> None:
    text, page = report.text(), report._repr_html_()
    for words in (report.advice, report.method, "queue depth 1", "SparseAdam", "endurance"):
        assert words in text
    assert "200,000 × 32" in repr(report)
    assert "<table" in page
    assert 'scope="row"' in page
    figure = report.figure()
    assert type(figure).__name__ == "Figure"
    assert len(figure.axes) == 3


def test_fio_commands_say_the_same_job(report: IOReport) -> None:
    commands = report.fio_commands()
    assert len(commands) == len(report.rates)
    assert "--rw=randread --bs=4k --iodepth=32" in "\n".join(commands)


def test_a_terminal_ends_with_the_advice(report: IOReport) -> None:
    lines = report.text().splitlines()
    assert lines[-1] == report.advice
    [start] = [number for number, line in enumerate(lines) if line.startswith("  fio ")]
    assert start < lines.index("Measured")
    pasted = " ".join(line.rstrip("\\") for line in lines[start : lines.index("Measured")])
    assert pasted.count("--name=") == len(report.rates)


def test_progress_grows_to_one(empty: Path) -> None:
    seen: list[tuple[float, str]] = []
    iocheck(empty, **TABLE, seconds=4, on_progress=lambda done, what: seen.append((done, what)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert any("random reads" in message for _, message in seen)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("prepared", [0.0, 0.4, 2.0, 4.6, 30.0])
@pytest.mark.parametrize("seconds", [1.0, 3.0, 5.0, 10.0, 60.0])
def test_preparation_leaves_time_to_measure_in(
    seconds: float, prepared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "time", clock := Clock())
    seen: list[float] = []

    def begin(seconds: float) -> budget.Budget:
        made = budget.Budget(seconds, {}, lambda done, _: seen.append(done), None, clock.now)
        clock.now += prepared
        made.forgive_preparation()
        return made

    tight = begin(seconds)
    assert tight.remaining >= max(min(seconds, 4.0), seconds / 3) - 1e-9
    clock.now += tight.remaining / 2
    tight.progress("not done yet")
    assert seen[-1] < 0.99
    # Who asks for what the check says is enough gets it, and nothing on top.
    enough = begin(tight.enough)
    assert enough.remaining == pytest.approx(tight.enough - prepared)
    assert enough.remaining >= 4.0 - 1e-9


def test_a_check_that_takes_longer_says_why_and_what_to_ask_for(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "compiled", lambda: False)
    began = time.perf_counter() - 100  # as if torch had taken so long to import
    report = iocheck(empty, **TABLE, seconds=1, began=began)
    [note] = [note for note in report.warnings if "not 1:" in note]
    assert "this took 1" in note
    asked = int(note.split("ask for at least ")[1].split()[0])
    assert 150 < asked < 1000
    assert f"Note: {note}" in report.text()


def test_a_check_that_compiled_does_not_ask_for_more_seconds(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(notice, "compiled", lambda: next(answers))
    report = iocheck(empty, **TABLE, seconds=1, began=time.perf_counter() - 100)
    [note] = [note for note in report.warnings if "not 1:" in note]
    assert "kernels were compiled, which happens once" in note
    assert "ask for" not in note


def test_no_time_left_is_time_for_a_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", clock := Clock())

    def steps(step_s: float) -> int:
        def step(_: int) -> None:
            clock.now += step_s

        return len(timing.time_steps(step, -1.0, lambda: False))

    assert steps(0.01) >= timing.SURE_STEPS
    assert steps(5.0) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 1}, "too few steps were timed: run it again with more seconds"),
        ({"spread": 0.9}, "the machine was busy meanwhile: run it again"),
    ],
)
def test_the_advice_trusts_steps_no_more_than_the_notes_do(
    report: IOReport, change: dict[str, Any], words: str
) -> None:
    assert report.dsa_hot is not None
    sound = {"steps": 30, "spread": 0.01}
    sure = replace(report, dsa_hot=replace(report.dsa_hot, **sound))
    assert "run it again" not in sure.advice
    unsure = replace(report, dsa_hot=replace(report.dsa_hot, **sound | change))
    assert unsure.prediction is not None
    assert f"{unsure.prediction.rows_per_s:,.0f} rows per second" in unsure.advice
    assert words in unsure.advice
    assert any("steps of DSA" in note and "run it again" in note for note in unsure.warnings)
    assert unsure.text().endswith(unsure.advice)


def test_the_advice_doubts_steps_beside_writing_where_it_rests_on_them(report: IOReport) -> None:
    assert report.dsa_hot is not None
    assert report.prediction is not None
    hot = replace(report.dsa_hot, steps=30, spread=0.01)
    bound = replace(report.prediction, write_back_bound=True, hit_share=1.0)
    sure = replace(report, dsa_hot=hot, dsa_written=hot, prediction=bound)
    assert "bound by writing" in sure.advice
    unsure = replace(sure, dsa_written=replace(hot, steps=1))
    assert "too few steps were timed" in unsure.advice
    assert any("DSA beside writing" in note for note in unsure.warnings)


def test_writing_that_could_not_be_measured_is_not_taken_for_none(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(phases, "waiting_bytes", lambda: 1 << 20)
    monkeypatch.setattr(phases.SampleStore, "time_written_back", lambda *_: None)
    report = iocheck(empty, **TABLE, seconds=1, cache_bytes=100 << 20)
    assert report.dsa_hot is not None
    sure = replace(report, dsa_hot=replace(report.dsa_hot, steps=30, spread=0.01))
    assert "will not matter" not in sure.advice
    assert "what that costs is not known: expect at most" in sure.advice


def test_stopping_keeps_what_was_measured(empty: Path) -> None:
    seen: list[str] = []
    report = iocheck(
        empty,
        **TABLE,
        seconds=3,
        on_progress=lambda _, message: seen.append(message),
        should_stop=lambda: any("random reads, queue depth 32" in message for message in seen),
    )
    assert report.interrupted
    assert "random_read_qd1" in report.rates
    assert "random_write_qd32" not in report.rates
    assert report.prediction is None
    assert report.to_json()["dsa_rows_per_s_cold"] is None
    assert "stopped" in report.text()
    report.figure()


@pytest.mark.parametrize("phase", ["writing the test file", "random writes", "nothing in memory"])
def test_ctrl_c_keeps_what_was_measured(empty: Path, phase: str) -> None:
    def press(fraction: float, message: str) -> None:
        if phase in message:
            raise KeyboardInterrupt

    report = iocheck(empty, **TABLE, seconds=1, on_progress=press)
    assert report.interrupted
    assert bool(report.rates) == (phase != "writing the test file")


def test_an_error_of_the_disk_in_the_middle(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engines.Disk.measure

    def fail(self: engines.Disk, kind: Any, block: int, depth: int, *args: Any, **kw: Any) -> Any:
        if kind == "write" and block == 4096:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, kind, block, depth, *args, **kw)

    monkeypatch.setattr(engines.Disk, "measure", fail)
    report = iocheck(empty, **TABLE, seconds=1)
    assert report.interrupted
    assert "random_read_qd32" in report.rates
    assert "Input/output error" in report.text()


def test_any_other_error_leaves_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(phases, "_measure_steps", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        iocheck(empty, **TABLE, seconds=1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rows": 0}, ValueError),
        ({"rows": -5}, ValueError),
        ({"rows": 1.5}, ValueError),
        ({"rows": float("nan")}, ValueError),
        ({"rows": "10M"}, TypeError),
        ({"rows": True}, TypeError),
        ({"dim": 0}, ValueError),
        ({"batch": 0}, ValueError),
        ({"seconds": 0}, ValueError),
        ({"seconds": float("nan")}, ValueError),
        ({"access": "random"}, ValueError),
        ({"cache_bytes": -1}, ValueError),
    ],
)
def test_bad_numbers_are_named(empty: Path, change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{next(iter(change))} is"):
        iocheck(empty, **{**TABLE, **change})


def test_fewer_seconds_than_can_be_kept_are_refused(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"seconds is 7\.9; a check takes from 8 to 3600"):
        iocheck(empty, **TABLE, seconds=7.9)


def test_no_directory_and_a_file_instead_of_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such directory"):
        iocheck(tmp_path / "nowhere", **TABLE)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="not a file"):
        iocheck(tmp_path / "file", **TABLE)


def test_no_permission(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(PermissionError, match="name a directory of your own"):
        iocheck(empty, **TABLE)


def test_too_little_space(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free, total = 1_000_000, 2_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(OSError, match=r"too little space.*1 MB free"):
        iocheck(empty, **TABLE)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
def test_tmpfs_is_called_memory() -> None:
    report = iocheck("/dev/shm", **TABLE, seconds=1)
    assert report.method == "cached: not a disk speed"
    assert report.dsa_cold is None
    assert "RAM" in report.advice
    assert report.to_json()["dsa_rows_per_s_cold"] is None
    assert not list(Path("/dev/shm").glob(f".lowmem-iocheck-{os.getpid()}-*"))


def test_direct_refused(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "open_direct", lambda *_, **__: None)
    report = iocheck(empty, **TABLE, seconds=1.5)
    assert report.method in ("cache-dropped", "cached: not a disk speed")
    assert "O_DIRECT refused" in report.method_reason
    assert report.rates["random_read_qd32"].iops > 0


def test_a_direct_open_that_bypasses_nothing_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    if cache.choose_method(str(path), 1 << 20, file_system(tmp_path))[0] != "direct":
        pytest.skip("no provable O_DIRECT here")
    monkeypatch.setattr(cache, "open_direct", lambda path: os.open(path, os.O_RDWR))
    method, reason = cache.choose_method(str(path), 1 << 20, file_system(tmp_path))
    assert method == "cache-dropped"
    assert "go through the page cache" in reason


def test_a_system_without_cache_calls(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no posix_fadvise, Windows no O_DIRECT and no positioned reads either."""
    for name in ("posix_fadvise", "O_DIRECT", "preadv", "pwritev"):
        monkeypatch.delattr(os, name, raising=False)
    report = iocheck(empty, **TABLE, seconds=3)
    assert report.method == "cached: not a disk speed"
    assert report.engine == "threads"
    assert "not of a disk" in report.text()
    assert report.dsa_hot is not None


def test_folders_of_killed_checks_are_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".lowmem-iocheck-{dead.pid}-abc").mkdir()
    living = tmp_path / f".lowmem-iocheck-{os.getpid()}-abc"
    living.mkdir()
    iocheck(tmp_path, **TABLE, seconds=1)
    assert list(tmp_path.iterdir()) == [living]


@pytest.mark.parametrize(
    "table",
    [
        {"rows": 1, "dim": 1, "batch": 1},
        {"rows": 3, "dim": 513, "batch": 50_000, "access": "zipf"},
        {"rows": 10**12, "dim": 100, "batch": 1_000, "access": "zipf"},
        {"rows": 5_000, "dim": 100_000, "batch": 10},
        {"rows": 5_000, "dim": 100_000, "batch": 100_000},  # a gradient of 40 GB, were it made
    ],
)
def test_extreme_tables(empty: Path, table: dict[str, Any]) -> None:
    report = iocheck(empty, **table, seconds=1)
    assert report.prediction is not None
    assert report.prediction.rows_per_s_hot > 0
    if report.rows == 10**12:
        assert "will not fit" in report.advice


# -- the command -----------------------------------------------------------------------


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    table = ["--rows", "200k", "--dim", "32", "--batch", "2000", "--directory", str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "lowmem", "iocheck", *table, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_writes_figures_and_picture(empty: Path, tmp_path_factory: Any) -> None:
    out = tmp_path_factory.mktemp("out")
    process = start(empty, "--seconds", "10", "--json", "-", "--plot", str(out / "p.png"))
    text, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert json.loads(text)["rows"] == 200_000
    assert (out / "p.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_prints_what_it_has_and_leaves_nothing(
    empty: Path, number: signal.Signals
) -> None:
    process = start(empty, "--seconds", "60")
    assert process.stderr is not None
    read = ""
    deadline = time.monotonic() + 300
    while "sequential reads" not in read and time.monotonic() < deadline:
        read += process.stderr.read(1)
    process.send_signal(number)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "stopped before its end" in text
    assert "sequential write" in text
    assert "Traceback" not in errors


@pytest.mark.parametrize("seconds", ["3", "nan", "-1", "1e9"])
def test_seconds_that_cannot_be_kept_are_refused(empty: Path, seconds: str) -> None:
    text, errors = start(empty, f"--seconds={seconds}").communicate(timeout=120)
    assert f"seconds is {seconds}" in errors.replace("1000000000.0", "1e9")
    assert text == ""


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_the_check(empty: Path, option: str) -> None:
    process = start(empty, "--seconds", "60", option, str(empty / "nowhere" / "x"))
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no such folder" in errors
    assert text == ""


def test_a_bad_directory_is_one_line(tmp_path: Path) -> None:
    process = start(tmp_path / "nowhere")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "no such directory" in errors
    assert "Traceback" not in errors
