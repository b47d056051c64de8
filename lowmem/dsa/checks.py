"""What an optimizer is asked for, checked where it is made and where a group changes."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# A dense gradient of a table at least this tall and this large is most likely a mistake.
_EMBEDDING_ROWS = 10_000
_EMBEDDING_BYTES = 64 << 20
# Options of torch.optim's Adam family and of SGD that change an update unless false or zero.
# torch keeps any key of a group, so without a word these would be lost.
_UNUSED = ("weight_decay", "amsgrad", "momentum", "dampening", "nesterov", "momentum_decay")


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}; choose one of {', '.join(map(repr, choices))}")


def require_path_first(path: Any) -> None:
    if isinstance(path, torch.nn.Module):
        raise TypeError("the path comes first, then the model")


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint, which is a file.

    Raises:
        IsADirectoryError: it is a folder.
    """
    target = Path(path).expanduser()
    if target.is_dir():
        raise IsADirectoryError(
            errno.EISDIR,
            "a checkpoint is a file, and this is a folder; name a file, such as "
            f"{target / 'checkpoint.pt'} (a folder of stores belongs in directory=)",
            str(target),
        )
    return target


def require_folder(path: Path, who: str) -> None:
    """Raise ``NotADirectoryError`` where ``path`` cannot be a folder: a file is in the way."""
    for place in (path, *path.parents):
        if place.is_dir():
            return
        if os.path.lexists(place):
            raise NotADirectoryError(
                errno.ENOTDIR,
                f"{who} needs a folder, and {place} is none; choose another, or move it away",
                str(path),
            )


def check_hyperparameters(lr: Any, betas: Any, eps: Any) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not _number("lr", lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not _number("eps", eps) >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    try:
        pair = tuple(betas)
    except TypeError:
        raise TypeError(f"betas={betas!r:.80} must be two numbers, such as (0.9, 0.999)") from None
    if len(pair) != 2:
        raise ValueError(f"betas={betas!r:.80} must be two numbers, such as (0.9, 0.999)")
    for index, beta in enumerate(pair):
        if not 0.0 <= _number(f"betas[{index}]", beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def _number(name: str, value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, (str, bytes)):
            return float(value)
    raise TypeError(f"{name}={value!r:.80} must be a number")


def warn_of_unused(
    groups: Sequence[Mapping[str, Any]], told: set[tuple[int, str]], stacklevel: int
) -> None:
    """Warn of options that the groups hold and that DSA, as SparseAdam, does not use.

    Args:
        groups: all groups of the optimizer.
        told: ``(group, key)`` of what was warned of before; what is new is added.
        stacklevel: of ``warnings.warn``, counted from the caller.
    """
    new = [
        (number, key)
        for number, group in enumerate(groups)
        for key in _UNUSED
        if (number, key) not in told and _is_set(group.get(key))
    ]
    if not new:
        return
    told.update(new)
    named = ", ".join(f"{key}={groups[n][key]!r:.80} of parameter group {n}" for n, key in new)
    warnings.warn(
        f"DSA does not use {named}: like torch.optim.SparseAdam it is plain Adam without weight "
        "decay. Give dense layers that need it to torch.optim.AdamW or lowmem.SlimAdamW beside "
        "DSA, and leave the option out here",
        stacklevel=stacklevel + 1,
    )


def _is_set(value: Any) -> bool:
    if value is None:
        return False
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value) != 0
    return False


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
