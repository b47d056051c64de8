"""GPT-2's tensors by name and shape, the rules that a benchmark gives them, and their traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Bytes of memory traffic a float32 element: parameter, first moment in and out, gradient in
# (twice for column means), and the second moment in and out where it is kept whole.
PLAIN_BYTES, ROW_BYTES, COLUMN_BYTES = 28, 20, 24


def gpt2_tensors(layers: int = 12, width: int = 768, vocabulary: int = 50_257) -> nn.Module:
    """Modules with the parameters of GPT-2 by name and shape, (in, out) as it stores them."""
    import torch
    from torch import nn

    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (vocabulary, width),
        "wpe.weight": (1024, width),
    }
    for number in range(layers):
        at = f"h.{number}"
        for name, matrix in (
            ("attn.c_attn", (width, 3 * width)),
            ("attn.c_proj", (width, width)),
            ("mlp.c_fc", (width, 4 * width)),
            ("mlp.c_proj", (4 * width, width)),
        ):
            shapes[f"{at}.{name}.weight"] = matrix
            shapes[f"{at}.{name}.bias"] = (matrix[1],)
        for name in ("ln_1", "ln_2"):
            shapes[f"{at}.{name}.weight"] = shapes[f"{at}.{name}.bias"] = (width,)
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    root = nn.Module()
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        value = torch.randn(shape, generator=generator) * 0.02
        module.register_parameter(last, nn.Parameter(value))
    return root


def rules_for(kind: str, model: nn.Module) -> dict[str, Any] | None:
    """Rules for every matrix of ``gpt2_tensors``: ``none``, ``rows``, ``columns`` or ``static``."""
    if kind == "none":
        return None
    rules: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            rules[name] = None
        elif kind == "static" and "c_attn" in name:  # fan-in is axis 0 here
            size = parameter.shape[1] // 3
            parts = (("query", [0]), ("key", [0]), ("value", [1]))
            rules[name] = {
                "split": 1,
                "parts": [{"size": size, "axes": axes, "name": part} for part, axes in parts],
            }
        else:  # fan-out, and one value a token
            rules[name] = [0] if kind == "columns" else [1]
    return rules


def bytes_to_move(model: nn.Module, rules: dict[str, Any] | None) -> float:
    """Bytes a parameter and step that a fused step moves at least, on average."""
    by_axis = {0: COLUMN_BYTES, 1: ROW_BYTES}
    total = count = 0.0
    for name, parameter in model.named_parameters():
        rule = (rules or {}).get(name)
        if rule is None:
            each: float = PLAIN_BYTES
        elif isinstance(rule, dict):
            sizes = [part["size"] for part in rule["parts"]]
            each = sum(s * by_axis[p["axes"][0]] for s, p in zip(sizes, rule["parts"], strict=True))
            each /= sum(sizes)
        else:
            each = by_axis[rule[0]]
        total += each * parameter.numel()
        count += parameter.numel()
    return total / count
