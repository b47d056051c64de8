"""Adam in memory, for the dense parameters of an optimizer: equal to ``torch.optim.Adam``."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

State = MutableMapping[Tensor, dict[str, Any]]


def prepare(params: list[Tensor], state: State, labels: dict[Tensor, str]) -> None:
    """Make the moments of parameters that have none.

    Raises:
        RuntimeError: a parameter changed its shape or device since its moments were made.
    """
    for param in params:
        own = state[param]
        if not own:
            own["step"] = torch.zeros((), device="cpu")
            own["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            own["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        elif own["exp_avg"].shape != param.shape or own["exp_avg"].device != param.device:
            found = own["exp_avg"]
            raise RuntimeError(
                f"{labels[param]} is {tuple(param.shape)} on {param.device} now; its moments "
                f"were made for {tuple(found.shape)} on {found.device}. Make a new optimizer "
                "after resizing or moving a model"
            )


@torch.no_grad()
def update(params: list[Tensor], state: State, group: dict[str, Any]) -> None:
    """One step of Adam on parameters of one group, all of which have gradients."""
    adam(
        params,
        [param.grad for param in params if param.grad is not None],
        [state[param]["exp_avg"] for param in params],
        [state[param]["exp_avg_sq"] for param in params],
        [],
        [state[param]["step"] for param in params],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=0.0,
        eps=group["eps"],
        maximize=group["maximize"],
    )
