"""Static rules: Table 1 turned into tensor axes by the module that owns each weight."""

from __future__ import annotations

import pytest
import torch
from slim.slim_models import TinyGPT, TinyResNet
from torch import nn

from lowmem.slim.axes import decide_model, decide_names, table1_rules
from lowmem.slim.rulesfile import Part, Split


def rules_of(model: nn.Module) -> dict:
    """Table 1 for a model, without what is not averaged."""
    return {name: rule for name, rule in table1_rules(model).items() if rule is not None}


def qkv(out_axis: int, q: int, kv: int, repeat: int = 1) -> Split:
    fan_in = (1 - out_axis,)
    parts = (
        Part(q, fan_in, "query"),
        Part(kv, fan_in, "key"),
        Part(kv, (out_axis,), "value"),
    )
    return Split(out_axis, parts, repeat)


def test_nanogpt_style_model():
    block = {
        "attn.c_attn.weight": qkv(0, 16, 16),
        "attn.c_proj.weight": (0,),
        "mlp.c_fc.weight": (0,),
        "mlp.c_proj.weight": (0,),
    }
    expected = {f"transformer.h.{n}.{name}": rule for n in range(2) for name, rule in block.items()}
    expected |= {"transformer.wte.weight": (1,), "transformer.wpe.weight": (1,)}
    assert rules_of(TinyGPT()) == expected


def test_transformer_encoder_layer():
    layer = nn.TransformerEncoderLayer(16, 4, 32)
    assert rules_of(layer) == {
        "self_attn.in_proj_weight": qkv(0, 16, 16),
        "self_attn.out_proj.weight": (0,),
        "linear1.weight": (0,),
        "linear2.weight": (0,),
    }


def test_multihead_attention_with_separate_projections():
    attention = nn.MultiheadAttention(16, 4, kdim=12, vdim=10, add_bias_kv=True)
    assert rules_of(attention) == {
        "q_proj_weight": (1,),
        "k_proj_weight": (1,),
        "v_proj_weight": (0,),
        "out_proj.weight": (0,),
    }


def test_resnet_blocks_average_the_first_layer_and_the_classifier_only():
    model = TinyResNet()
    assert rules_of(model) == {"conv1.weight": (1, 2, 3), "fc.weight": (1,)}
    decisions = decide_model(model)
    inner = decisions[id(model.layer1[0].conv1.weight)]
    assert (inner.layer_type, inner.reached) == ("conv", False)


@pytest.mark.parametrize(
    ("conv", "weight_shape", "fan_in", "fan_out"),
    [
        (nn.Conv1d(4, 6, 3), (6, 4, 3), (1, 2), (0,)),
        (nn.Conv2d(4, 6, 3), (6, 4, 3, 3), (1, 2, 3), (0,)),
        (nn.Conv3d(4, 6, 3), (6, 4, 3, 3, 3), (1, 2, 3, 4), (0,)),
        (nn.ConvTranspose1d(4, 6, 3), (4, 6, 3), (0, 2), (1,)),
        (nn.ConvTranspose2d(4, 6, 3), (4, 6, 3, 3), (0, 2, 3), (1,)),
        (nn.ConvTranspose3d(4, 6, 3), (4, 6, 3, 3, 3), (0, 2, 3, 4), (1,)),
    ],
)
def test_fan_in_of_a_convolution_is_all_axes_but_the_outputs(conv, weight_shape, fan_in, fan_out):
    assert tuple(conv.weight.shape) == weight_shape
    model = nn.ModuleDict({"stem": conv})
    for layer_type, axes in (("vision_first", fan_in), ("mlp_down", fan_out)):
        decided = decide_model(model, {layer_type: ["stem"]})
        assert decided[id(conv.weight)].rule == axes


