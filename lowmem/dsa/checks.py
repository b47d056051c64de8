"""What an optimizer is asked for, checked where it is made and where a group changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# A dense gradient of a table at least this tall and this large is most likely a mistake.
_EMBEDDING_ROWS = 10_000
_EMBEDDING_BYTES = 64 << 20


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; choose one of {', '.join(map(repr, choices))}")


def require_path_first(path: Any) -> None:
    if isinstance(path, torch.nn.Module):
        raise TypeError("the path comes first, then the model")


def check_hyperparameters(lr: Any, betas: Iterable[float], eps: float) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not float(eps) >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    betas = tuple(betas)
    if len(betas) != 2:
        raise ValueError(f"betas={betas} must be two numbers")
    for index, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def moment_bytes(param: Tensor) -> int:
    """Of both moments; a lazy parameter has no size yet."""
    return 2 * 4 * param.numel()


def embedding_sized(param: Tensor) -> bool:
    return (
        not is_lazy(param)
        and param.dim() == 2
        and param.shape[0] >= _EMBEDDING_ROWS
        and param.numel() * 4 >= _EMBEDDING_BYTES
    )
