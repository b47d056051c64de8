"""The planner: from a table or a model and a machine to a ``Plan``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from lowmem.plan.access import cached_share
from lowmem.plan.costs import (
    DENSE_CHOICES,
    ITEM_BYTES,
    STATIC_RULES_SHARE,
    TABLE_CHOICES,
    Bytes,
    Dense,
    Table,
    totals,
)
from lowmem.plan.machine import Machine, get_machine
from lowmem.plan.result import Choice, Plan
from lowmem.units import LARGEST_COUNT, parse_count

PLACES = ("auto", "cpu", "cuda")
_LARGEST_DIM = 1 << 20
Costs = Callable[[str, int], Bytes]  # (choice, rows) -> bytes


def plan(
    rows: Any = None,
    dim: Any = None,
    machine: str | Machine = "this",
    *,
    dtype: Any = "float32",
    weights: str = "auto",
    batch: Any = 65_536,
    parameters: Any = None,
    share: Any = None,
    directory: str | os.PathLike[str] = ".",
) -> Plan:
    """What fits where: the bytes of every choice on a machine, and which one to take.

    Args:
        rows: rows of the embedding table: ``10_000_000``, ``10e6`` or ``"10M"``.
        dim: weights in a row.
        machine: ``"this"`` (measured now), ``"colab-t4"``, ``"colab-cpu"``, ``"kaggle-t4"``,
            or ``Machine("mine", ram=64e9, vram=24e9, disk=1e12)``.
        dtype: of the weights: ``"float32"``, ``"bfloat16"``, ``"float16"`` or torch's.
        weights: where they lie: ``"cpu"``, ``"cuda"``, or ``"auto"``: in VRAM if they fit.
        batch: ids in one step, duplicates counted.
        parameters: for a dense model in place of a table: its number of weights. The
            choices are then AdamW and SlimAdamW.
        share: the part of the second moment that SlimAdamW keeps, from 0 to 1, or what
            ``SlimAdamW.report()`` returns. By default that of the published static rules.
        directory: where the state would lie, for ``machine="this"``.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or range.
        OSError: ``directory`` does not exist.

    >>> plan("10M", 128, "colab-t4").recommended.name
    'DSA'
    """
    dtype = _dtype(dtype)
    if weights not in PLACES:
        raise ValueError(f"weights is {weights!r}; they lie on one of {', '.join(PLACES)}")
    if (parameters is None) == (rows is None and dim is None):
        raise ValueError("give rows and dim of a table, or parameters of a dense model")
    if parameters is not None:
        if share is None:
            share = STATIC_RULES_SHARE
        place = get_machine(machine, directory)
        dense = Dense(parse_count(parameters, "parameters"), dtype, "cpu", _share(share))
        return _dense_plan(dense, place, weights)
    if rows is None or dim is None:
        missing = "rows" if rows is None else "dim"
        raise ValueError(
            f"a table has rows and dim; they are {rows!r} and {dim!r}: give {missing}, too"
        )
    if share is not None:
        raise ValueError("share belongs to a dense model: give parameters, not rows and dim")
    table = Table(
        parse_count(rows, "rows"),
        parse_count(dim, "dim"),
        dtype,
        "cpu",
        parse_count(batch, "batch"),
    )
    if table.dim > _LARGEST_DIM:
        raise ValueError(f"dim is {table.dim:,}; a row has at most {_LARGEST_DIM:,} weights")
    return _table_plan(table, get_machine(machine, directory), weights)


def _table_plan(table: Table, machine: Machine, weights: str) -> Plan:
    def at(place: str) -> Costs:
        return lambda name, rows: Table(rows, table.dim, table.dtype, place, table.batch).costs(
            name
        )

    place = _place(machine, weights, "DSA", table.rows, at)
    costs = at(place)
    choices = tuple(_choice(name, table.rows, machine, costs) for name in TABLE_CHOICES)
    by_name = {choice.name: choice for choice in choices}
    dsa = by_name["DSA"]
    page_cache = max(0, machine.ram - dsa.total("ram"))
    may_wait = int(machine.waiting_share * page_cache)
    # SparseAdam goes first where it fits, its moments are float32, and DSA is not known to be
    # faster: in VRAM, where it needs no traffic to the host, and where moments are so large
    # that DSA would wait for their writing.
    slow = place == "cuda" or dsa.bytes["disk"]["moments"] > may_wait
    sparse_first = slow and table.dtype == "float32"
    order = ("SparseAdam", "DSA", "Adam") if sparse_first else ("DSA", "SparseAdam", "Adam")
    recommended = next((by_name[name] for name in order if by_name[name].fits), None)
    row_bytes = max(1, dsa.bytes["disk"]["moments"] // table.rows)
    shares = {a: cached_share(table.rows, row_bytes, page_cache, a) for a in ("uniform", "zipf")}
    notes = ["Other layers and activations of your model come on top."]
    if table.dtype != "float32":
        notes.append(
            f"Adam and SparseAdam keep their moments in {table.dtype}, which stops small updates "
            "and may overflow; DSA keeps float32."
        )
    return Plan(
        machine, table.rows, table.dim, table.dtype, place, table.batch,
        choices, recommended, page_cache, may_wait, shares, tuple(notes),
    )  # fmt: skip


def _dense_plan(dense: Dense, machine: Machine, weights: str) -> Plan:
    def at(place: str) -> Costs:
        return lambda name, count: Dense(count, dense.dtype, place, dense.share).costs(name)

    place = _place(machine, weights, "SlimAdamW", dense.parameters, at)
    costs = at(place)
    choices = tuple(_choice(name, dense.parameters, machine, costs) for name in DENSE_CHOICES)
    adamw, slim = choices
    recommended = slim if slim.fits else adamw if adamw.fits else None
    notes = [
        f"SlimAdamW keeps {dense.share:.2%} of the second moment here.",
        "AdamW is taken as fused=True; as constructed by default it needs working memory on top.",
        "Activations come on top.",
    ]
    return Plan(
        machine, dense.parameters, None, dense.dtype, place, None, choices, recommended,
        notes=tuple(notes),
    )  # fmt: skip


def _choice(name: str, rows: int, machine: Machine, costs: Costs) -> Choice:
    need = costs(name, rows)
    missing = {r: n - machine.limit(r) for r, n in totals(need).items() if n > machine.limit(r)}
    return Choice(name, need, missing, _most(_fits(machine, name, costs)))


def _fits(machine: Machine, name: str, costs: Costs) -> Callable[[int], bool]:
    def fits(count: int) -> bool:
        return all(n <= machine.limit(r) for r, n in totals(costs(name, count)).items())

    return fits


def _most(fits: Callable[[int], bool]) -> int:
    """The largest count that fits, 0 where not even one does; need grows with the count."""
    if not fits(1):
        return 0
    low, high = 1, LARGEST_COUNT + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _place(
    machine: Machine, weights: str, name: str, rows: int, costs: Callable[[str], Costs]
) -> str:
    if weights == "cuda" and machine.vram == 0:
        raise ValueError(f"weights is 'cuda', but {machine.name} has no VRAM; take weights='cpu'")
    if weights != "auto":
        return weights
    if machine.vram == 0:
        return "cpu"
    # In VRAM where that goes at least as far as what was asked for, else where it goes further.
    most = {place: _most(_fits(machine, name, costs(place))) for place in ("cuda", "cpu")}
    return "cuda" if most["cuda"] >= min(rows, most["cpu"]) else "cpu"


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(ITEM_BYTES)}")
    return name


def _share(share: Any) -> float:
    """The part of the second moment that is kept, from a number or a report's rows."""
    if isinstance(share, (int, float)) and not isinstance(share, bool):
        if math.isnan(share) or not 0 <= share <= 1:
            raise ValueError(f"share is {share}; it is the part that is kept, from 0 to 1")
        return float(share)
    if isinstance(share, Iterable) and not isinstance(share, str):
        full = saved = 0
        for row in share:
            # Whatever else is in both counts drops out of the difference.
            saved += row.bytes_before - row.bytes_after
            full += 4 * math.prod(row.shape)
        if full > 0:
            return min(1.0, max(0.0, 1.0 - saved / full))
    raise TypeError(f"share is {share!r}; give a number from 0 to 1, or SlimAdamW.report()")
