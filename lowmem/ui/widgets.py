"""Widgets over the I/O check and the planner.

Thin on purpose: they read controls, call the library, and show its result object. Only
what ipywidgets 7.7 has is used, because Colab has 7.7.1.
"""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets

from lowmem.plan import MACHINE_NAMES, Machine, Plan, parse_count, plan
from lowmem.ui.image import image_html
from lowmem.ui.task import OnProgress, ShouldStop, Task, sentence
from lowmem.units import parse_bytes

_LABEL = {"description_width": "130px"}
_WIDE = "460px"
_ACCESS = [
    ("uniform: every row as likely", "uniform"),
    ("Zipf: few rows are popular", "zipf"),
]
_OWN = "my own numbers"
_MACHINES = [
    ("this machine, measured now", "this"),
    *((name, name) for name in MACHINE_NAMES if name != "this"),
    (_OWN, _OWN),
]


def io_check(directory: str = ".", rows: Any = "10M", dim: int = 128) -> IOCheckWidget:
    """Controls for ``lowmem.iocheck``. Write it as the last line of a cell.

    The widget's ``result`` is the ``IOReport`` of the last check, or ``None``.
    """
    return IOCheckWidget(directory, str(rows), dim)


def planner(rows: Any = "10M", dim: int = 128, machine: str = "this") -> PlannerWidget:
    """Controls for ``lowmem.plan``. Write it as the last line of a cell.

    The widget's ``result`` is the ``Plan`` that is shown.
    """
    return PlannerWidget(str(rows), dim, machine)


class _Widget:
    """A box of controls with an answer below, which stays in the saved notebook."""

    def __init__(self, box: Any) -> None:
        self.box = box
        self.result: Any = None
        self.answer = ""
        self._handle: Any = None
        self.error = ipywidgets.HTML()

    def _ipython_display_(self, **_: Any) -> None:
        from IPython.display import HTML, display

        display(self.box)
        self._handle = display(HTML(self.answer or "<div></div>"), display_id=True)

    def _show(self, html: str) -> None:
        from IPython.display import HTML

        self.answer = html
        if self._handle is not None:
            self._handle.update(HTML(html or "<div></div>"))

    def _say(self, message: str) -> None:
        """Show an error as a sentence; an empty one takes it away."""
        self.error.value = (
            f'<p role="alert" style="line-height:1.4;margin:4px 0;padding:6px 10px;'
            f'border-left:4px solid #c03"><b>That did not work.</b> {escape(message)}</p>'
            if message
            else ""
        )


class IOCheckWidget(_Widget):
    """Directory, table, batch and access pattern; Run and Stop; picture, table and sentence."""

    def __init__(self, directory: str, rows: str, dim: int, threaded: bool | None = None) -> None:
        self.directory = _text("Directory", directory, _WIDE)
        self.rows = _text("Rows", rows)
        self.dim = _text("Dim", str(dim))
        self.batch = _text("Ids in a step", "65,536")
        self.access = ipywidgets.Dropdown(
            options=_ACCESS, value="uniform", description="Rows asked for", style=_LABEL,
            layout={"width": _WIDE},
        )  # fmt: skip
        self.seconds = ipywidgets.IntSlider(
            value=10, min=10, max=60, description="Seconds", style=_LABEL, layout={"width": _WIDE}
        )
        self.run = ipywidgets.Button(
            description="Run", icon="play", button_style="primary", tooltip="Start the I/O check"
        )
        self.stop = ipywidgets.Button(
            description="Stop", icon="stop", disabled=True, tooltip="End it and keep what is there"
        )
        self.progress = ipywidgets.FloatProgress(min=0.0, max=1.0, layout={"width": "300px"})
        self.message = ipywidgets.HTML("Writes a test file there, measures, and removes it.")
        super().__init__(None)
        self.box = ipywidgets.VBox(
            [
                self.directory,
                ipywidgets.HBox([self.rows, self.dim, self.batch], layout={"flex_flow": "wrap"}),
                self.access,
                self.seconds,
                ipywidgets.HBox([self.run, self.stop, self.progress]),
                self.message,
                self.error,
            ]
        )
        self.task = Task(self._progress, self._result, self._failed, self._running, threaded)
        self.run.on_click(self._clicked)
        self.stop.on_click(lambda _: self._stop())

    def _clicked(self, _: Any = None) -> None:
        if self.task.running:
            return
        try:
            arguments = {
                "directory": self.directory.value.strip() or ".",
                "rows": parse_count(self.rows.value, "rows"),
                "dim": parse_count(self.dim.value, "dim"),
                "batch": parse_count(self.batch.value, "ids in a step"),
                "seconds": self.seconds.value,
                "access": self.access.value,
            }
        except (ValueError, TypeError) as error:
            self._say(sentence(error))
            return

        def work(on_progress: OnProgress, should_stop: ShouldStop) -> Any:
            from lowmem.iocheck import iocheck

            return iocheck(**arguments, on_progress=on_progress, should_stop=should_stop)

        self.task.start(work)

    def _stop(self) -> None:
        self.task.stop()
        if self.task.running:
            self.message.value = "Stopping…"

    def _progress(self, fraction: float, message: str) -> None:
        self.progress.value = fraction
        self.message.value = f"{fraction:.0%}: {escape(message)}"

    def _running(self, running: bool) -> None:
        self.run.disabled, self.stop.disabled = running, not running
        if running:
            self._say("")
            self.progress.value = 0.0
            self.message.value = "Starting…"

    def _result(self, report: Any) -> None:
        self.result = report
        self.progress.value = 1.0
        self._show(report_html(report))
        stopped = getattr(report, "interrupted", False)
        self.message.value = "Stopped; this is what was measured." if stopped else "Done."

    def _failed(self, message: str) -> None:
        self.message.value = ""
        self._say(message)


