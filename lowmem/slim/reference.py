"""One SlimAdamW step in plain torch, to read and to hold the fast paths to.

``v ← β2·v + (1 − β2)·mean_K(g²)``; all else is AdamW (Loshchilov & Hutter, 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def supports(
    param: Tensor, grad: Tensor, axes: tuple[int, ...], v_strides: tuple[int, ...] | None = None
) -> bool:
    return True


@torch.no_grad()
def slim_adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    axes: Sequence[tuple[int, ...]],
    steps: Sequence[float],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Update parameters and moments in place; ``steps`` counts this step already."""
    for p, g, m, v, k, t in zip(params, grads, exp_avgs, exp_avg_sqs, axes, steps, strict=True):
        work = torch.promote_types(p.dtype, torch.float32)
        grad = -g.to(work) if maximize else g.to(work)
        square = grad.square().mean(dim=k, keepdim=True) if k else grad.square()
        mean = beta1 * m.to(work) + (1 - beta1) * grad
        v.copy_(beta2 * v + (1 - beta2) * square)
        denominator = (v / (1 - beta2**t)).sqrt() + eps
        p.copy_(p.to(work) * (1 - lr * weight_decay) - lr / (1 - beta1**t) * mean / denominator)
        m.copy_(mean)
