"""state_dict and load_state_dict of DSA, both ways with ``torch.optim.SparseAdam``.

A saved state_dict has torch's two keys and a third, ``"lowmem"``, that names each
store's identity and step. With ``materialize`` the stores' moments stand in ``"state"``
as tensors, as SparseAdam has them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowmem.dsa.commits import Point
from lowmem.dsa.estate import Estate
from lowmem.dsa.header import StoreError
from lowmem.dsa.history import History
from lowmem.dsa.table import Table, table_shape

_KEY = "lowmem"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHUNK_ROWS = 1 << 16
_WEIGHTS_ALONE = (
    "load the weights alone and let the moments start anew: of a checkpoint they are "
    'torch.load(path)["model"]'
)


@dataclass(frozen=True)
class LoadPlan:
    """A checked state_dict: what goes to torch, and what is written into stores."""

    in_memory: dict[str, Any]
    on_disk: dict[int, Mapping[str, Any]]
    rolled_back: list[int]
    removed: list[int]


def save(
    saved: dict[str, Any], estate: Estate, numbers: Mapping[Tensor, int], materialize: bool
) -> dict[str, Any]:
    """Add the stores to what torch's ``Optimizer.state_dict`` gave."""
    stores = {}
    for param, table in estate.tables.items():
        number = numbers[param]
        entry: dict[str, Any] = {"step": table.step}
        if materialize:
            for name in _MOMENTS:
                # A copy: the mapped file changes with the next step.
                moment = torch.from_numpy(table.store.fields[name].copy())
                entry[name] = moment.reshape(param.shape)
        else:
            stores[number] = {
                "identity": table.store.header.identity,
                "rows": table.store.rows,
                "step": table.step,
                "history": table.store.history.at(table.step),
            }
        saved["state"][number] = entry
    saved["param_groups"] = plain(saved["param_groups"])
    saved[_KEY] = {
        "format": 1,
        "stores": stores,
        "on_disk": sorted(numbers[param] for param in estate.tables),
    }
    return saved


