"""Weights that are several in one: how a fused query, key, value or gate and up is cut.

The order of the parts is the module's own business, so it is taken from what is known of
the module; where it is not known there is no rule, and the report says why.
"""

from __future__ import annotations

from typing import Any

from lowmem.slim.rulesfile import Axes, Part, Split
from lowmem.slim.uses import Use

_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_n_heads",
    "num_heads_kv",
    "num_query_groups",
    "n_query_groups",
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")


def qkv_rule(use: Use, q_size: int | None) -> tuple[Split | None, str]:
    """The rule of a fused query, key and value projection, or ``None`` and the reason.

    ``q_size`` is the size of the query part where another layer tells it (the attention
    output's inputs); with grouped queries the key and value parts are smaller.
    """
    if use.out_axis is None:
        return None, "; ".join(use.notes) or "orientation unknown"
    total, in_size = use.out_size, use.in_size
    kind = "" if use.parent is None else type(use.parent).__name__
    if "CodeGen" in kind:
        return None, f"{kind} stores query, value and key in an order of its own"
    if q_size is None and total == 3 * in_size:
        q_size = in_size
    if q_size is None or not (0 < q_size < total and (total - q_size) % 2 == 0):
        return None, "the sizes of query, key and value are unknown"
    kv_size = (total - q_size) // 2
    if kv_size != q_size and not _grouped(use, q_size, kv_size):
        # The output's inputs are the value's size, which may be wider than the query's.
        return None, f"{total} outputs are not three of {q_size}, and no grouped queries are known"
    if use.role_path[-1] == "query_key_value":
        return _by_heads(use, q_size, kv_size)
    if getattr(use.parent, "multi_query", None) is False and use.role_path[-1] == "c_attn":
        return _by_heads(use, q_size, kv_size)
    return _qkv(use, q_size, kv_size, kv_size, 1), "query, key, value"


def _grouped(use: Use, q_size: int, kv_size: int) -> bool:
    """Whether the module says that several query heads share a key and a value head."""
    heads, groups = _attribute(use.parent, _HEADS), _attribute(use.parent, _KV_HEADS)
    for holder in (use.parent, getattr(use.parent, "config", None)):
        if getattr(holder, "multi_query", None) is True:
            groups = groups if getattr(use.parent, "new_decoder_architecture", False) else 1
    if groups is None or groups < 1:
        return False
    return kv_size < q_size and (heads is None or q_size * groups == kv_size * heads)


def _by_heads(use: Use, q_size: int, kv_size: int) -> tuple[Split | None, str]:
    """Query, key and value head by head, as Megatron and its descendants store them."""
    heads = _attribute(use.parent, _HEADS)
    if heads is None or heads < 1 or q_size % heads:
        return None, "the number of heads is unknown, and with it the order of the rows"
    head = q_size // heads
    if getattr(use.parent, "new_decoder_architecture", False):  # Falcon: by key-value group
        groups = kv_size // head
        if groups < 1 or groups * head != kv_size or heads % groups:
            return None, "heads and key-value groups do not fit the weight"
        return _qkv(use, q_size // groups, head, head, groups), f"{groups} key-value groups"
    if getattr(use.parent, "multi_query", False) or kv_size == head != q_size:
        return _qkv(use, q_size, kv_size, kv_size, 1), "query, key, value"
    if kv_size != q_size:
        return None, "grouped queries in an unknown order"
    return _qkv(use, head, head, head, heads), f"{heads} heads of query, key, value"


def thirds_rule(use: Use) -> Split:
    """``nn.MultiheadAttention.in_proj_weight``: query, key and value are equal thirds."""
    size = use.shape[0] // 3
    return _qkv(use, size, size, size, 1)


def halves_rule(use: Use, names: tuple[str, str]) -> Split:
    """Gate and up one after the other, each averaged over its own outputs."""
    assert use.out_axis is not None
    size, axes = use.out_size // 2, (use.out_axis,)
    return Split(use.out_axis, (Part(size, axes, names[0]), Part(size, axes, names[1])))


def _qkv(use: Use, query: int, key: int, value: int, repeat: int) -> Split:
    out_axis = 0 if use.out_axis is None else use.out_axis
    fan_in: Axes = use.in_axes or tuple(a for a in range(len(use.shape)) if a != out_axis)
    parts = (
        Part(query, fan_in, "query"),
        Part(key, fan_in, "key"),
        Part(value, (out_axis,), "value"),
    )
    return Split(out_axis, parts, repeat)


def _attribute(module: Any, names: tuple[str, ...]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
