"""Small still pictures for notebooks: bars, curves and maps, with words for those who do not see.

Each call gives a ``Picture``; write it as the last line of a cell, or ``save`` it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lowmem.ui.image import figure_png, image_html
from lowmem.ui.panels import COLORS, FAINT, INK, STYLES, short_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


@dataclass(frozen=True, repr=False)
class Picture:
    """A matplotlib figure and what it shows in words."""

    figure: Figure
    alt: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as PNG."""
        with open(path, "wb") as file:
            file.write(figure_png(self.figure))

    def _repr_html_(self) -> str:
        return image_html(self.figure, self.alt)

    def __repr__(self) -> str:
        return self.alt


def new_figure(height: float, columns: int = 1, width: float = 10.0) -> tuple[Figure, list[Any]]:
    """A white figure and its axes, plain on top and right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for ax in axes:
        plain(ax)
    return figure, axes


def plain(ax: Any) -> None:
    """The look that all pictures share."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(labelsize=9, color=FAINT, labelcolor=INK)


def bars(
    title: str,
    panels: Mapping[str, Mapping[str, float | Sequence[float]]],
    *,
    unit: str = "",
    log: bool = False,
    line: Mapping[str, float] | None = None,
) -> Picture:
    """Horizontal bars, one panel an entry of ``panels``, one bar an entry of a panel.

    Args:
        title: above all.
        panels: heading to (label to value); several values become their mean, their range
            and a dot each.
        unit: behind the numbers; ``"bytes"`` for GB.
        log: a logarithmic axis.
        line: label to value: a dashed line across every panel, such as a limit.
    """
    if not panels or not all(panels.values()):
        raise ValueError(f"panels is {panels!r:.80}; give heading to (label to value)")
    tallest = max(len(panel) for panel in panels.values())
    figure, axes = new_figure(1.0 + 0.42 * tallest, len(panels))
    said = []
    for ax, (heading, panel) in zip(axes, panels.items(), strict=True):
        words = []
        ends = []
        for place, (label, given) in enumerate(panel.items()):
            values = np.atleast_1d(np.asarray(given, dtype=np.float64))
            mean = float(values.mean())
            ax.barh(place, mean, height=0.66, color=COLORS[place % len(COLORS)],
                    hatch=_HATCHES[place % len(_HATCHES)], edgecolor="white")  # fmt: skip
            text = short_number(mean, unit)
            if len(values) > 1:
                ax.plot([values.min(), values.max()], [place, place], color=INK, linewidth=1.2)
                ax.plot(values, [place] * len(values), "o", color=INK, markersize=4)
                low, high = (short_number(float(v), unit) for v in (values.min(), values.max()))
                text += f"  ({low} to {high})"
            ends += [float(values.min()), float(values.max())]
            ax.annotate(text, (max(ends[-1], 0.0), place), (5, 0), textcoords="offset points",
                        va="center", fontsize=9, color=INK)  # fmt: skip
            words.append(f"{label} {text}")
        for name, value in (line or {}).items():
            ax.axvline(value, color=INK, linestyle=(0, (4, 3)), linewidth=1.3)
            ax.annotate(name, (value, 1), (3, 2), xycoords=("data", "axes fraction"),
                        textcoords="offset points", fontsize=8, color=INK)  # fmt: skip
            words.append(f"{name} at {short_number(value, unit)}")
        ax.set_yticks(range(len(panel)), list(panel))
        ax.tick_params(axis="y", length=0)
        ax.invert_yaxis()
        _horizontal_limits(ax, [*ends, *(line or {}).values()], log)
        ax.xaxis.set_major_formatter(lambda value, _: short_number(value, unit))
        if log:
            ax.xaxis.set_minor_formatter(lambda *_: "")
        else:
            ax.locator_params(axis="x", nbins=4)
        ax.set_title(heading, loc="left", fontsize=10, color=INK, pad=14 if line else 6)
        said.append(f"{heading}: {', '.join(words)}" if heading else ", ".join(words))
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    return Picture(figure, f"{title}. {'. '.join(said)}.")


def _horizontal_limits(ax: Any, ends: Sequence[float], log: bool) -> None:
    """Room for the figures to the right of the bars; below zero where a bar is."""
    finite = [end for end in ends if np.isfinite(end)]
    good = [end for end in finite if end > 0] or [1.0]
    if log:
        low, high = min(good) / 3, max(good)
        ax.set_xscale("log")
        ax.set_xlim(low, high * (high / low) ** 0.45)
    else:
        ax.set_xlim(min([0.0, *finite]) * 1.1, max(good) * 1.45)


def curves(
    title: str,
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    logx: bool = False,
    logy: bool = False,
    cutoff: float | None = None,
    from_zero: bool = False,
) -> Picture:
    """Lines with a legend; ``lines`` is label to (x, y); ``from_zero`` starts the y axis at 0."""
    if not lines:
        raise ValueError("lines is empty; give label to (x, y)")
    figure, (ax,) = new_figure(3.6)
    words = []
    for number, (label, (x, y)) in enumerate(lines.items()):
        xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
        if xs.shape != ys.shape or xs.ndim != 1 or not len(xs):
            raise ValueError(f"{label}: x and y have the shapes {xs.shape} and {ys.shape}")
        ax.plot(xs, ys, STYLES[number % len(STYLES)], color=COLORS[number % len(COLORS)],
                linewidth=2, label=label)  # fmt: skip
        words.append(
            f"{label} from {short_number(float(ys[0]))} at {short_number(float(xs[0]))} "
            f"to {short_number(float(ys[-1]))} at {short_number(float(xs[-1]))}"
        )
    if logx:
        ax.set_xscale("log")
    if logy:
        ax.set_yscale("log")
    if from_zero:
        ax.set_ylim(bottom=0)
    if cutoff is not None:
        ax.axhline(cutoff, color=INK, linestyle=(0, (4, 3)), linewidth=1.2)
        words.append(f"a dashed line at {short_number(cutoff)}")
    for axis, log in ((ax.xaxis, logx), (ax.yaxis, logy)):
        axis.set_major_formatter(lambda value, _: short_number(value))
        if log:
            axis.set_minor_formatter(lambda *_: "")
    ax.set_xlabel(xlabel, fontsize=9, color=INK)
    ax.set_ylabel(ylabel, fontsize=9, color=INK)
    ax.grid(color="#dddddd", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, fontsize=9)
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold")
    return Picture(figure, f"{title}; {ylabel} over {xlabel}: {'; '.join(words)}.")
