"""The picture of a report. Drawn with ``Figure`` alone, so that threads and notebooks are safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .report import IOReport

_READ, _WRITE, _STEP = "#2b6cb0", "#dd8b2e", "#3f7d5c"


def draw(report: IOReport) -> Figure:
    """Three panels: sequential rates, random rates, and rows per second."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.35])
    _rates(axes[0], report, "sequential", "Sequential, 1 MiB blocks", "MB/s")
    _rates(axes[1], report, "random", "Random, 4 KiB blocks", "thousand IOPS")
    _steps(axes[2], report)
    honest = "" if report.method == "direct" else f"  ({report.method})"
    stopped = "  (stopped early)" if report.interrupted else ""
    figure.suptitle(
        f"{report.rows:,} × {report.dim}, batches of {report.batch:,}, {report.access} access"
        f"{honest}{stopped}",
        fontsize=10,
    )
    return figure


def _rates(axes: Axes, report: IOReport, pattern: str, title: str, unit: str) -> None:
    for side, (kind, color, hatch) in enumerate((("read", _READ, ""), ("write", _WRITE, "//"))):
        heights = []
        for depth in (1, 32):
            rate = report.rates.get(f"{pattern}_{kind}_qd{depth}")
            value = 0.0
            if rate:
                value = rate.bytes_per_s / 1e6 if pattern == "sequential" else rate.iops / 1e3
            heights.append(value)
        places = [place + 0.4 * side for place in (0, 1)]
        bars = axes.bar(
            places, heights, 0.38, color=color, hatch=hatch, edgecolor="white", label=kind
        )
        labels = [_figure(height) for height in heights]
        axes.bar_label(bars, labels, fontsize=8, padding=2)
    axes.set_xticks([0.2, 1.2], ["depth 1", "deep"])
    axes.set_title(title, fontsize=9)
    axes.set_ylabel(unit, fontsize=8)
    axes.margins(y=0.25)
    axes.legend(fontsize=8, loc="upper left", frameon=False, ncols=2)
    _plain(axes)


def _steps(axes: Axes, report: IOReport) -> None:
    future, ram = report.prediction, report.sparse_adam
    bars: list[tuple[str, float, str]] = []
    if future:
        bars.append(("DSA, all in memory", future.rows_per_s_hot, ""))
        share = f"{100 * future.hit_share:.0f} % in memory"
        if future.rows_per_s is not None:
            bars.append((f"DSA, expected\n({share})", future.rows_per_s, "//"))
        if future.rows_per_s_cold is not None:
            bars.append(("DSA, nothing in memory\n(reads only)", future.rows_per_s_cold, ""))
    if ram:
        bars.append(("SparseAdam in RAM", ram.rows_per_s, ".."))
    axes.set_title("Rows per second for your table", fontsize=9)
    if not bars:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    names = [name for name, _, _ in bars][::-1]
    values = [value for _, value, _ in bars][::-1]
    drawn = axes.barh(names, values, color=_STEP, edgecolor="white")
    for bar, (_, _, hatch) in zip(drawn, bars[::-1], strict=True):
        bar.set_hatch(hatch)
    axes.bar_label(drawn, [_short(value) for value in values], fontsize=8, padding=3)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 6)
    axes.set_xlabel("logarithmic", fontsize=8)
    _plain(axes)


def _figure(height: float) -> str:
    if not height:
        return "–"
    return f"{height:,.0f}" if height >= 10 else f"{height:.1f}"


def _short(value: float) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value / 1e3:,.0f} k"


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
