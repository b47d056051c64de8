"""Table 1 of "When Can You Get Away with Low Memory Adam?" (arXiv 2503.01843), and layer maps.

The table says, for a type of layer, over what its second moment is averaged; a layer map
says by which names layers of a type go. A name is matched by whole path components.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from lowmem.slim.rulesfile import Axes, Split, read_json_object
from lowmem.slim.uses import Path

LayerMap = dict[str, list[str]]

FAN_IN, FAN_OUT, LAST, PARTS = "fan-in", "fan-out", "last axis", "by part"

TABLE_1: dict[str, str | None] = {
    "attention_query": FAN_IN,
    "attention_key": FAN_IN,
    "attention_value": FAN_OUT,
    "attention_qkv": PARTS,
    "attention_output": FAN_OUT,
    "mlp_up": FAN_OUT,
    "mlp_gate": FAN_OUT,
    "mlp_gate_up": PARTS,
    "mlp_down": FAN_OUT,
    "token_embedding": LAST,  # one value a token
    "position_embedding": LAST,  # one value a position
    "lm_head": FAN_IN,
    "vision_first": FAN_IN,
    "vision_classification": FAN_IN,
    "norm": None,
}


@dataclass(frozen=True)
class Decision:
    """What a parameter is, who said so, and the rule that follows.

    ``reached`` is False for a parameter that could be averaged and is not, for want of
    knowing what it is.
    """

    layer_type: str
    decided_by: str
    rule: Axes | Split | None
    reached: bool
    note: str = ""


def read_layer_map(path: str | os.PathLike[str]) -> LayerMap | None:
    """A layer map: ``{layer type: [patterns]}``, a pattern being dotted path components.

    ``"layer_map.json"`` means the packaged map where the working directory has none; that
    is ``None`` here, since the packaged map is what modules and names are judged by anyway.
    """
    if os.fspath(path) == "layer_map.json" and not FilePath(path).exists():
        return None
    loaded = read_json_object(path, "layer map")
    shown = os.fspath(path)
    for layer_type, patterns in loaded.items():
        if layer_type not in TABLE_1:
            raise ValueError(
                f"{shown}: unknown layer type {layer_type!r}; known are {', '.join(TABLE_1)}"
            )
        if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
            raise ValueError(f"{shown}: {layer_type!r} must be a list of names, got {patterns!r}")
    return loaded


def is_compressible(shape: Sequence[int]) -> bool:
    """Two axes or more with more than one index: a mean over one leaves something to keep."""
    return sum(size > 1 for size in shape) >= 2


@functools.cache
def packaged_patterns() -> tuple[tuple[str, Path], ...]:
    loaded = read_json_object(FilePath(__file__).with_name("layer_map.json"), "layer map")
    pairs = [(role, tuple(p.split("."))) for role, patterns in loaded.items() for p in patterns]
    return tuple(sorted(pairs, key=lambda pair: -len(pair[1])))  # the longest pattern first
