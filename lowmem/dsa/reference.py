"""The update of DSA in plain torch: slow, in memory, and short enough to be checked by eye.

Adam (Kingma and Ba 2015, algorithm 1) on the rows that have a gradient, with the step
count of the whole parameter, as ``torch.optim.SparseAdam`` has it. The fast path in
``lowmem.kernels.cpu`` is held to this by the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adam_rows_(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    indices: Tensor,
    row_grads: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    maximize: bool = False,
) -> None:
    """One step, in place. ``weight``, moments: ``(rows, dim)``; ``row_grads``: ``(n, dim)``.

    ``indices`` ``(n,)`` may name a row more than once: its gradients are summed.
    ``step`` counts from 1.
    """
    rows, place = torch.unique(indices, return_inverse=True)
    grad = torch.zeros(len(rows), weight.shape[1], dtype=exp_avg.dtype)
    grad.index_add_(0, place, row_grads.to(exp_avg.dtype))
    if maximize:
        grad = -grad
    m = beta1 * exp_avg[rows] + (1 - beta1) * grad
    v = beta2 * exp_avg_sq[rows] + (1 - beta2) * grad**2
    exp_avg[rows], exp_avg_sq[rows] = m, v
    step_size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    update = step_size * m / (v.sqrt() + eps)
    weight[rows] = (weight[rows].to(update.dtype) - update).to(weight.dtype)
