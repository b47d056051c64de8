"""Model, optimizer and the stores' commit as one file: whole, or not there."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lowmem import interrupts
from lowmem.dsa import checks, commits
from lowmem.dsa.estate import Estate
from lowmem.dsa.states import plain

if TYPE_CHECKING:
    from lowmem.dsa.optimizer import DSA

_FORMAT = 1
_EXTRA_STATE = "_extra_state"  # how torch ends the name of what get_extra_state gave
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor, torch.nn.Parameter)
_KEYS = {"lowmem_checkpoint", "token", "step", "model", "optimizer", "extra"}


def save(
    target: Path,
    optimizer: DSA,
    model: torch.nn.Module,
    extra: Any,
    estate: Estate,
) -> None:
    """Write aside, sync, then let one rename make both the file and the commit happen."""
    if estate.folder.scratch:
        raise ValueError(
            "a checkpoint needs DSA(..., directory=...): without it the moments are in a scratch "
            "folder, which is removed at exit. To save them as tensors instead: "
            "torch.save(opt.state_dict(materialize=True), path)"
        )
    _require_place(target)
    estate.require_whole()
    states = optimizer.state_dict()
    weights = model.state_dict()
    for name in weights:
        if name.endswith(_EXTRA_STATE):
            weights[name] = plain(weights[name])
    try:
        extra = plain(extra)
    except RecursionError:
        raise TypeError("extra= contains itself, or is nested too deeply to be saved") from None
    payload = {
        "lowmem_checkpoint": _FORMAT,
        "token": uuid.uuid4().hex,  # near the start of the file, so that no two are alike
        "step": _step(states),
        "model": weights,
        "optimizer": states,
        "extra": extra,
    }
    _require_loadable(payload)
    commit = estate.next_commit()
    aside = target.with_name(f"{target.name}.new")
    try:
        with open(aside, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        _require_readable(aside)
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


def _require_place(target: Path) -> None:
    checks.require_folder(target.absolute().parent, "a checkpoint")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "the folder of this checkpoint is not there; make it first", str(target)
        )


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
        if name.endswith(_EXTRA_STATE):  # of any kind: that is its module's business
            continue
        if tensor.shape != theirs[name].shape:
            raise ValueError(
                f"{path}: {name} has shape {tuple(theirs[name].shape)}; the model's has "
                f"{tuple(tensor.shape)}"
            )
    optimizer.load_state_dict(payload["optimizer"])
    model.load_state_dict(theirs)
    return int(payload["step"])


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint. No code in it is run.

    Only the model's parameters and buffers stay mapped onto the file, until load_state_dict
    copies them. What others keep is a copy: a mapped file that is cut short ends the process.
    """
    payload = _map(checks.checkpoint_path(path))
    model = payload["model"]
    for name in model:
        if name.endswith(_EXTRA_STATE):
            model[name] = copy.deepcopy(model[name])
    for part in ("optimizer", "extra"):
        payload[part] = copy.deepcopy(payload[part])
    return payload


def _map(path: Path) -> dict[str, Any]:
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch's reader raises many kinds for bytes that make no sense
        # EINVAL is what it makes of a file that ends too early.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        # What it says is of pickles and their classes; that helps nobody with a wrong path.
        raise _no_checkpoint(path) from None
    if not isinstance(payload, dict) or set(payload) != _KEYS:
        raise _no_checkpoint(path)
    if payload["lowmem_checkpoint"] != _FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {payload['lowmem_checkpoint']}; this lowmem reads "
            f"{_FORMAT}"
        )
    model, states = payload["model"], payload["optimizer"]
    if (
        type(payload["step"]) is not int
        or not isinstance(model, dict)
        or not all(
            isinstance(name, str)
            and (isinstance(value, torch.Tensor) or name.endswith(_EXTRA_STATE))
            for name, value in model.items()
        )
        or not isinstance(states, dict)
    ):
        raise _no_checkpoint(path)
    return payload


def _no_checkpoint(path: Path) -> ValueError:
    return ValueError(
        f"{path} is not a lowmem checkpoint, or was copied in part. "
        "opt.save_checkpoint(path, model) writes one; what torch.save wrote is for torch.load"
    )


def _step(states: dict[str, Any]) -> int:
    """The number of steps taken: the largest count of any parameter."""
    return max((int(entry["step"]) for entry in states["state"].values()), default=0)


def _require_loadable(payload: dict[str, Any]) -> None:
    """Raise ``TypeError`` for what a reader that runs no code will not take.

    Before anything is written, and leaf by leaf: the error can name the one at fault.
    """
    for name, value in _leaves(payload, ""):
        if type(value) in _PLAIN:
            continue
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # of pickle, of torch, or of the object itself
            raise TypeError(
                f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint "
                "may hold tensors, numbers, strings, lists and dicts, so that loading it runs no "
                "code"
            ) from error


def _require_readable(path: Path) -> None:
    """Raise ``TypeError`` when the finished file is one that :func:`read` refuses."""
    try:
        _map(path)
    except ValueError as error:
        raise TypeError(
            "model, optimizer options or extra= hold something that a checkpoint cannot give "
            f"back, so none was written: {error.__context__ or error}"
        ) from None


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What lies in nested plain containers, keys too, each with the way to it."""
    todo, seen = [(name, value)], set()
    while todo:
        name, value = todo.pop()
        if type(value) not in (dict, OrderedDict, list, tuple):
            yield name, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            if isinstance(value, dict):
                todo.append((f"a key of {name or 'it'}", key))
            todo.append((f"{name}[{key!r:.80}]" if name else str(key), item))
