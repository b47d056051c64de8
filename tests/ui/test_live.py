"""Recorder, panels and live picture, without a screen."""

from __future__ import annotations

import math
import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lowmem.ui import HeatMap, Lines, Live, Recorder, memory_now
from lowmem.ui import live as live_module
from lowmem.ui.panels import running_mean, short_number, spread


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Screen:
    """Stands in for a notebook: every display and update is kept."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.handles = 0

    def display(self, picture: Any, display_id: bool) -> Screen:
        assert display_id is True
        self.handles += 1
        self.shown.append(picture.data)
        return self

    def update(self, picture: Any) -> None:
        self.shown.append(picture.data)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live_module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    monkeypatch.setattr(live_module, "in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", screen.display)
    return screen


# The recorder.


def test_a_recorder_gives_back_what_it_was_given() -> None:
    recorder = Recorder()
    recorder.log(0, loss=2.0, snr={"a": 1.0, "b": 2.0})
    recorder.log(5, {"rows/s": torch.tensor(7.0)}, snr={"b": 3.0, "c": np.float32(4.0)})
    assert recorder.names == ["loss", "snr", "rows/s"]
    steps, values = recorder.series("snr", "b")
    assert (steps.tolist(), values.tolist()) == ([0, 5], [2, 3])
    grid_steps, labels, matrix = recorder.grid("snr")
    assert grid_steps.tolist() == [0, 5]
    assert labels == ["a", "b", "c"]
    np.testing.assert_array_equal(matrix, [[1, math.nan], [2, 3], [math.nan, 4]])
    assert recorder.last("rows/s") == 7.0
    assert recorder.last("nothing") is None
    assert recorder.grid("nothing")[2].shape == (0, 0)


def test_a_recorder_refuses_and_keeps_what_it_has() -> None:
    recorder = Recorder()
    recorder.log(3, loss=1.0)
    with pytest.raises(TypeError, match=r"loss is tensor.*record a number"):
        recorder.log(4, good=1.0, loss=torch.ones(2))
    with pytest.raises(TypeError, match="snr a is None"):
        recorder.log(4, snr={"a": None})
    with pytest.raises(TypeError, match=r"loss is '1\.0'"):
        recorder.log(4, loss="1.0")
    with pytest.raises(ValueError, match="step is 2, but 3"):
        recorder.log(2, loss=1.0)
    with pytest.raises(ValueError, match="step is nan"):
        recorder.log(math.nan, loss=1.0)
    assert recorder.names == ["loss"]
    assert recorder.series("loss")[1].tolist() == [1.0]


def test_a_recorder_writes_a_table(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.log(1, loss=0.5, snr={"a, b": 2.0})
    recorder.save_csv(tmp_path / "run.csv")
    lines = (tmp_path / "run.csv").read_text().splitlines()
    assert lines == ["name,label,step,value", "loss,,1.0,0.5", 'snr,"a, b",1.0,2.0']


# The panels.


def filled(steps: int = 60) -> Recorder:
    recorder = Recorder()
    for step in range(steps):
        recorder.log(step, loss=5 - step / 20, snr={f"layer {i}": 4.0 / (i + 1) for i in range(8)})
    return recorder


def test_lines_draw_the_recorded_values_and_the_cutoff() -> None:
    figure = Live([Lines("loss", "loss", cutoff=3.0)], recorder=filled()).figure()
    line, cutoff, end = figure.axes[0].lines
    assert line.get_ydata().tolist() == pytest.approx([5 - step / 20 for step in range(60)])
    assert list(cutoff.get_ydata()) == [3.0, 3.0]
    assert end.get_ydata() == pytest.approx([5 - 59 / 20])


def test_a_heat_map_draws_labels_times_steps_and_a_border_at_the_cutoff() -> None:
    figure = Live([HeatMap("SNR", "snr", cutoff=1.0)], recorder=filled()).figure()
    axes = figure.axes[0]
    mesh = axes.collections[0]
    assert mesh.get_array().shape == (8, 60)
    assert mesh.norm(1.0) == pytest.approx(0.5)
    # 4/(i+1) is above 1 for rows 0 to 2, so the border runs between rows 2 and 3.
    heights = axes.lines[0].get_ydata()
    assert set(heights[np.isfinite(heights)]) == {2.5}
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"layer {i}" for i in range(8)
    ]


def test_lines_are_told_apart_without_colour() -> None:
    figure = Live([Lines("SNR", "snr", log=True)], recorder=filled()).figure()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert all(any(f"layer {i}" in text for text in texts) for i in range(8))
    recorder = Recorder()
    recorder.log(0, a=1, b=2, c=3)
    lines = Live([Lines("x", ["a", "b", "c"])], recorder=recorder).figure().axes[0].lines
    assert len({line.get_linestyle() for line in lines if line.get_marker() != "o"}) == 3


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [math.nan],
        [math.inf, 1.0, -math.inf],
        [0.0, -1.0],
        [1e300, 1e-300],
        [math.nan] * 50 + [1.0],
        list(np.linspace(-1, 1, 20_000)),
    ],
    ids=lambda values: str(values)[:20],
)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_can_be_drawn(values: list[float], log: bool) -> None:
    panels = [Lines("a", ["x", "absent"], log=log, smooth=True), HeatMap("b", "g")]
    live = Live(panels, title="any")
    for step, value in enumerate(values):
        live.recorder.log(step, x=value, g={"r": value, f"s{step % 7}": -value})
    live.figure().canvas.draw()
    assert "any" in live.alt
    if len(values) == 20_000:
        assert max(len(line.get_xdata()) for line in live.figure().axes[0].lines) < 4000


def test_words_say_what_the_picture_shows() -> None:
    live = Live([Lines("loss", "loss"), HeatMap("SNR", "snr")], recorder=filled(), title="A run")
    assert "loss from 5 at step 0 to 2.05 at step 59" in live.alt
    assert "3 lie above 1 (layer 0, layer 1, layer 2)" in live.alt
    assert 'alt="A run. loss' in live._repr_html_()


def test_a_running_mean_is_the_mean_of_what_is_there() -> None:
    values = np.array([1.0, math.nan, 3.0, 5.0, 7.0])
    expected = [np.nanmean(values[max(0, i - 2) : i + 1]) for i in range(5)]
    expected[1] = math.nan
    np.testing.assert_allclose(running_mean(values, 3), expected)


def test_labels_are_moved_apart_and_stay_in_order() -> None:
    moved = spread([0.1, 0.1, 0.12, 0.9, 1.0], 0.09)
    assert np.all(np.diff(moved) >= 0.09 - 1e-12)
    assert moved[-1] == 1.0
    crowded = spread([0.5] * 40, 0.09)
    assert np.all(np.diff(crowded) > 0)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1_250_000, "rows/s", "1.25M rows/s"), (5.12e9, "bytes", "5.12 GB"), (0.0341, "", "0.0341"),
     (1234, "", "1234"), (0, "bytes", "0 B"), (math.nan, "", "nan")],
)  # fmt: skip
def test_numbers_are_short(value: float, unit: str, text: str) -> None:
    assert short_number(value, unit) == text


# The live picture.


def test_one_handle_and_at_most_two_redraws_a_second(screen: Screen, clock: Clock) -> None:
    with Live([Lines("loss", "loss")]) as live:
        for step in range(1000):
            clock.now += 0.01  # ten seconds in all
            live.log(step, loss=step)
    assert screen.handles == 1
    assert 15 <= len(screen.shown) <= 22
    assert live.redraws == len(screen.shown)
    assert "at step 999" in screen.shown[-1]


def test_slow_drawing_leaves_nine_tenths_of_the_time(
    screen: Screen, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live([Lines("loss", "loss")])
    show = live._show

    def slow() -> None:
        show()
        clock.now += 0.3

    monkeypatch.setattr(live, "_show", slow)
    start = clock.now
    for step in range(3000):
        clock.now += 0.01
        live.log(step, loss=step)
    assert live.redraws * 0.3 <= 0.12 * (clock.now - start)
    assert live.redraws > 5


def test_stop_keeps_what_was_drawn(screen: Screen, clock: Clock) -> None:
    with Live([Lines("loss", "loss")]) as live:
        for step in range(100):
            live.log(step, loss=step)
            if step == 42:
                raise KeyboardInterrupt
    assert live.stopped
    assert "at step 42" in screen.shown[-1]


def test_an_error_goes_on_after_the_last_picture(screen: Screen, clock: Clock) -> None:
    live = Live([Lines("loss", "loss")])
    live.log(7, loss=1.0)
    with pytest.raises(ZeroDivisionError), live:
        raise ZeroDivisionError
    assert not live.stopped
    assert "at step 7" in screen.shown[-1]


class Broken:
    title = "broken"

    def draw(self, ax: Any, recorder: Recorder) -> None:
        raise RuntimeError("cannot draw")

    def words(self, recorder: Recorder) -> str:
        return "broken"


def test_a_picture_that_fails_does_not_hide_the_error_of_the_run(screen: Screen) -> None:
    with pytest.raises(ZeroDivisionError), Live([Broken()]):
        raise ZeroDivisionError


def test_without_panels_every_name_gets_one(tmp_path: Path) -> None:
    live = Live()
    live.log(0, loss=1.0, speed=2.0)
    assert [ax.get_title(loc="left") for ax in live.figure().axes] == ["loss", "speed"]


def test_a_script_writes_one_png_and_an_interrupt_goes_on(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from lowmem.ui import Live\n"
        "with Live() as live:\n"
        "    for step in range(10):\n"
        "        live.log(step, loss=step)\n"
        "        if step == 5 and sys.argv[1:]: raise KeyboardInterrupt\n"
        "assert 'IPython' not in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    run = [sys.executable, "-c", script]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "live.png").unlink()
    stopped = subprocess.run([*run, "stop"], cwd=tmp_path, capture_output=True, text=True)
    assert "KeyboardInterrupt" in stopped.stderr
    assert (tmp_path / "live.png").exists()


def test_bad_panels_are_refused() -> None:
    with pytest.raises(ValueError, match="panels is 'loss'"):
        Live("loss")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"panels is \[\]"):
        Live([])
    with pytest.raises(TypeError, match="panels holds 'loss'"):
        Live(["loss"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="columns is 0"):
        Live(columns=0)


def test_memory_is_measured() -> None:
    before = memory_now()
    # New memory for certain: an allocator may have kept what an earlier test gave back.
    size = 100_000_000
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 1
    after = memory_now(SimpleNamespace(state_bytes=lambda: {"disk": 5}))
    assert after["RAM"] - before["RAM"] == pytest.approx(size, rel=0.1)
    assert after["disk"] == 5
