"""Gradient clipping for any mix of sparse and dense gradients."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients in place so that their joint norm is at most ``max_norm``.

    Equals ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients, on the dense
    equivalent: duplicate ids of a sparse gradient are summed before the norm is taken.

    Args:
        parameters: a tensor or tensors that may have gradients.
        max_norm: largest norm allowed.
        norm_type: the p of the norm, or ``inf``.
        error_if_nonfinite: raise ``RuntimeError`` instead of scaling by NaN or zero.

    Returns:
        The joint norm before clipping, a scalar tensor.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    max_norm, norm_type = float(max_norm), float(norm_type)
    if max_norm < 0 or norm_type <= 0:
        raise ValueError(f"max_norm={max_norm} and norm_type={norm_type} must not be negative")
    # Tied weights come once: scaling one gradient twice would be wrong.
    unique = {id(p.grad): p.grad for p in parameters if p.grad is not None}
    grads = list(unique.values())
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    norms = [_norm(grad, norm_type).to(device) for grad in grads]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they "
            "cannot be clipped; pass error_if_nonfinite=False to scale them all the same"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    # Scaling is linear, so duplicates need not be summed for it.
    _scale_once([grad._values() if grad.is_sparse else grad for grad in grads], scale)
    return total


def _scale_once(tensors: list[Tensor], scale: Tensor) -> None:
    """Multiply in place, each element of memory once, however many tensors show it.

    The gradients of ``a(i) + b(i)`` share one memory when ``a`` and ``b`` are sparse.
    """
    by_memory: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            key = tensor.untyped_storage().data_ptr(), tensor.dtype
            by_memory.setdefault(key, []).append(tensor)
    for views in by_memory.values():
        factor = scale.to(views[0].device)
        distinct = {(v.storage_offset(), v.shape, v.stride()): v for v in views}
        views = sorted(distinct.values(), key=lambda view: view.storage_offset())
        if all(_end(left) <= right.storage_offset() for left, right in pairwise(views)):
            for view in views:
                view.mul_(factor)
            continue
        # They may overlap in part: gather what each element is multiplied by first.
        start = views[0].storage_offset()
        size = max(map(_end, views)) - start
        factors = torch.ones(size, dtype=factor.dtype, device=factor.device)
        for view in views:
            place = view.storage_offset() - start
            factors.as_strided(view.shape, view.stride(), place).fill_(factor)
        views[0].as_strided((size,), (1,), start).mul_(factors)


def _end(view: Tensor) -> int:
    """One past the last element of the storage that the view shows."""
    steps = sum((int(n) - 1) * int(step) for n, step in zip(view.shape, view.stride(), strict=True))
    return int(view.storage_offset()) + steps + 1


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    values = grad.coalesce()._values() if grad.is_sparse else grad
    if values.numel() == 0:  # torch has no largest element of nothing
        return torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.linalg.vector_norm(values, norm_type)
