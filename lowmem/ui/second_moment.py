"""One second moment as a picture: the tensor, its means, and what each mean gets wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from lowmem.slim.snr import snr
from lowmem.ui.panels import short_number
from lowmem.ui.pictures import Picture

_SIDE = 192  # larger tensors are drawn from every n-th row and column


def second_moment_picture(v: Tensor, name: str = "v", cutoff: float = 1.0) -> Picture:
    """A heat map of ``v``, its row and column means, and the relative error of each.

    Args:
        v: a second moment of two dimensions, (out, in).
        name: what to call it.
        cutoff: an SNR above it counts as safe.

    Raises:
        ValueError: ``v`` has not two dimensions, or is all zero.
    """
    if v.dim() != 2:
        raise ValueError(f"v has the shape {tuple(v.shape)}; this picture is for two dimensions")
    v = v.detach().to("cpu", torch.float64)
    if not bool((v > 0).any()):
        raise ValueError("v is zero everywhere: nothing has been optimized yet")
    from matplotlib.colors import LogNorm, TwoSlopeNorm
    from matplotlib.figure import Figure

    positive = v[v > 0]
    low, high = (float(positive.quantile(q)) for q in _quantiles(positive))
    norm = LogNorm(low, max(high, low * 1.001))
    figure = Figure(figsize=(10, 4.1), layout="constrained", facecolor="white")
    panes: Any = figure.subfigures(1, 2, width_ratios=[1.0, 1.75])
    left, right = panes
    grid = left.add_gridspec(2, 2, width_ratios=[12, 1.4], height_ratios=[12, 1.4],
                             hspace=0.02, wspace=0.02)  # fmt: skip
    shown = _thin(v)
    main = left.add_subplot(grid[0, 0])
    image = main.imshow(shown, norm=norm, cmap="viridis", aspect="auto", interpolation="nearest")
    main.set_title(_short(name), loc="left", fontsize=10, fontweight="bold")
    main.set_ylabel(f"out ({v.shape[0]})", fontsize=9)
    rows = left.add_subplot(grid[0, 1])
    rows.imshow(_thin(v.mean(1, keepdim=True)), norm=norm, cmap="viridis", aspect="auto")
    rows.set_xlabel("row\nmeans", fontsize=9)
    columns = left.add_subplot(grid[1, 0])
    columns.imshow(_thin(v.mean(0, keepdim=True)), norm=norm, cmap="viridis", aspect="auto")
    columns.set_xlabel(f"column means, in ({v.shape[1]})", fontsize=9)
    for ax in (main, rows, columns):
        ax.set_xticks([])
        ax.set_yticks([])
    left.colorbar(image, ax=[main, rows, columns], fraction=0.05, pad=0.02)
    said = []
    axes = right.subplots(1, 2)
    for ax, axis, kind in zip(axes, (1, 0), ("row", "column"), strict=True):
        mean = v.mean(axis, keepdim=True)
        ratio = snr(v, axis)
        error = relative_error(v, axis)
        wrong = torch.log2(v.clamp_min(1e-300) / mean.clamp_min(1e-300)).clamp(-3, 3)
        picture = ax.imshow(_thin(wrong), cmap="RdBu_r", norm=TwoSlopeNorm(0, -3, 3),
                            aspect="auto", interpolation="nearest")  # fmt: skip
        verdict = "safe" if ratio > cutoff else "not safe"
        ax.set_title(
            f"v / its {kind} mean\nSNR {short_number(ratio)}: {verdict}",
            loc="left", fontsize=10, fontweight="bold",
        )  # fmt: skip
        ax.set_xlabel(f"relative squared error {error:.0%}", fontsize=9)
        ax.set_xticks([])
        ax.set_yticks([])
        said.append(
            f"averaged over axis {axis} ({kind} means): SNR {short_number(ratio)}, {verdict}, "
            f"relative squared error {error:.0%}"
        )
    bar = right.colorbar(picture, ax=list(axes), fraction=0.04, pad=0.02, ticks=[-3, 0, 3])
    bar.ax.set_yticklabels(["≤ ⅛", "1", "≥ 8"])
    size = "×".join(map(str, v.shape))
    return Picture(figure, f"Second moment of {name}, {size}; {'; '.join(said)}.")


def relative_error(v: Tensor, axis: int) -> float:
    """The mean over slices of the squared error of the slice's mean, over its squared size.

    For one slice this is exactly 1 / (1 + SNR). All-zero slices are left out.
    """
    v = v.detach().to("cpu", torch.float64)
    size = v.square().sum(axis)
    wrong = (v - v.mean(axis, keepdim=True)).square().sum(axis)
    return float((wrong / size)[size > 0].mean())


def second_moment_explorer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """A menu of the layers; the picture below it follows. Write it as the last line of a cell.

    Raises:
        ValueError: the optimizer holds no full second moment of two dimensions yet.
    """
    from lowmem.ui.explorer import SecondMomentExplorer

    found = {}
    for name, param in model.named_parameters():
        v = optimizer.state.get(param, {}).get("exp_avg_sq")
        if v is not None and v.dim() == 2 and min(v.shape) > 1 and bool((v > 0).any()):
            found[name] = v
    if not found:
        raise ValueError("the optimizer holds no second moment yet; train a step first")
    return SecondMomentExplorer(found)


def _short(name: str) -> str:
    text = "v of " + name.removesuffix(".weight")
    return text if len(text) <= 30 else f"v of …{text[-24:]}"


def _quantiles(values: Tensor) -> tuple[float, float]:
    return (0.01, 0.99) if values.numel() <= 1 << 24 else (0.0, 1.0)


def _thin(v: Tensor) -> Any:
    strides = [max(1, math.ceil(size / _SIDE)) for size in v.shape]
    return v[:: strides[0], :: strides[1]].numpy()
