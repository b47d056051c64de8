"""What people who know torch.optim expect of an optimizer, SlimAdamW with rules included."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from slim.slim_models import TinyGPT, token_batches
from torch import nn

from lowmem import SlimAdamW
from lowmem.slim.axes import table1_rules
from lowmem.slim.checkpoint import compress_state_dict
from lowmem.slim.rulesfile import write_rules


def train(model, optimizer, batches, before_step=lambda: None):
    for batch in batches:
        optimizer.zero_grad()
        model.loss(batch).backward()
        before_step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return TinyGPT()


def test_the_published_call_runs_unchanged(tmp_path, monkeypatch, gpt):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules").mkdir()
    write_rules(
        "rules/slimadam.json", {n: r for n, r in table1_rules(gpt).items() if "c_attn" not in n}
    )
    learning_rate, beta1, beta2, weight_decay = 1e-3, 0.9, 0.95, 0.1
    for rules_json_path, layer_map_path in (
        ("rules/slimadam.json", None),
        (None, "layer_map.json"),
        (None, None),
    ):
        optimizer = SlimAdamW(
            gpt.named_parameters(),
            lr=learning_rate,
            betas=(beta1, beta2),
            weight_decay=weight_decay,
            rules_json_path=rules_json_path,
            layer_map_path=layer_map_path,
        )
        train(gpt, optimizer, token_batches(2))
        saved = optimizer.report().second_moment_saved
        assert saved > 0.3 if rules_json_path or layer_map_path else saved == 0


def test_a_layer_map_of_ones_own_goes_by_whole_components(tmp_path, monkeypatch, gpt):
    monkeypatch.chdir(tmp_path)
    patterns = {"mlp_down": ["mlp.c_proj"], "attention_query": ["n.c_proj", "c"], "norm": ["ln_1"]}
    (tmp_path / "layer_map.json").write_text(json.dumps(patterns))
    optimizer = SlimAdamW(gpt.named_parameters(), layer_map_path="layer_map.json")
    rows = {row.name: row for row in optimizer.report()}
    assert rows["transformer.h.0.mlp.c_proj.weight"].decided_by == "layer map"
    assert rows["transformer.h.0.attn.c_proj.weight"].decided_by != "layer map"


@pytest.mark.parametrize("how", ["named", "model", "groups", "tensors of groups"])
def test_all_ways_to_pass_parameters_train_alike(how, gpt):
    rules = table1_rules(gpt)
    ways = {
        "named": lambda: SlimAdamW(gpt.named_parameters(), lr=1e-2, rules=rules),
        "model": lambda: SlimAdamW(gpt.parameters(), lr=1e-2, rules=rules, model=gpt),
        "groups": lambda: SlimAdamW(
            [
                {"params": [(n, p) for n, p in gpt.named_parameters() if p.dim() > 1]},
                {"params": [(n, p) for n, p in gpt.named_parameters() if p.dim() < 2]},
            ],
            lr=1e-2,
            rules=rules,
        ),
        "tensors of groups": lambda: SlimAdamW(
            [{"params": list(gpt.parameters())[:3]}, {"params": list(gpt.parameters())[3:]}],
            lr=1e-2,
            rules="table1",
            model=gpt,
        ),
    }
    other = copy.deepcopy(gpt)
    static = SlimAdamW(other.parameters(), lr=1e-2, rules="table1", model=other)
    expected = train(other, static, token_batches(5))
    got = train(gpt, ways[how](), token_batches(5))
    assert same(got, expected)


def test_groups_have_their_own_hyper_parameters():
    params = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = SlimAdamW(
        [
            {"params": [("a", params[0])], "lr": 0.5, "weight_decay": 0.0},
            {"params": [("b", params[1])], "maximize": True},
        ],
        lr=0.25,
        weight_decay=0.1,
        rules={"a": [1], "b": [0]},
    )
    for p in params:
        p.grad = torch.full((4, 4), 2.0)
    optimizer.step()
    torch.testing.assert_close(params[0], torch.full((4, 4), 0.5))
    torch.testing.assert_close(params[1], torch.full((4, 4), 1 - 0.025 + 0.25))


def test_closures_by_position_and_by_name(gpt):
    (batch,) = token_batches(1)
    optimizer = SlimAdamW(gpt.parameters(), model=gpt, rules="table1")

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = gpt.loss(batch)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure=closure) < first


def test_schedulers_drive_the_learning_rate(gpt):
    optimizer = SlimAdamW(gpt.parameters(), lr=0.1, model=gpt, rules="table1")
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    before = optimizer.param_groups[0]["lr"]
    train(gpt, optimizer, token_batches(1))
    cycle.step()
    assert optimizer.param_groups[0]["lr"] != before
    assert optimizer.param_groups[0]["betas"][0] != 0.9  # OneCycleLR cycles it too


def test_a_tensor_learning_rate_is_read_at_every_step():
    param = nn.Parameter(torch.zeros(3, 3))
    lr = torch.tensor(1.0)
    optimizer = SlimAdamW([("w", param)], lr=lr, weight_decay=0, rules={"w": [1]})
    moved = []
    for value in (1.0, 0.0, 2.0):
        lr.fill_(value)
        before = param.detach().clone()
        param.grad = torch.ones(3, 3)
        optimizer.step()
        moved.append((before - param.detach())[0, 0].item())
    assert moved == pytest.approx([1, 0, 2], abs=1e-6)


def test_hooks_run(gpt):
    optimizer = SlimAdamW(gpt.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(gpt, optimizer, token_batches(1))
    assert seen == ["pre", "post"]


def test_a_grad_scaler_skips_infinite_steps_and_unscales_the_others(gpt):
    other = copy.deepcopy(gpt)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = SlimAdamW(gpt.parameters(), lr=1e-2, model=gpt, rules="table1")
    plain = SlimAdamW(other.parameters(), lr=1e-2, model=other, rules="table1")
    expected = train(other, plain, token_batches(3))
    for number, batch in enumerate(token_batches(3)):
        if number == 1:
            optimizer.zero_grad()
            scaler.scale(gpt.loss(batch)).backward()
            next(gpt.parameters()).grad[0, 0] = torch.inf
            before = [p.detach().clone() for p in gpt.parameters()]
            scaler.step(optimizer)
            scaler.update()
            assert same(before, gpt.parameters())
        optimizer.zero_grad()
        scaler.scale(gpt.loss(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    for got, want in zip(gpt.parameters(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_clipping_and_accumulation(gpt):
    other = copy.deepcopy(gpt)
    batches = token_batches(4)
    big = torch.cat(batches)
    one = SlimAdamW(gpt.parameters(), lr=1e-2, model=gpt, rules="table1")
    two = SlimAdamW(other.parameters(), lr=1e-2, model=other, rules="table1")
    gpt.loss(big).backward()
    for batch in batches:
        (other.loss(batch) / len(batches)).backward()
    for model, optimizer in ((gpt, one), (other, two)):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for p, q in zip(gpt.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


def test_frozen_parameters_and_missing_gradients_take_no_state(gpt):
    gpt.transformer["h"][0].requires_grad_(False)
    frozen = [p.detach().clone() for p in gpt.transformer["h"][0].parameters()]
    unused = nn.Parameter(torch.ones(3, 3))
    named = [*gpt.named_parameters(), ("unused", unused)]
    optimizer = SlimAdamW(named, rules=table1_rules(gpt))
    train(gpt, optimizer, token_batches(2))
    assert same(frozen, gpt.transformer["h"][0].parameters())
    assert unused not in optimizer.state
    assert not any(p in optimizer.state for p in gpt.transformer["h"][0].parameters())
    gpt.transformer["h"][0].requires_grad_(True)  # thawed later: its own step count
    train(gpt, optimizer, token_batches(1))
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {1, 3}


def test_a_tied_weight_is_one_parameter_under_all_its_names(gpt):
    every = list(gpt.named_parameters(remove_duplicate=False))
    optimizer = SlimAdamW(every, lr=1e-2, rules={"lm_head.weight": [1]})
    (row,) = (row for row in optimizer.report() if row.axes)
    assert row.name == "transformer.wte.weight"
    other = copy.deepcopy(gpt)
    by_model = SlimAdamW(other.parameters(), lr=1e-2, rules={"lm_head.weight": [1]}, model=other)
    assert same(train(gpt, optimizer, token_batches(3)), train(other, by_model, token_batches(3)))
    with pytest.raises(ValueError, match="tied"):
        SlimAdamW(every, rules={"lm_head.weight": [1], "transformer.wte.weight": [0]})


@pytest.mark.parametrize("rules_wrapped", [False, True])
@pytest.mark.parametrize("names_wrapped", [False, True])
def test_compiled_models_match_rules_of_plain_ones(rules_wrapped, names_wrapped, gpt):
    prefix = "_orig_mod."
    rules = {(prefix if rules_wrapped else "") + n: r for n, r in table1_rules(gpt).items()}
    named = torch.compile(gpt).named_parameters() if names_wrapped else gpt.named_parameters()
    optimizer = SlimAdamW(named, rules=rules)
    assert optimizer.rule(gpt.transformer["wpe"].weight) == (1,)


def test_add_param_group_is_ruled_too(gpt):
    head = [(n, p) for n, p in gpt.named_parameters() if "wte" in n]
    rest = [(n, p) for n, p in gpt.named_parameters() if "wte" not in n]
    optimizer = SlimAdamW(head, rules=table1_rules(gpt), model=gpt)
    optimizer.add_param_group({"params": rest, "lr": 1e-4})
    assert optimizer.rule(gpt.transformer["wpe"].weight) == (1,)
    train(gpt, optimizer, token_batches(2))
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [("x", nn.Parameter(torch.ones(2)))], "lr": -1})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alike(copied, gpt):
    batches = token_batches(6)
    optimizer = SlimAdamW(gpt.parameters(), lr=1e-2, model=gpt, rules="table1")
    train(gpt, optimizer, batches[:3])
    model, other = copied((gpt, optimizer))
    assert same(train(gpt, optimizer, batches[3:]), train(model, other, batches[3:]))
    assert str(other.report()) == str(optimizer.report())


def test_parameters_may_move_to_new_storage(gpt):
    other = copy.deepcopy(gpt)
    batches = token_batches(6)
    moved = SlimAdamW(gpt.parameters(), lr=1e-2, model=gpt, rules="table1")
    stays = SlimAdamW(other.parameters(), lr=1e-2, model=other, rules="table1")
    train(gpt, moved, batches[:3])
    for p in gpt.parameters():
        p.data = p.data.clone()
    got = train(gpt, moved, batches[3:])
    assert same(got, train(other, stays, batches))


def test_an_empty_parameter_is_stepped_over():
    empty = nn.Parameter(torch.zeros(0, 4))
    optimizer = SlimAdamW([("w", empty)], rules={"w": [0]})
    empty.grad = torch.zeros(0, 4)
    optimizer.step()
    assert optimizer.state[empty]["step"] == 1


def test_report_says_what_the_state_takes_to_the_byte(gpt):
    optimizer = SlimAdamW(gpt.named_parameters(), rules="table1", model=gpt)
    train(gpt, optimizer, token_batches(1))
    report = optimizer.report()
    for row, param in zip(report, gpt.parameters(), strict=True):
        v = optimizer.state[param]["exp_avg_sq"]
        assert row.bytes_after == v.numel() * v.element_size()
        assert row.bytes_before == param.numel() * 4
    held = sum(
        v.numel() * v.element_size()
        for state in optimizer.state.values()
        for k, v in state.items()
        if k != "step"
    )
    assert held == report.state_bytes_after
    total = sum(p.numel() for p in gpt.parameters())
    assert report.state_bytes_before == 8 * total
    assert report.second_moment_saved == pytest.approx(1 - report.bytes_after / (4 * total))
    text = str(report)
    for expected in ("c_attn", "query, key: axis 1; value: axis 0", "whole state"):
        assert expected in text


def test_gpt2_saves_what_the_paper_says():
    with torch.device("meta"):
        model = TinyGPT(vocab=50304, width=768, heads=12, layers=12, bias=False)
        model.transformer["wpe"] = nn.Embedding(1024, 768)
    report = SlimAdamW(model.named_parameters(), rules="table1", model=model).report()
    assert report.second_moment_saved == pytest.approx(0.9988, abs=0.0004)
    assert report.state_saved == pytest.approx(0.499, abs=0.001)


def test_verbose_prints_once_and_the_library_is_silent_otherwise(gpt, capsys):
    SlimAdamW(gpt.named_parameters(), rules="table1", model=gpt)
    assert capsys.readouterr().out == ""
    optimizer = SlimAdamW(gpt.named_parameters(), rules="table1", model=gpt, verbose=True)
    train(gpt, optimizer, token_batches(1))
    assert capsys.readouterr().out.count("whole state") == 1


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (None, "-"),
        ([1], "axis 1"),
        ([0, 1], "axes 0, 1"),
        (([[1], "query"], [[1], "key"], [[0], "value"]), "query, key: axis 1; value: axis 0"),
        (([[1], "gate"], [None, "up"]), "gate: axis 1; up: -"),
        (([[0, 1], ""], [None, "rest"]), "part 1 (12 of axis 0): axes 0, 1; rest: -"),
    ],
)
def test_report_says_in_words_what_is_averaged(rule, words):
    """The parts of a split that are treated alike stand together."""

    def report(repeat):
        if isinstance(rule, tuple):
            size = 24 // len(rule) // repeat
            parts = [{"size": size, "axes": axes, "name": name} for axes, name in rule]
            given = {"split": 0, "parts": parts, "repeat": repeat}
        else:
            given = rule
        (weight,) = SlimAdamW(
            [("weight", torch.nn.Parameter(torch.rand(24, 6)))], rules={"weight": given}
        ).report()
        return weight.axes_text()

    assert report(1) == words
    if isinstance(rule, tuple):
        assert report(2) == f"2 x ({words.replace('12', '6')})"


def test_unreached_parameters_are_logged_and_reported(gpt, caplog):
    optimizer = SlimAdamW(gpt.named_parameters(), rules={"transformer.wte.weight": [1]})
    assert len(optimizer.report().unreached) == 9
    assert "transformer.wpe.weight" in caplog.text


def test_bfloat16_state_is_float32_where_it_matters(gpt):
    gpt.to(torch.bfloat16)
    optimizer = SlimAdamW(gpt.parameters(), lr=1e-2, model=gpt, rules="table1")
    train(gpt, optimizer, token_batches(2))
    assert {s["exp_avg_sq"].dtype for s in optimizer.state.values()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}


def test_a_step_allocates_nothing_of_a_parameters_size():
    """Peak RSS of a process over one step, beside a parameter of 8 million elements."""
    script = """
        import torch
        from torch import nn
        from lowmem import SlimAdamW

        torch.set_num_threads(1)
        split = {"split": 0, "parts": [{"size": 1024, "axes": a} for a in ([1], [0])]}

        def peak():
            with open("/proc/self/status") as file:
                return int(next(line for line in file if line.startswith("VmHWM")).split()[1])

        for dtype in (torch.float32, torch.bfloat16):
            for rule in (None, [0], [1], [0, 1], split):
                p = nn.Parameter(torch.zeros(2048, 4096, dtype=dtype))
                p.grad = torch.ones_like(p)
                optimizer = SlimAdamW([("w", p)], rules={"w": rule})
                optimizer.step()
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
                before = peak()
                optimizer.step()
                print(dtype, rule, (peak() - before) * 1024, sep="; ")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    if "/proc/self" in done.stderr:
        pytest.skip("this system does not let a process reset its peak RSS")
    assert done.returncode == 0, done.stderr
    grown = {
        line.rpartition("; ")[0]: int(line.split("; ")[2]) for line in done.stdout.splitlines()
    }
    assert len(grown) == 10
    assert max(grown.values()) < 8 << 20, grown  # the parameter has 16 MiB in bfloat16