class Holder(nn.Module):
    """A module with a bare parameter of a given name."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1, 9, 4), (2,)),  # one value a position
        ((9, 1, 4), (2,)),
        ((9, 4), (1,)),
        ((1, 3, 3, 4), None),  # channels first or last? nobody says
        ((1, 1, 4), None),
    ],
)
def test_bare_position_embeddings(shape, axes):
    assert table1_rules(Holder(pos_embed=shape))["pos_embed"] == axes


def test_class_tokens_scalars_and_bare_matrices_stay_whole():
    model = Holder(cls_token=(1, 1, 8), scale=(), weight=(4, 4), q_proj=(4, 4), logit=(1, 8))
    assert rules_of(model) == {}


class OddNorm(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class ChannelRMSNorm(OddNorm):
    pass


def test_norms_of_any_shape_stay_whole_and_are_no_omission():
    model = nn.ModuleDict(
        {
            "query": nn.LayerNorm((4, 5)),
            "key": ChannelRMSNorm((4, 5, 1)),
            "embed": nn.BatchNorm2d(4),
            "fc1": nn.GroupNorm(2, 4),
        }
    )
    decided = decide_model(model).values()
    assert all(d.rule is None and d.reached and d.layer_type in ("norm", "bias") for d in decided)


class Experts(nn.Module):
    def __init__(self, gate_up: tuple[int, ...], down: tuple[int, ...], **told: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(gate_up))
        self.down_proj = nn.Parameter(torch.randn(down))
        for name, value in told.items():
            setattr(self, name, value)


def halves(axis: int, size: int) -> Split:
    return Split(axis, (Part(size, (axis,), "gate"), Part(size, (axis,), "up")))


def test_experts_are_never_averaged_over_experts():
    out_in = nn.ModuleDict({"experts": Experts((3, 2 * 6, 4), (3, 4, 6))})
    assert rules_of(out_in) == {
        "experts.gate_up_proj": halves(1, 6),
        "experts.down_proj": (1,),
    }
    in_out = nn.ModuleDict({"experts": Experts((3, 4, 2 * 6), (3, 6, 4))})
    assert rules_of(in_out) == {
        "experts.gate_up_proj": halves(2, 6),
        "experts.down_proj": (2,),
    }


def test_experts_whose_gate_and_up_alternate_are_not_split():
    model = Experts((3, 4, 12), (3, 6, 4), is_concatenated=False, is_transposed=True)
    assert rules_of(model) == {"down_proj": (2,)}


class Heads(nn.Module):
    """Attention that stores query, key and value head by head, as GPT-NeoX does."""

    def __init__(self, heads: int | None) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(12, 36)
        self.dense = nn.Linear(12, 12)
        if heads:
            self.num_attention_heads = heads


def test_interleaved_heads_are_split_head_by_head_or_not_at_all():
    known = rules_of(nn.ModuleDict({"attention": Heads(3)}))
    assert known["attention.query_key_value.weight"] == qkv(0, 4, 4, repeat=3)
    unknown = nn.ModuleDict({"attention": Heads(None)})
    assert "attention.query_key_value.weight" not in rules_of(unknown)
    decision = decide_model(unknown)[id(unknown["attention"].query_key_value.weight)]
    assert not decision.reached
    assert "heads" in decision.note


def linear_tree(**layers: tuple[int, int]) -> nn.Module:
    """``a__b=(inputs, outputs)``: nested modules with linear leaves."""
    root = nn.Module()
    for path, (inside, out) in layers.items():
        *above, leaf = path.split("__")
        at = root
        for name in above:
            if not hasattr(at, name):
                at.add_module(name, nn.Module())
            at = getattr(at, name)
        at.add_module(leaf, nn.Linear(inside, out))
    return root


@pytest.mark.parametrize(
    "layers",
    [
        {"ffn__key": (8, 32), "ffn__value": (32, 8), "ffn__receptance": (8, 8)},  # RWKV's MLP
        {"fc1": (64, 32), "fc2": (32, 10)},  # a classifier, no MLP block
        {"mixer__in_proj": (8, 32), "mixer__out_proj": (16, 8)},  # Mamba: no attention
        {"qkv_norm_proj": (8, 24), "unquery": (8, 8), "embedding_proj": (8, 8)},
        {"attn__kv_proj": (8, 16), "attn__o_proj": (8, 8)},
        {"q_proj__lora_A__default": (8, 2), "q_proj__lora_B__default": (2, 8)},
        {"blocks__0__head": (8, 8), "blocks__0__output": (8, 8)},
    ],
    ids=lambda layers: next(iter(layers)),
)
def test_names_without_evidence_prove_nothing(layers):
    model = linear_tree(**layers)
    assert rules_of(model) == {}
    assert {d.layer_type for d in decide_model(model).values()} == {"linear", "bias"}


def test_substrings_of_names_prove_nothing():
    shapes = {
        "backbone.conv.weight": (8, 3, 3, 3),
        "attn.query_layernorm.weight": (8, 8),
        "fcqkv.weight": (24, 8),
        "embedder.weight": (10, 4),
    }
    assert all(decision.rule is None for decision in decide_names(shapes).values())


def test_grouped_queries_take_the_query_size_from_the_output_projection():
    model = linear_tree(attn__qkv_proj=(16, 16 + 4 + 4), attn__o_proj=(16, 16))
    assert "attn.qkv_proj.weight" not in rules_of(model)  # might be a value wider than the query
    model.attn.num_heads, model.attn.num_key_value_heads = 4, 1
    assert rules_of(model)["attn.qkv_proj.weight"] == qkv(0, 16, 4)
    model.attn.num_key_value_heads = 2  # of other sizes
    assert "attn.qkv_proj.weight" not in rules_of(model)
    del model.attn.num_key_value_heads
    model.attn.multi_query = True
    assert rules_of(model)["attn.qkv_proj.weight"] == qkv(0, 16, 4)


@pytest.mark.parametrize(("inside", "q", "v"), [(24, 8, 32), (8, 4, 16), (40, 8, 32)])
def test_a_value_wider_than_the_query_is_not_cut_as_grouped_queries(inside, q, v):
    model = linear_tree(attn__qkv=(inside, 2 * q + v), attn__proj=(v, inside))
    decision = decide_model(model)[id(model.attn.qkv.weight)]
    assert decision.rule is None
    assert not decision.reached


def test_a_mlp_that_is_a_plain_sequence():
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    assert rules_of(nn.ModuleDict({"mlp": mlp})) == {"mlp.0.weight": (0,), "mlp.2.weight": (0,)}
    assert rules_of(nn.ModuleDict({"classify": mlp})) == {}


def test_names_alone_decide_as_the_model_does_where_they_can():
    model = TinyGPT()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    by_name = {name: d.rule for name, d in decide_names(shapes).items()}
    assert by_name == table1_rules(model)


def test_names_alone_tell_stored_in_out_by_the_shapes_beside():
    flipped = {
        "h.0.attn.c_attn.weight": (16, 48),
        "h.0.attn.c_proj.weight": (16, 16),
        "h.0.mlp.c_fc.weight": (16, 64),
        "h.0.mlp.c_proj.weight": (64, 16),
    }
    rules = {name: d.rule for name, d in decide_names(flipped).items()}
    assert rules == {
        "h.0.attn.c_attn.weight": qkv(1, 16, 16),
        "h.0.attn.c_proj.weight": (1,),
        "h.0.mlp.c_fc.weight": (1,),
        "h.0.mlp.c_proj.weight": (1,),
    }
    alone = decide_names({"h.0.attn.c_proj.weight": (16, 16)})["h.0.attn.c_proj.weight"]
    assert alone.rule is None


def test_tied_weights_are_decided_once():
    model = TinyGPT()
    decision = decide_model(model)[id(model.lm_head.weight)]
    assert decision.rule == (1,)
    assert "lm_head" in decision.note


def test_tied_weights_whose_uses_disagree_stay_whole():
    model = linear_tree(
        attn__q_proj=(8, 8), attn__k_proj=(8, 8), attn__v_proj=(8, 8), attn__o_proj=(8, 8)
    )
    model.attn.v_proj.weight = model.attn.q_proj.weight  # fan-out here, fan-in there
    decision = decide_model(model)[id(model.attn.q_proj.weight)]
    assert decision.rule is None
    assert not decision.reached
    assert "disagree" in decision.note


def test_wrappers_in_names_make_no_difference():
    plain = table1_rules(TinyGPT())
    model = TinyGPT()
    model.transformer["h"][0] = torch.compile(model.transformer["h"][0])
    assert table1_rules(torch.compile(model)) == plain
    shapes = {f"module._orig_mod.{n}": tuple(p.shape) for n, p in TinyGPT().named_parameters()}
    assert [d.rule for d in decide_names(shapes).values()] == list(plain.values())


def test_a_few_learned_queries_are_no_vocabulary():
    model = linear_tree(iou_head__proj_out=(16, 4), head=(16, 4))
    model.mask_tokens = nn.Embedding(4, 16)
    model.shared = Holder(positional_embedding=(2, 16))
    types = {
        name: decide_model(model)[id(param)].layer_type for name, param in model.named_parameters()
    }
    assert types["iou_head.proj_out.weight"] == "linear"
    assert types["head.weight"] == "vision_classification"
    assert types["shared.positional_embedding"] == "unknown"
    for name in ("tok_emb", "embedding", "word_embeddings"):
        gpt = linear_tree(head=(16, 5))
        gpt.add_module(name, nn.Embedding(5, 16))
        assert decide_model(gpt)[id(gpt.head.weight)].layer_type == "lm_head", name
    lstm = linear_tree(decoder=(16, 40))
    lstm.encoder = nn.Embedding(40, 16)
    assert decide_model(lstm)[id(lstm.decoder.weight)].layer_type == "lm_head"
