"""state_dict: bit-exact resume, rules in the file, AdamW's state turned into ours."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from slim.slim_models import TinyGPT, token_batches
from torch import nn

from lowmem import SlimAdamW
from lowmem.slim.axes import table1_rules
from lowmem.slim.checkpoint import compress_state_dict
from lowmem.slim.state import averaged


def build(dtype=torch.float32, rules="table1", **options):
    torch.manual_seed(0)
    model = TinyGPT().to(dtype)
    optimizer = SlimAdamW(model.named_parameters(), lr=1e-2, rules=rules, model=model, **options)
    return model, optimizer


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(left, right):
    for (name, p), q in zip(left[0].named_parameters(), right[0].parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in left[1].state[p].items():
            assert torch.equal(value, right[1].state[q][key]), (name, key)
            assert value.dtype == right[1].state[q][key].dtype, (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rules", [None, "table1"])
def test_resume_is_bit_exact(dtype, rules):
    batches = token_batches(8)
    straight = build(dtype, rules)
    train(*straight, batches)
    first = build(dtype, rules)
    train(*first, batches[:4])
    saved = through_a_file({"model": first[0].state_dict(), "optimizer": first[1].state_dict()})
    second = build(dtype, rules)
    train(*second, batches[:1])  # has state of its own, which goes
    second[0].load_state_dict(saved["model"])
    second[1].load_state_dict(saved["optimizer"])
    assert {s["exp_avg_sq"].dtype for s in second[1].state.values()} == {torch.float32}
    train(*second, batches[4:])
    assert_same(straight, second)


def test_a_persons_own_hooks_see_and_change_what_is_loaded():
    first, second = build(), build()
    train(*first, token_batches(2))
    seen = []

    def halve(optimizer, state):
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.5
        return state

    second[1].register_load_state_dict_pre_hook(halve)
    second[1].register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[second[0].lm_head.weight]["exp_avg_sq"].dtype)
    )
    given = first[1].state_dict()
    kept = copy.deepcopy(given)
    second[1].load_state_dict(given)
    assert second[1].param_groups[0]["lr"] == 0.5
    assert seen == [torch.float32]
    assert given["param_groups"] == kept["param_groups"]  # what was passed stays as it was


def test_other_rules_are_an_error_that_lists_names():
    first = build()
    train(*first, token_batches(2))
    saved = first[1].state_dict()
    rules = table1_rules(first[0])
    rules["transformer.wpe.weight"] = (0,)
    rules["transformer.h.1.attn.c_attn.weight"] = None
    second = build(rules=rules)
    train(*second, token_batches(1))
    before = copy.deepcopy(second[1].state_dict())
    with pytest.raises(ValueError, match="other rules: 2 rules differ") as caught:
        second[1].load_state_dict(saved)
    assert "transformer.wpe.weight: [1] in the file, [0] here" in str(caught.value)
    assert "transformer.h.1.attn.c_attn.weight" in str(caught.value)
    assert str(before) == str(second[1].state_dict())


def test_a_rule_that_changes_no_shape_is_still_compared():
    for left, right in (([0], [1]), ([0, 1], [1])):
        p = nn.Parameter(torch.ones(1, 1))
        first = SlimAdamW([("w", p)], rules={"w": left})
        with pytest.raises(ValueError, match="other rules"):
            SlimAdamW([("w", p)], rules={"w": right}).load_state_dict(first.state_dict())


def test_names_of_parts_and_order_of_axes_do_not_matter():
    p = nn.Parameter(torch.ones(4, 4))
    parts = [{"size": 4, "axes": [1, 0], "name": "one"}]
    first = SlimAdamW([("w", p)], rules={"w": {"split": 0, "parts": parts}})
    parts = [{"size": 4, "axes": [-2, -1]}]
    second = SlimAdamW([("w", p)], rules={"w": {"split": -2, "parts": parts}})
    second.load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TinyGPT(width=20), "shapes differ.*wte.*exp_avg"),
        (lambda: TinyGPT(layers=3), "size|number"),
        (lambda: nn.ModuleDict({"net": TinyGPT()}), "names differ.*net.transformer"),
    ],
)
def test_a_checkpoint_of_another_model(make, words):
    torch.manual_seed(0)
    model = make()
    gpt = model["net"] if isinstance(model, nn.ModuleDict) else model
    other = SlimAdamW(model.named_parameters(), rules="table1", model=model)
    train(gpt, other, token_batches(1))
    _, optimizer = build()
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_and_plain_models_share_checkpoints(wrapped):
    first, second = build(), build()
    train(*first, token_batches(2))
    compiled = torch.compile(second[0])
    named = compiled.named_parameters()
    target = SlimAdamW(named, rules=table1_rules(second[0]))
    if wrapped:
        target.load_state_dict(first[1].state_dict())
    else:
        first[1].load_state_dict(target.state_dict())


@pytest.mark.parametrize("broken", [{}, {"state": {}}, None, 3])
def test_what_is_no_checkpoint(broken):
    _, optimizer = build()
    with pytest.raises((ValueError, TypeError, AttributeError)):
        optimizer.load_state_dict(broken)


def test_a_damaged_checkpoint_changes_nothing():
    first, second = build(), build()
    train(*first, token_batches(1))
    saved = first[1].state_dict()
    for damage in (
        lambda s: s["state"][0].pop("exp_avg_sq"),
        lambda s: s["state"][0].update(step="x"),
        lambda s: s["param_groups"][0]["rules"].popitem(),
        lambda s: s["state"][0].update(exp_avg=torch.zeros(2)),
        lambda s: s["state"][0].update(max_exp_avg_sq=torch.zeros(2)),
    ):
        broken = copy.deepcopy(saved)
        damage(broken)
        with pytest.raises(ValueError, match="checkpoint"):
            second[1].load_state_dict(broken)
        assert not second[1].state


def test_without_rules_a_checkpoint_of_adamw_loads():
    theirs = [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))]
    adamw = torch.optim.AdamW(theirs, lr=1e-2)

    def step(params, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()

    for seed in range(3):
        step(theirs, adamw, seed)
    ours = copy.deepcopy(theirs)
    slim = SlimAdamW(ours)
    slim.load_state_dict(copy.deepcopy(adamw.state_dict()))
    for seed in range(3, 9):
        step(theirs, adamw, seed)
        step(ours, slim, seed)
    for p, q in zip(theirs, ours, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_compress_state_dict_converts_a_running_adamw(named, options):
    torch.manual_seed(0)
    model = TinyGPT()
    params = model.named_parameters() if named else model.parameters()
    adamw = torch.optim.AdamW(params, lr=1e-2, weight_decay=0.3, **options)
    train(model, adamw, token_batches(3))
    state = adamw.state_dict()
    kept = copy.deepcopy(state)
    compressed = through_a_file(compress_state_dict(state, "table1", model=model))
    assert str(state) == str(kept)

    slim = SlimAdamW(model.named_parameters(), rules="table1", model=model)
    slim.load_state_dict(compressed)
    assert slim.param_groups[0]["weight_decay"] == 0.3
    for p in model.parameters():
        theirs, ours = adamw.state[p], slim.state[p]
        assert torch.equal(theirs["exp_avg"], ours["exp_avg"])
        assert theirs["step"] == ours["step"]
        assert torch.equal(averaged(theirs["exp_avg_sq"], slim.rule(p)), ours["exp_avg_sq"])
    wpe = model.transformer["wpe"].weight
    expected = adamw.state[wpe]["exp_avg_sq"].double().mean(dim=1, keepdim=True)
    torch.testing.assert_close(slim.state[wpe]["exp_avg_sq"].double(), expected, rtol=1e-6, atol=0)
    qkv = model.transformer["h"][0].attn.c_attn.weight
    v = adamw.state[qkv]["exp_avg_sq"]
    parts = slim.second_moment_parts(qkv)
    torch.testing.assert_close(parts[0], v[:16].mean(dim=1, keepdim=True))
    torch.testing.assert_close(parts[2], v[32:].mean(dim=0, keepdim=True))
    train(model, slim, token_batches(2))


def test_compress_state_dict_refuses_what_it_cannot_convert():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()

    def state(kind, **options):
        optimizer = kind(model.parameters(), **options)
        optimizer.step()
        return optimizer.state_dict()

    adamw = state(torch.optim.AdamW)
    rules = {"weight": [1]}
    with pytest.raises(ValueError, match=r"model=.*names="):
        compress_state_dict(adamw, rules)
    with pytest.raises(ValueError, match="3 names for 2"):
        compress_state_dict(adamw, rules, names=["a", "b", "c"])
    with pytest.raises(ValueError, match="nearest: 'weight'"):
        compress_state_dict(adamw, {"weigth": [1]}, model=model)
    with pytest.raises(ValueError, match="axis 5"):
        compress_state_dict(adamw, {"weight": [5]}, model=model)
    with pytest.raises(ValueError, match=r"table1.*model="):
        compress_state_dict(adamw, "table1", names=["weight", "bias"])
    with pytest.raises(ValueError, match="amsgrad"):
        compress_state_dict(state(torch.optim.AdamW, amsgrad=True), rules, model=model)
    with pytest.raises(ValueError, match="L2"):
        compress_state_dict(state(torch.optim.Adam, weight_decay=0.1), rules, model=model)


def test_loading_adamw_into_rules_says_what_to_do():
    model = TinyGPT()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, token_batches(1))
    slim = SlimAdamW(model.parameters(), model=model, rules="table1")
    with pytest.raises(ValueError, match="compress_state_dict"):
        slim.load_state_dict(adamw.state_dict())


def of_parameter(**values):
    return lambda saved: saved["state"][0].update(values)


def of_group(**values):
    return lambda saved: saved["param_groups"][0].update(values)


def without(*names):
    return lambda saved: [saved["param_groups"][0].pop(name) for name in names]


DAMAGES = {
    "negative step": of_parameter(step=-1),
    "NaN step": of_parameter(step=float("nan")),
    "infinite step": of_parameter(step=torch.tensor(float("inf"))),
    "half a step": of_parameter(step=1.5),
    "three steps": of_parameter(step=torch.ones(3)),
    "complex step": of_parameter(step=torch.tensor(1j)),
    "no step": lambda saved: saved["state"][0].pop("step"),
    "complex exp_avg": of_parameter(exp_avg=torch.zeros(3, 4, dtype=torch.complex64)),
    "integer exp_avg": of_parameter(exp_avg=torch.zeros(3, 4, dtype=torch.int64)),
    "sparse exp_avg": of_parameter(exp_avg=torch.zeros(3, 4).to_sparse()),
    "list exp_avg": of_parameter(exp_avg=[0.0]),
    "complex exp_avg_sq": of_parameter(exp_avg_sq=torch.zeros(3, 4, dtype=torch.complex64)),
    "sparse exp_avg_sq": of_parameter(exp_avg_sq=torch.zeros(3, 4).to_sparse()),
    "negative exp_avg_sq": of_parameter(exp_avg_sq=-torch.ones(3, 4)),
    "state None": lambda saved: saved["state"].update({0: None}),
    "state a tensor": lambda saved: saved["state"].update({0: torch.ones(3, 4)}),
    "states None": lambda saved: saved.update(state=None),
    "groups None": lambda saved: saved.update(param_groups=None),
    "a group None": lambda saved: saved.update(param_groups=[None]),
    "no lr": without("lr"),
    "no betas": without("betas"),
    "no eps, no decay": without("eps", "weight_decay"),
    "no params": without("params"),
    "odd params": of_group(params=[[0], [1]]),
    "a parameter twice": of_group(params=[0, 0]),
    "negative lr": of_group(lr=-1),
    "lr in words": of_group(lr="x"),
    "one beta": of_group(betas=(0.9,)),
    "maximize in words": of_group(maximize="yes"),
    "too few names": of_group(param_names=["weight"]),
    "names None": of_group(param_names=[None, None]),
    "amsgrad": of_group(amsgrad=True),
    "L2 decay": of_group(weight_decay=0.1, decoupled_weight_decay=False),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_no_step_can_use_is_refused_by_load_and_by_compress(damage):
    def trained(kind):
        model = nn.Linear(4, 3)
        optimizer = kind(model.named_parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return optimizer

    optimizer = SlimAdamW(nn.Linear(4, 3).named_parameters())
    ours, theirs = trained(SlimAdamW).state_dict(), trained(torch.optim.AdamW).state_dict()
    optimizer.load_state_dict(copy.deepcopy(ours))
    before = copy.deepcopy(optimizer.state_dict())
    for saved in (ours, theirs):
        broken = copy.deepcopy(saved)
        damage(broken)
        with pytest.raises(ValueError, match=r"checkpoint|state_dict"):
            optimizer.load_state_dict(broken)
    assert str(optimizer.state_dict()) == str(before)

    compress_state_dict(theirs, {"weight": [1]})
    damage(theirs)
    with pytest.raises(ValueError, match=r"checkpoint|state_dict|weight: "):
        compress_state_dict(theirs, {"weight": [1]})


def test_state_of_another_kind_of_optimizer_says_so():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    sgd = torch.optim.SGD(model.named_parameters(), momentum=0.9)
    sgd.step()
    for convert in (
        lambda state: compress_state_dict(state, {"weight": [1]}),
        SlimAdamW(model.named_parameters()).load_state_dict,
    ):
        with pytest.raises(ValueError, match="lacks betas, eps: it is not of an Adam"):
            convert(sgd.state_dict())
        with pytest.raises(ValueError, match="no optimizer state_dict"):
            convert({})


def test_adam_with_decay_of_the_other_kind_does_not_load():
    model = nn.Linear(3, 2)
    slim = SlimAdamW(model.parameters())
    with pytest.raises(ValueError, match=r"L2 weight_decay of 0\.1"):
        slim.load_state_dict(torch.optim.Adam(model.parameters(), weight_decay=0.1).state_dict())
    slim.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    slim.param_groups[0]["weight_decay"] = 0.1  # ours now, whatever the file was of
    slim.load_state_dict(slim.state_dict())
