"""Model, optimizer and the stores' commit as one file: whole, or not there."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowmem.dsa import commits, interrupts
from lowmem.dsa.estate import Estate

if TYPE_CHECKING:
    from lowmem.dsa.optimizer import DSA

_FORMAT = 1
_KEYS = {"lowmem_checkpoint", "token", "step", "model", "optimizer", "extra"}


def save(
    path: str | os.PathLike[str],
    optimizer: DSA,
    model: torch.nn.Module,
    extra: Any,
    estate: Estate,
) -> None:
    """Write aside, sync, then let one rename make both the file and the commit happen."""
    target = Path(path).expanduser()
    estate.require_whole()
    _require_loadable(extra)
    commit = estate.next_commit()
    states = optimizer.state_dict()
    payload = {
        "lowmem_checkpoint": _FORMAT,
        "token": uuid.uuid4().hex,  # near the start of the file, so that no two are alike
        "step": _step(states),
        "model": model.state_dict(),
        "optimizer": states,
        "extra": extra,
    }
    aside = target.with_name(f"{target.name}.new")
    try:
        with open(aside, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        with interrupts.whole():
            folder = estate.folder.path
            if estate.journaled:
                commits.prepare_commit(folder, commit, aside, target, estate.sync)
            os.replace(aside, target)
            if estate.sync:
                commits.sync_folder(target.parent)
            # It has happened, whatever fails from here on.
            estate.committed(commit)
            commits.settle(folder, sync=estate.sync)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def load(path: str | os.PathLike[str], optimizer: DSA, model: torch.nn.Module) -> int:
    """Load a checkpoint into optimizer and model; its step."""
    payload = read(path)
    ours = model.state_dict()
    theirs = payload["model"]
    if set(ours) != set(theirs):
        differ = sorted(set(ours) ^ set(theirs))
        raise ValueError(
            f"{path} is a checkpoint of another model: {len(differ)} names differ, the first "
            f"{differ[:3]}"
        )
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(theirs[name].shape)}; the model's has "
                f"{tuple(tensor.shape)}"
            )
    optimizer.load_state_dict(payload["optimizer"])
    model.load_state_dict(theirs)
    return int(payload["step"])


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint. No code in it is run."""
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # torch's reader raises many kinds for bytes that make no sense
        raise ValueError(f"{path} is no checkpoint of lowmem: {error}") from None
    if not isinstance(payload, dict) or set(payload) != _KEYS:
        raise ValueError(f"{path} is no checkpoint of lowmem; opt.save_checkpoint writes one")
    if payload["lowmem_checkpoint"] != _FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {payload['lowmem_checkpoint']}; this lowmem reads "
            f"{_FORMAT}"
        )
    model, states = payload["model"], payload["optimizer"]
    if (
        type(payload["step"]) is not int
        or not isinstance(model, dict)
        or not all(isinstance(k, str) and isinstance(t, torch.Tensor) for k, t in model.items())
        or not isinstance(states, dict)
    ):
        raise ValueError(f"{path} is no checkpoint of lowmem: a part of it is missing")
    return payload


def _step(states: dict[str, Any]) -> int:
    """The number of steps taken: the largest count of any parameter."""
    return max((int(entry["step"]) for entry in states["state"].values()), default=0)


def _require_loadable(extra: Any) -> None:
    buffer = io.BytesIO()
    torch.save(extra, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            "extra= may hold tensors, numbers, strings, lists and dicts, so that loading a "
            f"checkpoint runs no code: {error}"
        ) from None