def report_html(report: Any) -> str:
    """An ``IOReport`` as picture, table and sentence."""
    alt = getattr(report, "alt", None) or f"Bars of the rates of the disk. {report.advice}"
    return f"<div>{image_html(report.figure(), alt)}{report._repr_html_()}</div>"


class PlannerWidget(_Widget):
    """A table or a model and a machine; picture, table, sentence and code."""

    def __init__(self, rows: str, dim: int, machine: str) -> None:
        self.kind = ipywidgets.ToggleButtons(
            options=[("Embedding table", "table"), ("Dense model", "dense")],
            style={"button_width": "150px"},
        )  # fmt: skip
        self.rows = _text("Rows", rows)
        self.dim = _text("Dim", str(dim))
        self.batch = _text("Ids in a step", "65,536")
        self.parameters = _text("Parameters", "124M")
        self.share = _text("Share of v kept", "0.0012")
        self.dtype = _choice("Weights", [("float32", "float32"), ("bfloat16", "bfloat16"),
                                         ("float16", "float16")])  # fmt: skip
        self.weights = _choice(
            "Weights lie", [("in VRAM if they fit", "auto"), ("in RAM", "cpu"), ("in VRAM", "cuda")]
        )
        self.machine = _choice("Machine", _MACHINES, machine)
        self.ram, self.vram, self.disk = (
            _text(name, value)
            for name, value in (("RAM", "16GB"), ("VRAM", "0"), ("Free disk", "100GB"))
        )
        self.run = ipywidgets.Button(
            description="Plan", icon="calculator", button_style="primary", tooltip="What fits?"
        )
        super().__init__(None)
        wrap = {"flex_flow": "wrap"}
        self._table = ipywidgets.HBox([self.rows, self.dim, self.batch], layout=wrap)
        self._dense = ipywidgets.HBox([self.parameters, self.share], layout=wrap)
        self._own = ipywidgets.HBox([self.ram, self.vram, self.disk], layout=wrap)
        self.box = ipywidgets.VBox(
            [
                self.kind,
                self._table,
                self._dense,
                ipywidgets.HBox([self.dtype, self.weights], layout=wrap),
                self.machine,
                self._own,
                self.run,
                self.error,
            ]
        )
        self.run.on_click(lambda _: self.update())
        for control in (self.kind, self.dtype, self.weights, self.machine):
            control.observe(lambda _: self.update(), names="value")
        self.update()

    def update(self) -> None:
        """Plan with what the controls say."""
        self._arrange()
        try:
            self.result = self._plan()
        except (ValueError, TypeError, OSError) as error:
            self._say(sentence(error))
            return
        self._say("")
        self._show(plan_answer(self.result))

    def _arrange(self) -> None:
        dense = self.kind.value == "dense"
        self._table.layout.display = "none" if dense else "flex"
        self._dense.layout.display = "flex" if dense else "none"
        self._own.layout.display = "flex" if self.machine.value == _OWN else "none"

    def _plan(self) -> Plan:
        machine: str | Machine = self.machine.value
        if machine == _OWN:
            machine = Machine(
                "your machine",
                parse_bytes(self.ram.value, "RAM"),
                parse_bytes(self.vram.value, "VRAM"),
                parse_bytes(self.disk.value, "free disk"),
            )
        if self.kind.value == "dense":
            try:
                share = float(self.share.value)
            except ValueError:
                raise ValueError(
                    f"share of v kept is {self.share.value!r}; write a number from 0 to 1"
                ) from None
            return plan(
                machine=machine, parameters=self.parameters.value, share=share,
                dtype=self.dtype.value, weights=self.weights.value,
            )  # fmt: skip
        return plan(
            self.rows.value, self.dim.value, machine, batch=self.batch.value,
            dtype=self.dtype.value, weights=self.weights.value,
        )  # fmt: skip


def plan_answer(result: Plan) -> str:
    """A ``Plan`` as picture, table, sentence and code."""
    return (
        f"<div>{image_html(result.figure(), result.alt)}{result._repr_html_()}"
        "<details open style='margin:8px 10px'><summary>The code</summary>"
        f"<pre style='margin:6px 0'>{escape(result.code)}</pre></details></div>"
    )


def _text(description: str, value: str, width: str = "250px") -> Any:
    return ipywidgets.Text(
        value=value, description=description, style=_LABEL, layout={"width": width}
    )


def _choice(description: str, options: list[tuple[str, str]], value: str | None = None) -> Any:
    values = [option[1] for option in options]
    if value is not None and value not in values:
        raise ValueError(f"{description.lower()} is {value!r}; it is one of {', '.join(values)}")
    return ipywidgets.Dropdown(
        options=options, value=value or values[0], description=description, style=_LABEL,
        layout={"width": "330px"},
    )  # fmt: skip
