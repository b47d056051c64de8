"""What a run of the demo found, as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowmem.demo.graph import Graph
from lowmem.demo.kge import KGE
from lowmem.demo.train import History
from lowmem.units import short_bytes

# Asked first for their neighbours, where the graph has them: names that most readers know.
_KNOWN = (
    "json.dumps",
    "os.path.join",
    "numpy.zeros",
    "torch.nn.Linear",
    "ValueError",
    "axis=",
    ".append",
    "typing.Any",
    "threading.Lock",
)


def interesting(graph: Graph, count: int = 4) -> list[int]:
    """Entities to show neighbours of: well-known names first, then the most connected."""
    degrees = graph.degrees()
    found = [graph.entities.find(name) for name in _KNOWN]
    chosen = [number for number in found if number is not None and degrees[number] >= 20]
    for number in np.argsort(-degrees, kind="stable")[:count]:
        if int(number) not in chosen:
            chosen.append(int(number))
    return chosen[:count]


@torch.no_grad()
def nearest(
    model: KGE, row_of: Tensor, entity: int, candidates: np.ndarray, count: int = 5
) -> list[tuple[int, float]]:
    """The entities nearest to one by cosine, and the cosines, best first.

    Args:
        candidates: entity numbers that may be neighbours; the entity itself is passed over.
    """
    device = model.entity.weight.device
    others = torch.from_numpy(candidates[candidates != entity].astype(np.int64))
    if not len(others):
        return []
    own = model.entity(row_of[entity].to(device))
    best: list[tuple[float, int]] = []
    for part in others.split(1 << 16):
        rows = model.entity(row_of[part].to(device))
        cosines = torch.cosine_similarity(rows, own[None], dim=-1)
        top = cosines.topk(min(count, len(part)))
        best += zip(top.values.tolist(), part[top.indices.cpu()].tolist(), strict=True)
    best.sort(reverse=True)
    return [(number, cosine) for cosine, number in best[:count]]


def memory_table(
    rows: int, dim: int, used: dict[str, int], device: str, peak: dict[str, int]
) -> str:
    """Measured bytes of this run beside what the two common ways would have needed.

    Args:
        rows, dim: of the table; its float32 weights take rows * dim * 4.
        used: the optimizer's bytes, as ``DSA.state_bytes()`` measured them.
        device: where the weights are.
        peak: the process's highest ``ram``, ``mapped`` and ``vram`` while it trained.
    """
    weights = rows * dim * 4
    place = "VRAM" if device == "cuda" else "RAM"
    lines = [
        f"The table: {rows:,} x {dim} float32 weights, {short_bytes(weights)} of {place}.",
        "",
        f"  {'':<34}{'VRAM':>10}{'RAM':>12}{'disk':>12}",
        f"  {'DSA, optimizer state, measured':<34}"
        + f"{short_bytes(used['vram']):>10}{short_bytes(used['ram']):>12}"
        + f"{short_bytes(used['disk']):>12}",
        f"  {'whole process at its peak':<34}"
        + f"{short_bytes(peak['vram']):>10}{short_bytes(peak['ram']):>12}{'':>12}",
    ]
    for name, moments, gradient in (
        ("SparseAdam would need, in all", 2 * weights, 0),
        ("dense Adam would need, in all", 2 * weights, weights),
    ):
        total = short_bytes(weights + moments + gradient)
        vram, ram = (total, "") if device == "cuda" else ("", total)
        lines.append(f"  {name:<34}{vram:>10}{ram:>12}{'':>12}")
    lines += [
        "",
        "  SparseAdam: weights and two moments. Dense Adam: and a gradient as large as the table.",
        f"  The page cache held up to {short_bytes(peak['mapped'])} of the store for us: memory "
        "that the system takes back when needed.",
    ]
    return "\n".join(lines)


def draw(history: History, path: Path, title: str = "", triples: int = 0) -> None:
    """Write a PNG: loss over time above, rows per second below.

    Args:
        triples: how many a pass over the training set has; each further pass is marked.

    Raises:
        OSError: it cannot be written.
    """
    # Not pyplot: it keeps global state that a notebook's other threads can break.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    seconds = np.array([step.seconds for step in history.steps])
    loss = np.array([step.loss for step in history.steps])
    figure = Figure(figsize=(8, 5.4), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(seconds, loss, color="0.75", linewidth=0.8, label="each step")
    window = max(1, min(50, len(loss) // 10))
    if len(loss) >= window > 1:
        upper.plot(
            np.convolve(seconds, np.ones(window) / window, "valid"),
            np.convolve(loss, np.ones(window) / window, "valid"),
            color="tab:blue",
            linewidth=2,
            label=f"mean of {window} steps",
        )
    passed = np.cumsum([step.triples for step in history.steps]) // max(triples, 1)
    turns = np.flatnonzero(np.diff(passed)) if triples else np.empty(0, np.int64)
    for number, start in enumerate(seconds[turns][:20]):
        label = "another pass over the triples" if number == 0 else None
        upper.axvline(start, color="0.4", linewidth=0.8, linestyle=":", label=label)
    upper.set_ylabel("loss (nats)")
    upper.legend(frameon=False)
    upper.set_title(title, fontsize=11, loc="left")
    if len(seconds):
        edges = np.linspace(
            0, seconds[-1], min(60, 1 + len(seconds) // 8) + 1
        )  # 8 steps each or more
        rows = np.array([step.rows for step in history.steps], float)
        spent = np.array([step.optimizer_seconds for step in history.steps])
        total = np.histogram(seconds, edges, weights=rows)[0]
        busy = np.histogram(seconds, edges, weights=spent)[0]
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = np.where(total > 0, total / np.diff(edges), np.nan)
            alone = np.where(total > 0, total / busy, np.nan)
        for rate, color, style, label in (
            (alone, "tab:orange", "--", "opt.step() alone"),
            (whole, "tab:blue", "-", "whole training step"),
        ):
            lower.stairs(
                rate, edges, baseline=None, color=color, linestyle=style, linewidth=2, label=label
            )
        lower.set_yscale("log")
        lower.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        lower.yaxis.set_major_formatter(EngFormatter(sep=""))
        lower.yaxis.set_minor_formatter(NullFormatter())
        lower.legend(frameon=False)
    lower.set_ylabel("rows updated per second")
    lower.set_xlabel("seconds of training")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def neighbour_lines(
    model: KGE, row_of: Tensor, graph: Graph, entities: Sequence[int], least_degree: int
) -> list[str]:
    """One line a name: its nearest neighbours among entities with at least so many triples."""
    candidates = np.flatnonzero(graph.degrees() >= least_degree)
    lines = []
    for entity in entities:
        near = nearest(model, row_of, entity, candidates)
        shown = ", ".join(f"{graph.entities[other]} {cosine:.2f}" for other, cosine in near)
        lines.append(f"  {graph.entities[entity]}: {shown or '(no other)'}")
    return lines