def plain(value: Any) -> Any:
    """The same with Python's numbers for numpy's, in lists, tuples and dicts.

    A scheduler that computes with numpy leaves such a learning rate, and torch's reader that
    runs no code refuses them.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    if type(value) in (dict, OrderedDict):
        return type(value)((plain(key), plain(item)) for key, item in value.items())
    return value


def check(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    labels: Mapping[Tensor, str],
    estate: Estate,
    in_memory: Mapping[Tensor, Any],
) -> LoadPlan:
    """Compare a state_dict with this optimizer; raises before anything has changed."""
    _require_form(state_dict)
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if [len(g["params"]) for g in saved_groups] != [len(g["params"]) for g in groups]:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )
    # torch numbers parameters by the order of the groups; ids in a foreign dict may differ.
    order = [number for group in saved_groups for number in group["params"]]
    ours = state_dict.get(_KEY)
    on_disk: dict[int, Mapping[str, Any]] = {}
    memory_state: dict[int, Any] = {}
    rolled_back: list[int] = []
    removed: list[int] = []
    for number, saved_number in enumerate(order):
        entry = state_dict["state"].get(saved_number)
        param = params[number]
        label = labels[param]
        table = estate.tables.get(param)
        reference = ours["stores"].get(saved_number) if ours else None
        if reference is not None:
            table = _same_store(reference, table, label, estate)
            if _behind(reference, table, label, estate.committed_point(number)):
                rolled_back.append(number)
        elif entry and _belongs_on_disk(state_dict, saved_number, table, param in in_memory):
            for name in _MOMENTS:
                if name not in entry or tuple(entry[name].shape) != tuple(param.shape):
                    found = tuple(entry[name].shape) if name in entry else "missing"
                    raise ValueError(
                        f"{label} has shape {tuple(param.shape)}; {name} in the state dict is "
                        f"{found}"
                    )
            on_disk[number] = entry
        elif entry:
            memory_state[saved_number] = entry
        elif table is not None and table.step:
            if ours is not None and estate.made_after_commit(number):
                removed.append(number)  # back then there was no such store
                continue
            raise StoreError(
                f"{label}: the store here stands at step {table.step:,}; the state dict has no "
                "state for it (step 0)"
            )
    filled = [
        {**{k: v for k, v in group.items() if k != "params"}, **saved}
        for group, saved in zip(groups, saved_groups, strict=True)
    ]
    return LoadPlan({"state": memory_state, "param_groups": filled}, on_disk, rolled_back, removed)


def _require_form(states: Any) -> None:
    """Raise ``ValueError`` for what is no state_dict; a checkpoint may come from anywhere."""
    problem = ValueError("this is no state_dict of DSA or torch.optim.SparseAdam")
    if not isinstance(states, Mapping):
        raise problem
    groups, entries = states.get("param_groups"), states.get("state")
    if not isinstance(groups, list) or not isinstance(entries, Mapping):
        raise problem
    if not all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups):
        raise problem
    if not all(type(number) is int for group in groups for number in group["params"]):
        raise problem
    if not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise problem
    ours = states.get(_KEY)
    if ours is None:
        return
    if not isinstance(ours, Mapping) or not isinstance(ours.get("on_disk"), list):
        raise problem
    stores = ours.get("stores")
    if not isinstance(stores, Mapping) or not all(
        isinstance(entry, Mapping)
        and isinstance(entry.get("identity"), str)
        and type(entry.get("step")) is int
        and isinstance(entry.get("history"), str)
        for entry in stores.values()
    ):
        raise problem


def _belongs_on_disk(
    state_dict: Mapping[str, Any], number: int, table: Table | None, in_memory: bool
) -> bool:
    if table is not None or in_memory:
        return table is not None
    ours = state_dict.get(_KEY)
    if ours is not None:
        return number in ours["on_disk"]
    # Adam's and AdamW's groups have options that SparseAdam's have not. Weight decay alone says
    # nothing: SparseAdam keeps it, unused, where a caller gave it.
    options = {key for group in state_dict["param_groups"] for key in group}
    return "weight_decay" not in options or not options & {"amsgrad", "foreach"}


def _same_store(
    reference: Mapping[str, Any], table: Table | None, label: str, estate: Estate
) -> Table:
    """The parameter's table, if its store is the one that was saved; else ``StoreError``."""
    identity, step = reference["identity"], reference["step"]
    if table is not None and table.store.header.identity == identity:
        return table
    if identity in estate.overwritten:
        raise StoreError(
            f"{label}: the state dict speaks of store {identity} at step {step:,}, which "
            f'mode="overwrite" removed from {estate.folder.path}. To go on from an export of it, '
            f'open that with mode="resume"; otherwise {_WEIGHTS_ALONE}'
        )
    if table is None:
        raise StoreError(
            f"{label}: the state dict speaks of store {identity} at step {step:,}, and no store "
            'is open for it. Open its folder with directory=… and mode="resume"; where that is '
            f"gone, {_WEIGHTS_ALONE}. state_dict(materialize=True) would hold the moments, too"
        )
    raise StoreError(
        f"{label}: the state dict belongs to store {identity}; {table.store.path} is "
        f"{table.store.header.identity}. Open the folder that it was saved with, or an export of "
        'it, with directory=… and mode="resume" (`lowmem store info PATH` names a folder\'s '
        f"stores); where that is gone, {_WEIGHTS_ALONE}"
    )


def _behind(
    reference: Mapping[str, Any], table: Table, label: str, committed: Point | None
) -> bool:
    """Whether the store must be rolled back to its last commit to fit; raises if it cannot."""
    step, history = reference["step"], reference["history"]
    if (step, history) == (table.step, table.store.history.at(table.step)):
        return False
    if committed is not None and (step, history) == (committed.step, committed.history):
        return True
    if step == table.step or (committed is not None and step == committed.step):
        raise StoreError(
            f"{label}: the state dict was saved at step {step:,} of another training of this "
            "store: in between it was rolled back, taken from a copy or a backup, or given other "
            "moments. Load the checkpoint that this training saved, or start anew"
        )
    back = f" and can go back to step {committed.step:,}" if committed is not None else ""
    raise StoreError(
        f"{label}: the state dict was saved at step {step:,}; the store stands at "
        f"step {table.step:,}{back}. Load the checkpoint of that step, or start anew"
    )


def protect(table: Table) -> None:
    """Keep the old bytes of all rows; what can fail of writing whole moments."""
    for start in range(0, table.store.rows, _CHUNK_ROWS):
        if table.journal is not None:
            table.journal.protect(np.arange(start, min(table.store.rows, start + _CHUNK_ROWS)))


def write(table: Table, entry: Mapping[str, Any]) -> None:
    """Write whole moments into a protected store, some rows at a time."""
    rows, dim = table_shape(table.param)
    for start in range(0, rows, _CHUNK_ROWS):
        part = slice(start, min(rows, start + _CHUNK_ROWS))
        table.store.write(
            part,
            {
                name: entry[name].detach()[part].to("cpu", torch.float32).reshape(-1, dim).numpy()
                for name in _MOMENTS
            },
        )
    table.step = int(entry["step"])
    table.store.history = History()
