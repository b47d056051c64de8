"""A plan as a picture: stacked bars, one a choice, the machine's limits as lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowmem.plan.costs import PARTS
from lowmem.plan.machine import RESOURCE_NAMES
from lowmem.units import short_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lowmem.plan.result import Plan

# Colours that stay apart for colour-blind eyes, and a hatch each for those who print in grey.
STYLE = {
    "weights": ("#4477aa", "", "weights"),
    "gradients": ("#ccbb44", "////", "gradients"),
    "moments": ("#ee6677", "xxx", "Adam's moments"),
    "working": ("#66ccee", "...", "working memory"),
    "runtime": ("#bbbbbb", "", "Python, torch, CUDA"),
}


def plan_figure(plan: Plan) -> Figure:
    """One panel a resource (VRAM, RAM, disk), one bar a choice, in gigabytes."""
    from matplotlib.figure import Figure

    resources = plan.resources
    height = 1.75 + 0.62 * len(plan.choices)
    figure = Figure(figsize=(10, height), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(resources), sharey=True, squeeze=False)[0]
    for ax, resource in zip(axes, resources, strict=True):
        _panel(ax, plan, resource)
    axes[0].set_yticks(range(len(plan.choices)), [c.name for c in plan.choices], fontsize=11)
    for label, choice in zip(axes[0].get_yticklabels(), plan.choices, strict=True):
        label.set_fontweight("bold" if choice is plan.recommended else "normal")
    axes[0].invert_yaxis()
    figure.suptitle(f"{plan.title}, on {plan.machine.label}", x=0.01, ha="left", fontsize=12)
    _legend(figure, plan)
    return figure


def _panel(ax: Any, plan: Plan, resource: str) -> None:
    limit = plan.machine.limit(resource)
    largest = max([limit, *(c.total(resource) for c in plan.choices)])
    for position, choice in enumerate(plan.choices):
        left = 0.0
        for part in PARTS:
            color, hatch, _ = STYLE[part]
            width = choice.bytes[resource][part]
            if width:
                ax.barh(position, width, left=left, height=0.62, color=color, hatch=hatch,
                        edgecolor="white", linewidth=0.8)  # fmt: skip
            left += width
        short = choice.missing.get(resource)
        label = short_bytes(left)
        if short:
            label += f"\n✗ {short_bytes(short)} short"
        ax.text(left + 0.02 * largest, position, label, va="center", fontsize=9,
                fontweight="bold" if short else "normal", color="#a01020" if short else "#222222",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})  # fmt: skip
    ax.axvline(limit, color="black", linestyle="--", linewidth=1.6, zorder=5)
    title = f"{RESOURCE_NAMES[resource]}: {short_bytes(limit)} free"
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlim(0, largest * 1.42)
    ax.xaxis.set_major_formatter(lambda value, _: _tick(value))
    ax.locator_params(axis="x", nbins=4)
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right"]].set_visible(False)


def _tick(value: float) -> str:
    number, _, unit = short_bytes(value).partition(" ")
    return f"{float(number):g} {unit}".strip()


def _legend(figure: Figure, plan: Plan) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    used = [p for p in PARTS if any(c.bytes[r][p] for c in plan.choices for r in plan.resources)]
    handles: list[Any] = [
        Patch(facecolor=STYLE[p][0], hatch=STYLE[p][1], edgecolor="white", label=STYLE[p][2])
        for p in used
    ]
    handles.append(Line2D([], [], color="black", linestyle="--", label="the machine's limit"))
    figure.legend(
        handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9
    )
