"""SNR as pictures: by type of layer, over depth and over steps, with the cutoff."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowmem.slim.records import PartKey, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Axes = tuple[int, ...]

_MARKERS = "os^Dv<>Pph*X"
_CEILING = 1e6  # infinite SNR is drawn here


def layer_and_depth(key: str) -> tuple[str, int | None]:
    """The type of a layer, in words of its own name, and its number in the stack.

    >>> layer_and_depth("transformer.h.3.attn.q_proj.weight")
    ('attn.q_proj', 3)
    """
    part = PartKey.parse(key)
    name = part.name if part else key
    pieces = name.split(".")
    numbers = [i for i, piece in enumerate(pieces) if piece.isdigit()]
    depth = int(pieces[numbers[0]]) if numbers else None
    kept = pieces[numbers[0] + 1 :] if numbers else pieces[-2:]
    kept = [piece for piece in kept if piece != "weight"] or pieces[-1:]
    kind = ".".join("#" if piece.isdigit() else piece for piece in kept)
    if part:
        kind = f"{kind} {part.label}"
    return re.sub(r"\.+", ".", kind), depth


def draw_snr(records: Sequence[Record], cutoff: float = 1.0) -> Figure:
    """SNR of weights of two dimensions and more: one line a type of layer.

    Upper row: the mean over steps, over the layer's number ("none": outside the stack).
    Lower row: the mean over depth, over steps. One column for each set of axes; where there
    are more than three sets, those that come most often. Infinite SNR is drawn at 1e6.
    """
    from matplotlib.figure import Figure

    shown = [r for r in records if len(r.shape) >= 2 and not r.unknown and not math.isnan(r.snr)]
    counts: dict[Axes, int] = defaultdict(int)
    for record in shown:
        counts[record.compress_dims] += 1
    sets = sorted(counts, key=lambda axes: (-counts[axes], len(axes), axes))[:3]
    kinds = list(dict.fromkeys(layer_and_depth(record.key)[0] for record in shown))

    columns = max(1, len(sets))
    figure = Figure(figsize=(4.2 * columns + 2.2, 7), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False, sharey=True)
    for column, axes in enumerate(sets):
        here = [r for r in shown if r.compress_dims == axes]
        depths, steps = panels[:, column]
        for number, kind in enumerate(kinds):
            by_depth: dict[int, list[float]] = defaultdict(list)
            by_step: dict[int, list[float]] = defaultdict(list)
            for record in here:
                found, depth = layer_and_depth(record.key)
                if found == kind:
                    value = min(record.snr, _CEILING)
                    by_depth[-1 if depth is None else depth].append(value)
                    by_step[record.step].append(value)
            style = {
                "color": f"C{number % 10}",
                "marker": _MARKERS[number % len(_MARKERS)],
                "markersize": 4,
                "linewidth": 1.2,
            }
            for axis, series in ((depths, by_depth), (steps, by_step)):
                xs = sorted(series)
                axis.plot(xs, [math.fsum(series[x]) / len(series[x]) for x in xs], **style)
        for axis in (depths, steps):
            axis.set_yscale("log")
            axis.axhline(cutoff, color="black", linestyle="--", linewidth=1)
            axis.annotate(
                f"cutoff {cutoff:g}",
                (1, cutoff),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        averaged = ", ".join(map(str, axes))
        depths.set_title(f"averaged over {'axis' if len(axes) == 1 else 'axes'} {averaged}")
        depths.set_xlabel("layer")
        depths.xaxis.get_major_locator().set_params(integer=True)
        depths.xaxis.set_major_formatter(lambda x, _: "none" if x == -1 else f"{x:g}")
        steps.set_xlabel("step")
    panels[0, 0].set_ylabel("SNR, mean over steps")
    panels[1, 0].set_ylabel("SNR, mean over layers")
    handles = [
        panels[0, 0].plot([], [], color=f"C{i % 10}", marker=_MARKERS[i % len(_MARKERS)])[0]
        for i in range(len(kinds))
    ]
    if handles:
        labels = [kind.replace("$", r"\$") for kind in kinds]  # no formulas
        figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    return figure
