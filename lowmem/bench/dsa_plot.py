"""The picture of ``lowmem bench dsa``: rates by batch size, the first steps, and the cold bars."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lowmem.bench.report import Result

_STYLE = {
    "DSA": ("#1f6feb", "o", "-"),
    "SparseAdam, RAM": ("#d1242f", "s", "--"),
    "dense Adam, RAM": ("#8250df", "^", ":"),
    "memmap": ("#9a6700", "v", "-."),
    "memmap, MADV_RANDOM": ("#57606a", "D", ":"),
    "DSA, no journal": ("#57606a", "D", ":"),
    "DSA, journal": ("#1f6feb", "o", "-"),
    "DSA, journal and syncs": ("#d1242f", "s", "--"),
}
Rows = list[dict[str, Any]]


def figure(result: Result) -> Figure:
    """One panel for each regime and kind of ids that the result has."""
    from matplotlib.figure import Figure

    panels = _panels(result.rows)
    columns = min(2, len(panels)) or 1
    lines = -(-len(panels) // columns) or 1
    picture = Figure(figsize=(6.2 * columns, 3.3 * lines + 0.5), layout="constrained")
    axes = picture.subplots(lines, columns, squeeze=False).ravel()
    for axis, (title, kind, rows) in zip(axes, panels, strict=False):
        axis.set_title(textwrap.fill(title, 64), loc="left", fontsize=9)
        {"lines": _by_batch, "stretches": _stretches, "bars": _bars}[kind](axis, rows)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    width = round(17 * picture.get_figwidth())
    picture.supxlabel(textwrap.fill(result.caption(), width), fontsize=7)
    return picture


def _panels(rows: Rows) -> list[tuple[str, str, Rows]]:
    panels: list[tuple[str, str, Rows]] = []
    groups: dict[tuple[str, str], Rows] = {}
    for row in rows:
        if row["regime"] in ("memory", "first-step", "commit"):
            continue
        key = str(row["workload"])
        if row["regime"] == "hot":
            key = re.sub(r", batch [\d,]+$", "", key)
        groups.setdefault((str(row["regime"]), key), []).append(row)
    for (regime, title), members in groups.items():
        if regime in ("fresh", "durability"):
            kind = "stretches"
        elif regime == "hot" and len({row["batch"] for row in members}) > 1:
            kind = "lines"
        else:
            kind = "bars"
            if regime == "hot":
                title = str(members[0]["workload"])
        panels.append((_short(title), kind, members))
    return panels


def _short(title: str) -> str:
    return (
        title.replace(" (forward, backward, step; pairs of ids)", "")
        .replace(" ids", "")
        .replace(", cache dropped before each step", ", cache dropped")
    )


def _by_batch(axis: Axes, rows: Rows) -> None:
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = sorted((row for row in rows if row["contender"] == name), key=lambda r: r["batch"])
        color, marker, dashes = _STYLE.get(name, ("#57606a", "o", "-"))
        axis.plot(
            [row["batch"] for row in mine],
            [row["rows_per_s"] for row in mine],
            color=color,
            marker=marker,
            linestyle=dashes,
            label=name,
        )
    axis.set_xscale("log", base=2)
    _log(axis, rates=True)
    ticks = sorted({row["batch"] for row in rows})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.xaxis.minorticks_off()
    axis.set_xlabel("ids a step")
    axis.set_ylabel("rows a second")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _stretches(axis: Axes, rows: Rows) -> None:
    for row in rows:
        color, marker, dashes = _STYLE.get(row["contender"], ("#57606a", "o", "-"))
        times = row["stretch_s"]
        axis.plot(
            [100 * (at + 0.5) / len(times) for at in range(len(times))],
            [1000 * len(times) * second / row["steps_a_run"] for second in times],
            color=color,
            marker=marker,
            linestyle=dashes,
            label=row["contender"],
        )
    _log(axis, rates=False)
    fresh = rows[0]["regime"] == "fresh"
    axis.set_xlabel(f"% of the steps{' (written back to the disk at 50 %)' if fresh else ''}")
    axis.set_ylabel("milliseconds a step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


def _log(axis: Axes, *, rates: bool) -> None:
    """A logarithmic scale with 1, 2 and 5 of every decade as plain figures."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain = StrMethodFormatter("{x:g}")
    axis.yaxis.set_major_formatter(EngFormatter(sep="") if rates else plain)
    axis.yaxis.set_minor_formatter(NullFormatter())


def _bars(axis: Axes, rows: Rows) -> None:
    from matplotlib.ticker import EngFormatter

    from lowmem.bench.units import format_value

    key = "samples_per_s" if "samples_per_s" in rows[0] else "rows_per_s"
    values = [row[key] for row in rows]
    colors = ["#1f6feb" if str(row["contender"]).startswith("DSA") else "#b0b7c0" for row in rows]
    bars = axis.barh(range(len(rows)), values, color=colors)
    axis.bar_label(bars, [" " + format_value(value, "rows/s") for value in values], fontsize=8)
    axis.set_yticks(range(len(rows)), [row["contender"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_xlabel("samples a second" if key == "samples_per_s" else "rows a second")
