"""Panels: how recorded numbers are drawn. A panel draws on an axes and says itself in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lowmem.ui.recorder import Recorder

# Colours that stay apart for colour-blind eyes, each with a line style of its own.
COLORS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#997700", "#555555")
STYLES = ("-", "--", "-.", ":")
INK, FAINT = "#222222", "#888888"
_POINTS = 1500
_COLUMNS = 300


class Panel(Protocol):
    """Anything with a title that draws a recorder on a matplotlib axes and words it."""

    @property
    def title(self) -> str: ...

    def draw(self, ax: Any, recorder: Recorder) -> None: ...

    def words(self, recorder: Recorder) -> str: ...


@dataclass(frozen=True)
class Lines:
    """Lines over steps.

    Attributes:
        title: the panel's heading.
        names: what to draw: one recorded name or several.
        unit: ``"bytes"`` for GB on the axis, else what stands behind the number.
        log: a logarithmic axis.
        cutoff: a value to draw as a dashed line.
        smooth: draw the running mean of noisy lines, and the values themselves faintly.
    """

    title: str
    names: str | Sequence[str]
    unit: str = ""
    log: bool = False
    cutoff: float | None = None
    smooth: bool = False

    def _lines(self, recorder: Recorder) -> list[tuple[str, NDArray[Any], NDArray[Any]]]:
        names = [self.names] if isinstance(self.names, str) else list(self.names)
        out = []
        for name in names:
            for label in recorder.labels(name):
                steps, values = recorder.series(name, label)
                values = np.where(np.isfinite(values), values, np.nan)
                if self.log:
                    values = np.where(values > 0, values, np.nan)
                out.append((label or name, steps, values))
        return out

    def draw(self, ax: Any, recorder: Recorder) -> None:
        lines = self._lines(recorder)
        _frame(ax, self.title)
        if self.log:
            ax.set_yscale("log")
        ends = []
        for number, (label, steps, values) in enumerate(lines):
            color = COLORS[number % len(COLORS)]
            style = STYLES[number // len(COLORS) % len(STYLES)] if len(lines) > 7 else "-"
            style = STYLES[number % len(STYLES)] if 1 < len(lines) <= 7 else style
            shown = values
            if self.smooth and len(values) > 20:
                ax.plot(*_thin(steps, values), color=color, linewidth=0.8, alpha=0.3)
                shown = running_mean(values, max(5, len(values) // 40))
            x, y = _thin(steps, shown)
            ax.plot(x, y, style, color=color, linewidth=2.0, solid_capstyle="round", label=label)
            finite = np.flatnonzero(np.isfinite(shown))
            if len(finite):
                at = finite[-1]
                ends.append(_End(float(steps[at]), float(shown[at]), label, color))
        if self.cutoff is not None:
            ax.axhline(self.cutoff, color=INK, linestyle=(0, (4, 3)), linewidth=1.2)
            ax.annotate(f"cutoff {self.cutoff:g}", (0.01, self.cutoff), (0, 3),
                        xycoords=("axes fraction", "data"), textcoords="offset points",
                        fontsize=8, color=INK, zorder=6,
                        bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.6,
                              "edgecolor": "none"})  # fmt: skip
        unit = self.unit if self.unit == "bytes" else ""
        ax.yaxis.set_major_formatter(lambda value, _: short_number(value, unit))
        if self.log:
            _log_ticks(ax)
        ax.margins(x=0.02)
        for end in ends:
            ax.plot(end.step, end.value, "o", color=end.color, markersize=4)
        if len(lines) == 1 and ends:
            text = short_number(ends[0].value, self.unit)
            ax.set_title(text, loc="right", fontsize=10, color=ends[0].color, fontweight="bold")
        elif len(lines) > 1:
            _label_ends(ax, ends, unit)

    def words(self, recorder: Recorder) -> str:
        parts = []
        for label, steps, values in self._lines(recorder):
            finite = np.flatnonzero(np.isfinite(values))
            if len(finite):
                first, last = finite[0], finite[-1]
                parts.append(
                    f"{label} from {short_number(values[first], self.unit)} at step "
                    f"{steps[first]:g} to {short_number(values[last], self.unit)} at step "
                    f"{steps[last]:g}"
                )
        line = f", cutoff {self.cutoff:g}" if self.cutoff is not None else ""
        return f"{self.title}: {'; '.join(parts) or 'nothing yet'}{line}"


def _log_ticks(ax: Any) -> None:
    """1, 2, 5, 10 where there are few decades, so that there is more than one figure to read."""
    from matplotlib.ticker import LogLocator

    low, high = ax.get_ylim()
    if 0 < low < high < 1000 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_minor_formatter(lambda *_: "")


@dataclass(frozen=True)
class _End:
    """Where a line ends, and what stands beside it."""

    step: float
    value: float
    label: str
    color: str


def _label_ends(ax: Any, ends: list[_End], unit: str) -> None:
    """Name every line where it ends, moved apart where ends are close."""
    ax.autoscale_view()
    to_axes = ax.transScale + ax.transLimits
    order = sorted(ends, key=lambda end: end.value)
    heights = [float(to_axes.transform((end.step, end.value))[1]) for end in order]
    for end, height in zip(order, spread(heights, 0.09), strict=True):
        text = f"{end.label}  {short_number(end.value, unit)}"
        ax.text(1.02, height, text, transform=ax.transAxes, fontsize=8.5, va="center",
                color=end.color, fontweight="bold")  # fmt: skip


def spread(heights: list[float], gap: float) -> list[float]:
    """Sorted heights moved apart to at least ``gap``, as little as that needs, around 0 to 1."""
    if not heights:
        return []
    gap = min(gap, 1.0 / max(1, len(heights) - 1))
    out = list(heights)
    for i in range(1, len(out)):
        out[i] = max(out[i], out[i - 1] + gap)
    out[-1] = min(out[-1], max(1.0, heights[-1]))
    for i in range(len(out) - 2, -1, -1):
        out[i] = min(out[i], out[i + 1] - gap)
    return out


@dataclass(frozen=True)
class HeatMap:
    """One recorded name with labels as a map: labels from top to bottom, steps to the right.

    Attributes:
        title: the panel's heading.
        name: the recorded name; its labels become the rows, first recorded on top.
        cutoff: a contour is drawn where values cross it, and colours meet in white there.
        ylabel: what the rows are.
    """

    title: str
    name: str
    cutoff: float = 1.0
    ylabel: str = "layer"

    def draw(self, ax: Any, recorder: Recorder) -> None:
        from matplotlib.colors import LogNorm

        _frame(ax, self.title, grid=False)
        steps, labels, matrix = recorder.grid(self.name)
        if not len(steps):
            return
        stride = max(1, math.ceil(len(steps) / _COLUMNS))
        steps, matrix = steps[::-1][::stride][::-1], matrix[:, ::-1][:, ::stride][:, ::-1]
        matrix = np.where(np.isfinite(matrix) & (matrix > 0), matrix, np.nan)
        # As far above the cutoff as below, so that the middle colour is the cutoff.
        # Set by the bulk of the cells: a few far away would wash out all others.
        far = np.abs(np.log10(matrix[np.isfinite(matrix)] / self.cutoff))
        reach = min(max(0.3, float(np.percentile(far, 90))), 3.0) if far.size else 1.0
        norm = LogNorm(self.cutoff * 10**-reach, self.cutoff * 10**reach)
        edges = _edges(steps)
        rows = np.arange(len(labels) + 1) - 0.5
        mesh = ax.pcolormesh(edges, rows, matrix, cmap="RdBu", norm=norm)
        self._border(ax, edges, matrix)
        ax.invert_yaxis()
        every = max(1, math.ceil(len(labels) / 14))
        ax.set_yticks(range(0, len(labels), every), labels[::every], fontsize=8)
        ax.set_ylabel(self.ylabel, fontsize=9)
        bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, fraction=0.05, extend="both")
        bar.ax.axhline(self.cutoff, color=INK, linewidth=1.6)
        ticks = [self.cutoff * 10 ** (reach * part) for part in (-1, -0.5, 0, 0.5, 1)]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
        share = self._share(matrix)
        if share is not None:
            ax.set_title(f"{share:.0%} above {self.cutoff:g}", loc="right", fontsize=10,
                         fontweight="bold", color=COLORS[0])  # fmt: skip

    def _border(self, ax: Any, edges: NDArray[Any], matrix: NDArray[Any]) -> None:
        """A line between neighbouring cells that lie on different sides of the cutoff."""
        above = np.where(np.isnan(matrix), np.nan, (matrix > self.cutoff).astype(float))
        xs: list[float] = []
        ys: list[float] = []
        for row, column in zip(*np.nonzero(np.abs(np.diff(above, axis=0)) == 1), strict=True):
            xs += [edges[column], edges[column + 1], math.nan]
            ys += [row + 0.5, row + 0.5, math.nan]
        for row, column in zip(*np.nonzero(np.abs(np.diff(above, axis=1)) == 1), strict=True):
            xs += [edges[column + 1], edges[column + 1], math.nan]
            ys += [row - 0.5, row + 0.5, math.nan]
        ax.plot(xs, ys, color=INK, linewidth=1.4, solid_capstyle="projecting")

    def _share(self, matrix: NDArray[Any]) -> float | None:
        latest = matrix[:, -1]
        latest = latest[~np.isnan(latest)]
        return float((latest > self.cutoff).mean()) if len(latest) else None

    def words(self, recorder: Recorder) -> str:
        steps, labels, matrix = recorder.grid(self.name)
        if not len(steps):
            return f"{self.title}: nothing yet"
        latest = matrix[:, -1]
        above = [label for label, value in zip(labels, latest, strict=True) if value > self.cutoff]
        names = ", ".join(above[:6]) + (" and more" if len(above) > 6 else "")
        return (
            f"{self.title}: {len(labels)} rows over {len(steps)} measurements; at step "
            f"{steps[-1]:g} {len(above)} lie above {self.cutoff:g}" + (f" ({names})" * bool(above))
        )


def _frame(ax: Any, title: str, grid: bool = True) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    ax.set_xlabel("step", fontsize=9, color=FAINT)
    ax.xaxis.set_major_formatter(lambda value, _: short_number(value))
    ax.tick_params(labelsize=8, color=FAINT, labelcolor=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.locator_params(axis="x", nbins=6)
    if grid:
        ax.grid(axis="y", color="#dddddd", linewidth=0.8)
        ax.set_axisbelow(True)


def running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The mean of the last ``width`` values at each place; NaN is left out of it."""
    good = np.isfinite(values)
    sums = np.cumsum(np.where(good, values, 0.0))
    counts = np.cumsum(good)
    sums[width:] = sums[width:] - sums[:-width]
    counts[width:] = counts[width:] - counts[:-width]
    with np.errstate(invalid="ignore"):
        return np.where(good, sums / counts, np.nan)


def _thin(steps: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """At most about ``_POINTS`` points, the last one always among them."""
    stride = max(1, len(steps) // _POINTS)
    return steps[::-1][::stride][::-1], values[::-1][::stride][::-1]


def _edges(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])


def short_number(value: float, unit: str = "") -> str:
    """``1.25M rows/s``, ``0.034``, ``5.12 GB``: three digits and a unit."""
    if not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return f"{value:.3g} B"
    text = f"{value:.3g}"
    for name, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size * 0.9995 and abs(value) >= 1e4:
            text = f"{value / size:.3g}{name}"
            break
    else:
        if 1000 <= abs(value) < 1e4:
            text = f"{value:.0f}"
    return f"{text} {unit}".strip()