def test_two_models_of_the_same_names_are_decided_each_for_itself():
    def position_table(*shape):
        model = nn.Module()
        model.pos_embed = nn.Parameter(torch.randn(shape))
        return model

    shapes = [(6, 4), (1, 6, 4), (5, 4)]
    tables = [position_table(*shape) for shape in shapes]
    optimizer = SlimAdamW(
        [{"params": list(table.named_parameters())} for table in tables], rules="table1"
    )
    for table, shape in zip(tables, shapes, strict=True):
        (alone,) = table.parameters()
        single = SlimAdamW(table.named_parameters(), rules="table1")
        assert optimizer.rule(alone) == single.rule(alone), shape
        alone.grad = torch.ones_like(alone)
    optimizer.step()
    assert optimizer.state[tables[1].pos_embed]["exp_avg_sq"].shape == (1, 6, 1)

    gpts = [TinyGPT(width=8), TinyGPT(width=16)]
    both = SlimAdamW([{"params": list(g.named_parameters())} for g in gpts], rules="table1")
    for each in gpts:
        single = SlimAdamW(each.named_parameters(), rules="table1")
        for name, param in each.named_parameters():
            assert both.rule(param) == single.rule(param), name
            param.grad = torch.ones_like(param)
    both.step()


class Wrapping(nn.Module):
    """A model with a submodule that is called as DDP calls what it wraps."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4, bias=False)
        self.weight = nn.Parameter(torch.randn(4, 4))


@pytest.mark.parametrize("given_model", [False, True])
def test_a_submodule_called_module_is_not_its_parent(given_model):
    model = Wrapping()

    def chosen(rules):
        optimizer = SlimAdamW(
            model.named_parameters(), model=model if given_model else None, rules=rules
        )
        return {name: optimizer.rule(param) for name, param in model.named_parameters()}, optimizer

    found, first = chosen({"weight": [0], "module.weight": [1]})
    assert found == {"weight": (0,), "module.weight": (1,)}
    assert chosen({"module.weight": [1]})[0] == {"weight": None, "module.weight": (1,)}
    assert chosen({"weight": [1]})[0] == {"weight": (1,), "module.weight": None}

    swapped = SlimAdamW(
        reversed(list(model.named_parameters())), rules={"weight": [0], "module.weight": [1]}
    )
    with pytest.raises(ValueError, match="names differ"):
        swapped.load_state_dict(first.state_dict())
    adamw = torch.optim.AdamW(model.named_parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    adamw.step()
    compressed = compress_state_dict(
        adamw.state_dict(), {"weight": [0], "module.weight": [1]}, model=model
    )
    first.load_state_dict(compressed)
    assert first.state[model.module.weight]["exp_avg_sq"].shape == (4, 1)


@pytest.mark.parametrize("rules", ["table1", {"head.weight": [1]}])
def test_a_pickle_holds_none_of_the_weights_that_are_left_out(rules):
    model = nn.ModuleDict({"frozen": nn.Linear(500, 500), "head": nn.Linear(4, 3)})
    named = dict(model.named_parameters())
    head = [(name, named[name]) for name in ("head.weight", "head.bias")]
    optimizer = SlimAdamW(head, model=model, rules=rules)
    pickled = pickle.dumps(optimizer)
    assert len(pickled) < 500 * 500
    loaded = pickle.loads(pickled)
    assert [row.name for row in loaded.report().rows] == ["head.weight", "head.bias"]
    assert [row.axes for row in loaded.report().rows] == [
        row.axes for row in optimizer.report().rows
    ]
    optimizer.add_param_group({"params": [("frozen.bias", named["frozen.bias"])]})
    loaded.add_param_group({"params": [("more.weight", nn.Parameter(torch.randn(3, 4)))]})
