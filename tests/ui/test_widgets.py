"""The widgets' handlers and the task behind Run and Stop, without a front end."""

from __future__ import annotations

import asyncio
import html
import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure

from lowmem.plan import plan
from lowmem.ui.pump import message_type, pump
from lowmem.ui.task import Task, sentence
from lowmem.ui.widgets import IOCheckWidget, PlannerWidget, io_check, planner


class Log:
    """Everything that a task reported, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def task(self, threaded: bool) -> Task:
        return Task(
            lambda fraction, message: self.events.append(("progress", fraction)),
            lambda result: self.events.append(("result", result)),
            lambda message: self.events.append(("error", message)),
            lambda running: self.events.append(("running", running)),
            threaded=threaded,
        )

    def of(self, kind: str) -> list[Any]:
        return [value for name, value in self.events if name == kind]


@pytest.fixture(params=[False, True], ids=["callback", "thread"])
def threaded(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# The task.


def test_a_task_reports_its_start_result_and_end(threaded: bool) -> None:
    log = Log()
    task = log.task(threaded)
    assert task.start(lambda on_progress, should_stop: 42)
    task.wait(10)
    assert log.events == [("running", True), ("result", 42), ("running", False)]
    assert not task.running


def test_an_error_is_one_sentence_and_the_next_run_works(threaded: bool) -> None:
    log = Log()
    task = log.task(threaded)

    def fail(on_progress: Any, should_stop: Any) -> Any:
        raise OSError(28, "No space left on device", "/full")

    task.start(fail)
    task.wait(10)
    assert log.of("error") == ["No space left on device: /full."]
    time.sleep(0.45)
    assert task.start(lambda *_: "fine")
    task.wait(10)
    assert log.of("result") == ["fine"]


def test_a_second_start_while_one_runs_is_ignored(threaded: bool) -> None:
    log = Log()
    task = log.task(threaded)
    go = threading.Event()
    second: list[bool] = []

    def work(on_progress: Any, should_stop: Any) -> Any:
        if not threaded:  # a click that the pump lets in
            second.append(task.start(lambda *_: "second"))
        else:
            go.wait(10)
        return "first"

    task.start(work)
    if threaded:
        second.append(task.start(lambda *_: "second"))
        go.set()
    task.wait(10)
    assert second == [False]
    assert log.of("result") == ["first"]


def test_a_click_that_waited_in_the_queue_does_not_start_again(threaded: bool) -> None:
    log = Log()
    task = log.task(threaded)
    task.start(lambda *_: 1)
    task.wait(10)
    assert not task.start(lambda *_: 2)
    time.sleep(0.45)
    assert task.start(lambda *_: 3)
    task.wait(10)
    assert log.of("result") == [1, 3]


def test_stop_ends_the_work_and_keeps_its_result(threaded: bool) -> None:
    log = Log()
    task = log.task(threaded)

    def work(on_progress: Any, should_stop: Callable[[], bool]) -> int:
        for count in range(10_000):
            if should_stop():
                return count
            if count == 5 and not threaded:
                task.stop()
            time.sleep(0.001)
        return -1

    task.start(work)
    if threaded:
        time.sleep(0.02)
        task.stop()
    task.wait(10)
    assert 0 <= log.of("result")[0] < 10_000


def test_a_stop_from_an_earlier_run_does_not_end_the_next(threaded: bool) -> None:
    log = Log()
    task = log.task(threaded)
    task.stop()
    task.start(lambda on_progress, should_stop: should_stop())
    task.wait(10)
    assert log.of("result") == [False]


def test_progress_is_thinned_and_its_end_is_shown() -> None:
    log = Log()

    def work(on_progress: Any, should_stop: Any) -> None:
        for count in range(1001):
            on_progress(count / 1000, "x")

    log.task(False).start(work)
    assert len(log.of("progress")) < 100
    assert log.of("progress")[-1] == 1.0


def test_an_interrupt_ends_in_words() -> None:
    log = Log()

    def work(on_progress: Any, should_stop: Any) -> None:
        raise KeyboardInterrupt

    log.task(False).start(work)
    assert log.of("error") == ["Stopped before anything was measured."]
    assert log.of("running") == [True, False]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("rows is 0;\n at least 1"), "Rows is 0; at least 1."),
        (KeyError("x"), "KeyError: 'x'."),
        (RuntimeError(), "RuntimeError."),
        (ValueError(), "ValueError."),
        (PermissionError(13, "Permission denied", "/root"), "Permission denied: /root."),
    ],
)
def test_errors_read_as_sentences(error: Exception, words: str) -> None:
    assert sentence(error) == words


# The pump, on a kernel of the shape of ipykernel 6's.


class Kernel:
    def __init__(self) -> None:
        self.msg_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.handled: list[str] = []
        self.wire: list[list[bytes]] = []
        self.shell_stream = SimpleNamespace(flush=self._arrive)
        self.session = SimpleNamespace(
            feed_identities=lambda frames, copy: (frames[:1], frames[2:]),
            deserialize=lambda frames, content, copy: json.loads(frames[-1]),
        )
        self.shell_handlers = {
            "comm_msg": lambda stream, idents, message: self.handled.append(message["name"])
        }

    def send(self, kind: str, name: str) -> None:
        header = json.dumps({"msg_type": kind}).encode()
        content = json.dumps({"name": name}).encode()
        self.wire.append([b"client", b"<IDS|MSG>", b"signature", header, b"{}", b"{}", content])

    def _arrive(self) -> None:
        for frames in self.wire:
            self.msg_queue.put_nowait((0, "dispatch", (frames,)))
        self.wire = []


def test_the_pump_handles_clicks_and_leaves_cells_in_their_order() -> None:
    kernel = Kernel()
    for kind, name in [("execute_request", "a"), ("comm_msg", "stop"), ("execute_request", "b")]:
        kernel.send(kind, name)
    assert pump(kernel) == 1
    assert kernel.handled == ["stop"]
    left = [kernel.msg_queue.get_nowait()[2][0][-1] for _ in range(2)]
    assert [json.loads(content)["name"] for content in left] == ["a", "b"]
    assert pump(kernel) == 0


def test_the_pump_does_nothing_where_there_is_no_such_kernel() -> None:
    assert pump() == 0
    assert pump(SimpleNamespace()) == 0
    assert message_type([b"no", b"message"]) == ""
    assert message_type(None) == ""


# The I/O check's widget.


class Report:
    interrupted = False
    advice = "Everything fits."

    def figure(self) -> Figure:
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot([1, 2])
        return figure

    def _repr_html_(self) -> str:
        return "<table><tr><td>rates</td></tr></table>"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    calls: list[dict[str, Any]] = []

    def iocheck(**arguments: Any) -> Report:
        calls.append(arguments)
        arguments["on_progress"](0.5, "reads <fast>")
        return Report()

    # By its module: the package's attribute of that name is the function.
    monkeypatch.setattr(importlib.import_module("lowmem.iocheck"), "iocheck", iocheck)
    return calls


def test_run_checks_what_the_controls_say(check: Any) -> None:
    widget = IOCheckWidget("/data", "2.5M", 64, threaded=False)
    widget.access.value = "zipf"
    widget.run.click()
    arguments = {k: v for k, v in check[0].items() if k not in ("on_progress", "should_stop")}
    assert arguments == {
        "directory": "/data", "rows": 2_500_000, "dim": 64, "batch": 65_536, "seconds": 10,
        "access": "zipf",
    }  # fmt: skip
    assert isinstance(widget.result, Report)
    assert widget.message.value == "Done."
    assert "<table>" in widget.answer
    assert 'alt="Bars of the rates of the disk. Everything fits."' in widget.answer
    assert not widget.run.disabled
    assert widget.stop.disabled


def test_progress_is_shown_and_escaped(check: Any) -> None:
    widget = IOCheckWidget(".", "1M", 64, threaded=False)
    seen: list[str] = []
    widget.message.observe(lambda change: seen.append(change["new"]), names="value")
    widget.run.click()
    assert "50%: reads &lt;fast&gt;" in seen


@pytest.mark.parametrize(
    ("control", "value", "words"),
    [
        ("rows", "many", "Rows is &#x27;many&#x27;"),
        ("dim", "0", "Dim is &#x27;0&#x27;"),
        ("batch", "", "Ids in a step is"),
    ],
)
def test_a_wrong_control_is_a_sentence(check: Any, control: str, value: str, words: str) -> None:
    widget = IOCheckWidget(".", "1M", 64, threaded=False)
    getattr(widget, control).value = value
    widget.run.click()
    assert words in widget.error.value
    assert 'role="alert"' in widget.error.value
    assert check == []
    getattr(widget, control).value = "64"
    widget.run.click()
    assert widget.error.value == ""
    assert len(check) == 1


def test_a_failed_check_keeps_the_last_answer(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    widget = IOCheckWidget(".", "1M", 64, threaded=False)
    widget.run.click()
    answer = widget.answer

    def fail(**_: Any) -> Any:
        raise OSError("the disk is <gone>")

    monkeypatch.setattr(importlib.import_module("lowmem.iocheck"), "iocheck", fail)
    time.sleep(0.45)
    widget.run.click()
    assert "The disk is &lt;gone&gt;." in widget.error.value
    assert widget.answer == answer
    assert not widget.run.disabled


def test_a_real_check_fills_the_widget(tmp_path: Any) -> None:
    widget = io_check(str(tmp_path), rows="100k", dim=16)
    widget.seconds.value = 2  # the slider goes no lower than the least
    assert widget.seconds.value == 10
    widget.batch.value = "1k"
    widget.run.click()
    widget.task.wait(120)
    assert widget.error.value == ""
    assert widget.result.rows == 100_000
    assert "<table" in widget.answer
    assert list(tmp_path.iterdir()) == []


# The planner's widget.


def test_the_planner_shows_the_plan_of_its_controls() -> None:
    widget = planner("10M", 128, "colab-t4")
    assert repr(widget.result) == repr(plan("10M", 128, "colab-t4"))
    widget.machine.value = "colab-cpu"
    assert widget.result.machine.name == "colab-cpu"
    widget.rows.value = "1M"
    widget.run.click()
    assert widget.result.rows == 10**6
    assert widget.result.sentence in html.unescape(widget.answer)
    widget.kind.value = "dense"
    assert [choice.name for choice in widget.result] == ["AdamW", "SlimAdamW"]
    assert widget._table.layout.display == "none"


def test_the_planner_takes_a_machine_of_ones_own() -> None:
    widget = PlannerWidget("10M", 128, "colab-t4")
    widget.machine.value = "my own numbers"
    assert widget._own.layout.display == "flex"
    widget.ram.value, widget.vram.value, widget.disk.value = "64GiB", "24GB", "1TB"
    widget.run.click()
    machine = widget.result.machine
    assert (machine.ram, machine.vram, machine.disk) == (64 << 30, 24 * 10**9, 10**12)
    widget.ram.value = "plenty"
    widget.run.click()
    assert "RAM is" in widget.error.value
    assert widget.result.machine is machine


def test_the_planner_says_what_is_wrong() -> None:
    widget = planner("10M", 128, "colab-cpu")
    widget.weights.value = "cuda"
    assert "has no VRAM" in widget.error.value
    widget.weights.value = "cpu"
    assert widget.error.value == ""
    widget.kind.value = "dense"
    widget.share.value = "half"
    widget.run.click()
    assert "share of v kept" in widget.error.value.lower()
    with pytest.raises(ValueError, match="machine is 'mars'"):
        planner(machine="mars")


def test_widgets_use_no_pyplot_and_load_late() -> None:
    code = (
        "import sys, lowmem, lowmem.ui\n"
        "assert 'ipywidgets' not in sys.modules and 'matplotlib' not in sys.modules\n"
        "lowmem.ui.planner(machine='colab-t4')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
