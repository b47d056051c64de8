"""What layer a parameter is: by the module that owns it, then by names with evidence beside them.

A name alone proves little: ``fc2`` ends an MLP block in one model and classifies in
another, ``key`` is an attention key or half of a gated MLP. So a query must have a key and
a value for siblings, an attention output an attention, and an up projection a down
projection whose shape leads back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import nn

from lowmem.slim import fused
from lowmem.slim.rulesfile import Axes, Split
from lowmem.slim.table1 import (
    FAN_IN,
    LAST,
    TABLE_1,
    Decision,
    LayerMap,
    is_compressible,
    packaged_patterns,
)
from lowmem.slim.uses import Path, Use, is_conv, is_embedding, is_norm, is_transposed_conv

_QKV = ("attention_query", "attention_key", "attention_value")
_UPS = ("mlp_up", "mlp_gate", "mlp_gate_up")
_RELATIVE = {"relative_attention_bias", "relative_position_bias", "rel_pos_bias", "relative_bias"}
_TOKEN_WORDS = {"tok", "token", "word", "vocab", "wte", "emb", "embed", "embedding", "embeddings"}
_MLP_SEQUENTIALS = {"mlp", "ffn", "ff", "feed_forward", "feedforward", "net"}


class Judge:
    """Decides uses one by one, with all of them in view as evidence."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = uses
        self._known: dict[int, list[tuple[str, Path, Path]]] = {}
        self.last_of = {use.role_path: use for use in uses if use.out_axis is not None}
        self.roles: dict[Path, dict[str, list[Use]]] = defaultdict(lambda: defaultdict(list))
        for use in uses:
            for role, prefix, _ in self._candidates(use):
                self.roles[prefix][role].append(use)
        self.attention = {
            prefix
            for prefix, roles in self.roles.items()
            if "attention_qkv" in roles or all(role in roles for role in _QKV)
        }
        self.attention |= {use.path for use in uses if isinstance(use.owner, nn.MultiheadAttention)}
        self.vocabularies = {
            use.shape[0]
            for use in uses
            if self._embedding_type(use) == "token_embedding" and _is_vocabulary(use)
        }
        self.query_sizes = self._query_sizes()
        self.first_conv = next(
            (use for use in uses if is_conv(use.owner) and use.leaf == "weight"), None
        )

    def by_map(self, use: Use, layer_map: LayerMap | None) -> Decision | None:
        """What a person's own layer map says: the match that ends last wins, then the longest."""
        if layer_map is None or use.leaf == "bias" or not is_compressible(use.shape):
            return None
        if is_norm(use.owner):
            return None
        path, best, found = (*use.path, use.leaf), (0, 0), ""
        for layer_type, patterns in layer_map.items():
            for pattern in patterns:
                parts = tuple(pattern.split("."))
                for end in range(len(parts), len(path) + 1):
                    if path[end - len(parts) : end] == parts and (end, len(parts)) > best:
                        best, found = (end, len(parts)), layer_type
        if not found:
            return None
        return self._decision(use, found, "layer map")

    def decide(self, use: Use) -> Decision:
        owner, source = use.owner, "name" if use.owner is None else "module"
        if is_norm(owner):
            return Decision("norm", "module", None, True)
        if "bias" in use.leaf.split("_"):
            return Decision("bias", "name", None, True)
        if not is_compressible(use.shape):
            kind = "scalar" if max(use.shape, default=1) == 1 else "vector"
            return Decision(kind, "shape", None, True)
        if isinstance(owner, nn.MultiheadAttention):
            return self._multihead(use)
        embedding = self._embedding_type(use)
        if embedding == "relative_bias":
            return Decision(embedding, source, None, False, "Table 1 has no rule for it")
        if embedding is not None:
            return self._decision(use, embedding, source)
        if is_conv(owner) or is_transposed_conv(owner):
            if self._is_first_conv(use):
                return self._decision(use, "vision_first", "module")
            return Decision("conv", "module", None, False, "Table 1 has no rule for it")
        unusable = None
        for role, prefix, pattern in self._candidates(use):
            if self._evident(use, role, prefix, pattern):
                decision = self._decision(use, role, "module and name" if owner else "name")
                if decision.reached:
                    return decision
                unusable = unusable or decision
        sequential = self._sequential_role(use)
        if sequential is not None:
            return self._decision(use, sequential, source)
        kind = "linear" if use.out_axis is not None and owner is not None else "unknown"
        return unusable or Decision(kind, source, None, False, "; ".join(use.notes))

    def _decision(self, use: Use, layer_type: str, source: str) -> Decision:
        rule, note = self._rule(use, layer_type)
        reached = rule is not None or layer_type == "norm"
        return Decision(layer_type, source, rule, reached, note)

    def _rule(self, use: Use, layer_type: str) -> tuple[Axes | Split | None, str]:
        told = TABLE_1[layer_type]
        if told is None:
            return None, ""
        if told == LAST:
            # Embeddings, and position tables of shape (N, D) or (1, N, D).
            if len(use.shape) == 2 or (len(use.shape) == 3 and 1 in use.shape[:2]):
                return (len(use.shape) - 1,), ""
            return None, f"which axis of {use.shape} is the position is unknown"
        if use.out_axis is None and len(use.shape) == 3:
            self._orient_experts(use)
        if use.out_axis is None:
            return None, "; ".join(use.notes) or "which axis is the output is unknown"
        if layer_type == "attention_qkv":
            return fused.qkv_rule(use, self.query_sizes.get(id(use)))
        if layer_type == "mlp_gate_up" or (layer_type == "mlp_up" and self._is_doubled(use)):
            if getattr(use.owner, "is_concatenated", True) is False or "GptOss" in _kind(use):
                return None, "gate and up alternate: they are not two parts"
            if use.owner is None and len(use.shape) == 3 and use.out_axis == 2:
                return None, "gate and up alternate in some models stored so: pass model="
            return fused.halves_rule(use, ("gate", "up")), "gate, up"
        return (use.in_axes if told == FAN_IN else (use.out_axis,)), ""

    def _candidates(self, use: Use) -> list[tuple[str, Path, Path]]:
        """Roles that the end of the path names, with what stands before: longest name first."""
        found = self._known.get(id(use))
        if found is None:
            path = use.role_path
            found = [
                (role, path[: -len(pattern)], pattern)
                for role, pattern in packaged_patterns()
                if path[-len(pattern) :] == pattern
            ]
            self._known[id(use)] = found
        return found

    def _evident(self, use: Use, role: str, prefix: Path, pattern: Path) -> bool:
        near = self.roles[prefix]
        raw = use.leaf != "weight"
        if raw and not (
            role == "position_embedding" or (len(use.shape) == 3 and role[:3] == "mlp")
        ):
            return False  # a bare parameter: nobody says how it is multiplied
        if raw and len(use.shape) == 2 and use.shape[0] <= 3:
            return False  # coordinates in the plane or in space, which a Fourier embedding projects
        if role in _QKV:
            return all(other in near for other in _QKV)
        if role == "attention_output":
            if len(pattern) == 1:
                return prefix in self.attention
            anchor = (*prefix, *pattern[:1])
            return any(path[: len(anchor)] == anchor for path in self.attention)
        if role in (*_UPS, "mlp_down"):
            return self._leads_back(use, role, near)
        if role == "lm_head":
            named = pattern == ("lm_head",) or use.out_size in self.vocabularies
            return not use.numbered and use.out_size > 1 and named
        if role == "vision_classification":
            alone = pattern != ("fc",) or use is self._last_linear()
            return not use.numbered and use is self.last_of.get(use.role_path) and alone
        if role == "vision_first":
            return use.owner is None or isinstance(use.owner, nn.Linear)
        return role in ("attention_qkv", "position_embedding") or use.owner is None

    def _leads_back(self, use: Use, role: str, near: Mapping[str, list[Use]]) -> bool:
        """An up and a down projection of one block, whose shapes undo each other."""
        partners = (
            near.get("mlp_down", [])
            if role in _UPS
            else [u for up in _UPS for u in near.get(up, [])]
        )
        for partner in partners:
            up, down = (use, partner) if role in _UPS else (partner, use)
            if up is down or len(up.shape) != len(down.shape):
                continue
            for each in (up, down):
                if each.out_axis is None and len(each.shape) == 3:
                    self._orient_pair(up, down)
            if up.out_axis is None or down.out_axis is None:
                continue
            if _inner(up) == down.out_size and up.out_size in (_inner(down), 2 * _inner(down)):
                return True
        return False

    def _orient_pair(self, up: Use, down: Use) -> None:
        """Expert weights (E, out, in) or (E, in, out), told apart by how two of them fit."""
        (e1, a, b), (e2, c, d) = up.shape, down.shape
        if e1 != e2:
            return
        stored = getattr(up.owner, "is_transposed", None)
        out_in = a in (d, 2 * d) and b == c
        in_out = b in (c, 2 * c) and a == d
        if out_in and in_out:  # square: only the module can tell
            out_in, in_out = stored is False, stored is True
        if out_in == in_out:
            return
        axis = 1 if out_in else 2
        for each in (up, down):
            each.out_axis, each.in_axes = axis, (3 - axis,)

    def _orient_experts(self, use: Use) -> None:
        for role, prefix, _ in self._candidates(use):
            if role in (*_UPS, "mlp_down"):
                self._leads_back(use, role, self.roles[prefix])

    def _is_doubled(self, use: Use) -> bool:
        """An up projection twice as wide as the down projection takes: gate and up in one."""
        for role, prefix, _ in self._candidates(use):
            if role == "mlp_up":
                downs = [d for d in self.roles[prefix].get("mlp_down", []) if d is not use]
                return any(use.out_size == 2 * _inner(d) for d in downs) and not any(
                    use.out_size == _inner(d) for d in downs
                )
        return False

    def _query_sizes(self) -> dict[int, int]:
        """Outputs of the query in fused weights: the inputs of the attention output beside it."""
        fused_at = {
            prefix: [id(use) for use in roles["attention_qkv"]]
            for prefix, roles in self.roles.items()
            if "attention_qkv" in roles
        }
        sizes: dict[int, int] = {}
        for use in self.uses:
            for role, prefix, pattern in self._candidates(use):
                if role == "attention_output" and use.out_axis is not None:
                    anchor = prefix if len(pattern) == 1 else (*prefix, *pattern[:1])
                    for key in fused_at.get(anchor, ()):
                        sizes.setdefault(key, use.in_size)
        return sizes

    def _multihead(self, use: Use) -> Decision:
        if use.leaf == "in_proj_weight" and use.shape[0] % 3 == 0:
            rule = fused.thirds_rule(use)
            return Decision("attention_qkv", "module", rule, True, "query, key, value")
        parts = {"q_proj_weight": _QKV[0], "k_proj_weight": _QKV[1], "v_proj_weight": _QKV[2]}
        role = parts.get(use.leaf)
        if role is None:
            return Decision("unknown", "module", None, False)
        axes: Axes = (1,) if TABLE_1[role] == FAN_IN else (0,)
        return Decision(role, "module", axes, True)

    def _embedding_type(self, use: Use) -> str | None:
        roles = {role for role, _, _ in self._candidates(use)}
        if use.owner is not None:
            if use.leaf == "weight" and is_embedding(use.owner, use.shape):
                if _RELATIVE & set(use.path):
                    return "relative_bias"
                positions = "position_embedding" in roles
                return "position_embedding" if positions else "token_embedding"
            return None
        if _RELATIVE & set(use.path):
            return "relative_bias"
        if len(use.shape) == 2 and use.leaf == "weight" and not use.numbered:
            for role in ("position_embedding", "token_embedding"):
                if role in roles:
                    return role
        return None

    def _is_first_conv(self, use: Use) -> bool:
        """The layer that looks at the picture: a patch embedding, or the first convolution."""
        if not isinstance(use.owner, (nn.Conv2d, nn.Conv3d)) or use.leaf != "weight":
            return False
        if any(role == "vision_first" for role, _, _ in self._candidates(use)):
            return True
        return use is self.first_conv and use.owner.in_channels <= 4 and use.owner.groups == 1

    def _last_linear(self) -> Use | None:
        linear = [u for u in self.uses if u.out_axis is not None and len(u.shape) == 2]
        return linear[-1] if linear else None

    def _sequential_role(self, use: Use) -> str | None:
        """Two linear layers in an ``mlp`` that is a plain sequence: up, then down."""
        path = use.path
        if len(path) < 2 or not path[-1].isdigit() or path[-2] not in _MLP_SEQUENTIALS:
            return None
        both = [
            other
            for other in self.uses
            if other.path[:-1] == path[:-1] and other.leaf == "weight" and len(other.shape) == 2
        ]
        if len(both) != 2 or any(other.out_axis is None for other in both):
            return None
        up, down = both
        fits = up.in_size == down.out_size and up.out_size == down.in_size
        if not fits or up.out_size < up.in_size:
            return None
        return "mlp_up" if use is up else "mlp_down"


def _is_vocabulary(use: Use) -> bool:
    """Tokens that a head may predict, rather than a few learned queries or types."""
    words = set(use.role_path[-1].lower().split("_")) if use.role_path else set()
    return "type" not in words and (use.shape[0] > use.shape[-1] or bool(_TOKEN_WORDS & words))


def _kind(use: Use) -> str:
    return "" if use.owner is None else type(use.owner).__name__


def _inner(use: Use) -> int:
    """Inputs of one expert, or of the layer where there is only one."""
    size = 1
    for axis in use.in_axes:
        size *= use.shape[axis]
    return size
