"""Static rules on real architectures, built from configs without weights."""

from __future__ import annotations

import re

import pytest

from lowmem.slim.axes import decide_model
from lowmem.slim.rulesfile import Split

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
DEEP = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 48}
GROUPED = {**DEEP, "num_key_value_heads": 2}


def split(axis: int, *parts: tuple[int, int], repeat: int = 1) -> tuple:
    return (axis, repeat, *parts)


LLAMA = {
    "embed_tokens.weight": 1,
    "self_attn.q_proj.weight": 1,
    "self_attn.k_proj.weight": 1,
    "self_attn.v_proj.weight": 0,
    "self_attn.o_proj.weight": 0,
    "lm_head.weight": 1,
}
BERT = {
    "word_embeddings.weight": 1,
    "position_embeddings.weight": 1,
    "token_type_embeddings.weight": 1,
    "attention.self.query.weight": 1,
    "attention.self.key.weight": 1,
    "attention.self.value.weight": 0,
    "attention.output.dense.weight": 0,
    "intermediate.dense.weight": 0,
    "layer.N.output.dense.weight": 0,
}

# model, config, rule by the end of the name. Everything else must stay whole.
CASES = [
    (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "n_positions": 16},
        {
            "wte.weight": 1,
            "wpe.weight": 1,
            "c_attn.weight": split(1, (32, 0), (32, 0), (32, 1)),
            "attn.c_proj.weight": 1,
            "c_fc.weight": 1,
            "mlp.c_proj.weight": 1,
        },
    ),
    (
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED,
        {**LLAMA, "gate_proj.weight": 0, "up_proj.weight": 0, "down_proj.weight": 0},
    ),
    (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**GROUPED, "pad_token_id": 0},
        {
            "embed_tokens.weight": 1,
            "qkv_proj.weight": split(0, (32, 1), (16, 1), (16, 0)),
            "o_proj.weight": 0,
            "gate_up_proj.weight": split(0, (48, 0), (48, 0)),
            "down_proj.weight": 0,
            "lm_head.weight": 1,
        },
    ),
    (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4},
        {**LLAMA, "gate_up_proj": split(1, (48, 1), (48, 1)), "down_proj": 1},
    ),
    (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        DEEP,
        {
            "embed_in.weight": 1,
            "query_key_value.weight": split(0, (8, 1), (8, 1), (8, 0), repeat=4),
            "attention.dense.weight": 0,
            "dense_h_to_4h.weight": 0,
            "dense_4h_to_h.weight": 0,
            "lm_head.weight": 1,
        },
    ),
    ("BertForMaskedLM", "BertConfig", DEEP, BERT),
    (
        "BertForSequenceClassification",
        "BertConfig",
        DEEP,
        {**BERT, "classifier.weight": 1},
    ),
    (
        "T5ForConditionalGeneration",
        "T5Config",
        {"num_layers": 2, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "vocab_size": 50},
        {
            "shared.weight": 1,
            "Attention.q.weight": 1,
            "Attention.k.weight": 1,
            "Attention.v.weight": 0,
            "Attention.o.weight": 0,
            "wi.weight": 0,
            "wo.weight": 0,
        },
    ),
    (
        "MambaForCausalLM",
        "MambaConfig",
        {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 50},
        {"embeddings.weight": 1},
    ),
]


def build(model: str, config: str, options: dict):
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def shown(rule):
    if isinstance(rule, Split):
        parts = [(part.size, part.axes[0]) for part in rule.parts]
        return split(rule.axis, *parts, repeat=rule.repeat)
    return rule if rule is None or len(rule) > 1 else rule[0]


@pytest.mark.parametrize(
    ("model", "config", "options", "expected"), CASES, ids=lambda c: str(c)[:20]
)
def test_rules_of_an_architecture(model, config, options, expected):
    built = build(model, config, options)
    decided = decide_model(built)
    used = set()
    for name, param in built.named_parameters():
        plain = re.sub(r"\.\d+\.", ".N.", name)
        ends = [end for end in expected if plain.endswith(end)]
        end = max(ends, key=len, default=None)
        assert shown(decided[id(param)].rule) == expected.get(end), name
        used.add(end)
    assert set(expected) <= used


def test_vit():
    options = {**DEEP, "image_size": 16, "patch_size": 4}
    del options["vocab_size"]
    model = build("ViTForImageClassification", "ViTConfig", options)
    decided = decide_model(model)
    types = {
        name: (decided[id(p)].layer_type, decided[id(p)].rule)
        for name, p in model.named_parameters()
        if decided[id(p)].rule is not None
    }
    assert types["classifier.weight"] == ("vision_classification", (1,))
    (patches,) = (kind for name, kind in types.items() if "patch_embeddings" in name)
    assert patches == ("vision_first", (1, 2, 3))
    (positions,) = (kind for name, kind in types.items() if name.endswith("position_embeddings"))
    assert positions == ("position_embedding", (2,))
    by_type = {}
    for layer_type, rule in types.values():
        by_type.setdefault(layer_type, []).append(rule)
    for layer_type, axis in {
        "attention_query": 1,
        "attention_key": 1,
        "attention_value": 0,
        "attention_output": 0,
        "mlp_up": 0,
        "mlp_down": 0,
    }.items():
        assert by_type[layer_type] == [(axis,)] * 2, layer_type


def test_the_interleaved_split_of_gpt_neox_names_the_right_rows():
    """Zero the rows that the rule calls values: then the attention's values must be zero."""
    import torch

    model = build("GPTNeoXForCausalLM", "GPTNeoXConfig", DEEP)
    layer = model.gpt_neox.layers[0].attention
    rule = decide_model(model)[id(layer.query_key_value.weight)].rule
    with torch.no_grad():
        layer.query_key_value.bias.zero_()
        for start, part in rule.runs():
            if part.name == "value":
                layer.query_key_value.weight[start : start + part.size] = 0
        layer.dense.bias.zero_()
    seen = []
    layer.dense.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    model(torch.arange(6)[None])
    assert seen[0].abs().max() == 0
