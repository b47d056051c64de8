"""Each a clear error at construction or load, and nothing changed by it."""

from __future__ import annotations

import pytest
import torch
from slim.slim_models import TinyGPT
from torch import nn

from lowmem import SlimAdamW
from lowmem.slim.axes import table1_rules


def linear():
    return nn.Linear(4, 3)


def split(**changes):
    rule = {"split": 0, "parts": [{"size": 2, "axes": [1]}, {"size": 1, "axes": [0]}]}
    return {**rule, **changes}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lr": -1.0}, ValueError, "lr: -1.0"),
        ({"lr": float("nan")}, ValueError, "lr"),
        ({"lr": "fast"}, TypeError, "'fast'"),
        ({"lr": torch.ones(2)}, ValueError, "one element"),
        ({"betas": (0.9, 1.0)}, ValueError, "index 1: 1.0"),
        ({"betas": (-0.1, 0.9)}, ValueError, "index 0"),
        ({"betas": 0.9}, TypeError, "betas"),
        ({"betas": (0.9,)}, TypeError, "betas"),
        ({"eps": -1e-8}, ValueError, "eps"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay"),
        ({"weight_decay": None}, TypeError, "weight_decay"),
        ({"maximize": "no"}, TypeError, "'no'"),
        ({"rules": {"wieght": [1]}}, ValueError, "'wieght' .nearest: 'weight'"),
        ({"rules": {"weight": [2]}}, ValueError, r"axis 2 .*\(3, 4\)"),
        ({"rules": {"weight": [-3]}}, ValueError, "axis -3"),
        ({"rules": {"weight": [0, 0]}}, ValueError, "twice"),
        ({"rules": {"weight": [1, -1]}}, ValueError, "twice"),
        ({"rules": {"bias": [1]}}, ValueError, "'bias': axis 1"),
        ({"rules": {"weight": 1}}, TypeError, "list of ints"),
        ({"rules": {"weight": "01"}}, TypeError, "list of ints"),
        ({"rules": {"weight": [1.0]}}, TypeError, "1.0"),
        ({"rules": {"weight": [True]}}, TypeError, "True"),
        ({"rules": {1: [1]}}, TypeError, "name"),
        ({"rules": [("weight", [1])]}, TypeError, "dict"),
        ({"rules": 3}, TypeError, "dict"),
        ({"rules": {"weight": split(split=2)}}, ValueError, "axis 2"),
        ({"rules": {"weight": split(split="0")}}, TypeError, "'0'"),
        ({"rules": {"weight": split(repeat=2)}}, ValueError, "add up to 6, but axis 0 .* has 3"),
        ({"rules": {"weight": split(repeat=0)}}, ValueError, "repeat"),
        ({"rules": {"weight": split(parts=[])}}, ValueError, "empty"),
        ({"rules": {"weight": split(parts=[{"size": 3}])}}, ValueError, "axes"),
        ({"rules": {"weight": split(parts=[{"size": 0, "axes": None}])}}, ValueError, "at least 1"),
        ({"rules": {"weight": split(parts=[[3, 1]])}}, TypeError, "size"),
        ({"rules": {"weight": split(extra=1)}}, ValueError, "extra"),
        ({"rules": {"weight": [1], "module.weight": [0]}}, ValueError, "differ"),
        ({"rules": "no/such/file.json"}, OSError, "no/such/file"),
        ({"rules_json_path": "no/such/file.json"}, OSError, "no/such/file"),
        ({"rules_json_path": 3}, TypeError, "rules_json_path"),
        ({"layer_map_path": "no/such/map.json"}, OSError, "no/such/map"),
        ({"rules_json_path": "a", "layer_map_path": "b"}, ValueError, "one source of rules"),
        ({"rules": "table1", "layer_map_path": "b"}, ValueError, "one source of rules"),
        ({"rules": {}, "rules_json_path": "a"}, ValueError, "one source of rules"),
        ({"model": "gpt"}, TypeError, "nn.Module"),
    ],
)
def test_arguments(options, error, words):
    with pytest.raises(error, match=words):
        SlimAdamW(linear().named_parameters(), **options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"weight": [1],\n "bias": [}', "line 2"),
        ("", "line 1"),
        ("[1, 2]", "holds a list"),
        ('{"weight": [1], "weight": [0]}', "'weight' stands in it twice"),
        ('{"weight": [NaN]}', "NaN"),
        ('{"weight": {"split": 0}}', "parts"),
        ('{"weight": "__import__(\'os\')"}', "list of ints"),
        ("[" * 100_000, "rules file"),
        ("\x00", "line 1"),
    ],
)
@pytest.mark.parametrize("argument", ["rules", "rules_json_path"])
def test_rules_files(tmp_path, text, words, argument):
    path = tmp_path / "rules.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        SlimAdamW(linear().named_parameters(), **{argument: path})
    assert "rules.json" in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "rules.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="UTF-8"):
        SlimAdamW(linear().named_parameters(), rules=path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"mlp_dwon": ["fc2"]}', "mlp_dwon.*known are"),
        ('{"mlp_down": "fc2"}', "list of names"),
        ('{"mlp_down": [3]}', "list of names"),
        ('{"mlp_down"\n ["fc2"]}', "line 2"),
    ],
)
def test_layer_maps(tmp_path, text, words):
    path = tmp_path / "layer_map.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        SlimAdamW(linear().named_parameters(), layer_map_path=path)


@pytest.mark.parametrize("rules", [{"weight": [1]}, "table1"])
def test_rules_without_names(rules):
    with pytest.raises(ValueError, match=r"(?=.*named_parameters\(\)).*model="):
        SlimAdamW(linear().parameters(), rules=rules)


def test_rules_of_another_model():
    rules = table1_rules(TinyGPT(layers=3))
    with pytest.raises(ValueError, match=r"12 of 40 rules.*transformer\.h\.2\.ln_1.* and 7 more"):
        SlimAdamW(TinyGPT().named_parameters(), rules=rules)


def test_rules_may_name_what_the_model_has_and_the_optimizer_leaves_out():
    model = TinyGPT()
    part = model.transformer["h"][0]
    optimizer = SlimAdamW(part.parameters(), rules=table1_rules(model), model=model)
    assert optimizer.rule(part.mlp.c_fc.weight) == (0,)


@pytest.mark.parametrize("params", [[], {}, [{"params": []}]])
def test_nothing_to_optimise(params):
    if params == [{"params": []}]:  # an empty group is allowed in torch, too
        assert SlimAdamW(params).param_groups[0]["params"] == []
        return
    with pytest.raises(ValueError, match="empty parameter list"):
        SlimAdamW(params)


@pytest.mark.parametrize(
    "params", [torch.ones(3), ["weight"], [{"lr": 1}], [torch.ones(3, requires_grad=True) * 2]]
)
def test_what_is_no_parameter(params):
    with pytest.raises((TypeError, ValueError)):
        SlimAdamW(params)


def test_some_names_missing():
    with pytest.raises(ValueError, match="names"):
        SlimAdamW([("a", nn.Parameter(torch.ones(2))), nn.Parameter(torch.ones(2))])


def test_a_parameter_in_two_groups():
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        SlimAdamW([{"params": [p]}, {"params": [p]}])


def test_complex_parameters():
    with pytest.raises(ValueError, match=r"'w' is complex.*view_as_real"):
        SlimAdamW([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])


def test_sparse_embeddings_are_refused_at_construction_where_the_model_is_known():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0.weight'.*lowmem\.DSA"):
        SlimAdamW(model.parameters(), model=model)
    SlimAdamW(model[1].parameters(), model=model)


def test_sparse_gradients_are_refused_before_anything_is_updated():
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2))
    optimizer = SlimAdamW(reversed(list(model.named_parameters())))
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ValueError, match=r"'0.weight'.*sparse.*lowmem\.DSA"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="DSA"):  # and where it shows, at construction
        SlimAdamW(model.named_parameters())


def test_a_parameter_that_changed_its_shape_is_not_stepped_on():
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = SlimAdamW([("w", p)], rules={"w": [1]})
    p.grad = torch.ones(4, 4)
    optimizer.step()
    p.data = torch.ones(8, 4)
    with pytest.raises(ValueError, match=r"'w' has shape \(8, 4\), its gradient \(4, 4\)"):
        optimizer.step()
    p.grad = torch.ones(8, 4)
    with pytest.raises(ValueError, match="new optimizer"):
        optimizer.step()
    assert torch.equal(p, torch.ones(8, 4))


def test_lazy_parameters_say_what_to_do_first(tmp_path):
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    for make in (
        lambda: SlimAdamW(lazy.parameters()),
        lambda: SlimAdamW(lazy.named_parameters(), rules={"1.weight": [1]}),
        lambda: SlimAdamW(lazy[1].parameters(), model=lazy, rules="table1"),
        lambda: table1_rules(lazy),
    ):
        with pytest.raises(ValueError, match=r"no shape yet.*LazyLinear"):
            make()
    lazy(torch.ones(1, 5))
    SlimAdamW(lazy.named_parameters(), rules={"0.weight": [1]})


def test_names_of_a_layer_map_that_match_nothing_are_reported(tmp_path, caplog):
    path = tmp_path / "map.json"
    path.write_text('{"mlp_up": ["c_fc", "mlp.c_fcc"], "lm_head": ["hed"]}')
    model = TinyGPT()
    for given in ({}, {"model": model}):
        caplog.clear()
        SlimAdamW(model.named_parameters(), layer_map_path=path, **given)
        assert "'mlp.c_fcc' (mlp_up), 'hed' (lm_head)" in caplog.text
        assert "'c_fc'" not in caplog.text
    path.write_text('{"mlp_up": ["c_fc"], "lm_head": ["lm_head"]}')
    caplog.clear()
    SlimAdamW(model.named_parameters(), layer_map_path=path, model=model)
    assert "layer map names" not in caplog.text


def test_what_rules_may_be_is_said_where_it_is_none_of_it(tmp_path):
    params = list(linear().named_parameters())
    with pytest.raises(
        FileNotFoundError, match=r"'tabel1'.*no such file.*\"table1\" .did you mean"
    ):
        SlimAdamW(params, rules="tabel1")
    with pytest.raises(FileNotFoundError, match=r"no such file; .* rules may be a dict") as error:
        SlimAdamW(params, rules=tmp_path / "slim.json")
    assert "did you mean" not in str(error.value)
    with pytest.raises(IsADirectoryError, match="is a folder; rules= takes a rules file"):
        SlimAdamW(params, rules=tmp_path)


@pytest.mark.parametrize("option", ["rules", "rules_json_path"])
def test_snr_records_in_the_place_of_rules_are_told_from_broken_json(option, tmp_path):
    path = tmp_path / "snr.csv"
    path.write_text('step,key,shape,compress_dims,snr,mean_sqr,var\n1,w,"(3, 4)","(0,)",2,1,1\n')
    with pytest.raises(ValueError, match=r"records, not rules: `lowmem rules --snr_filename .*csv"):
        SlimAdamW(linear().named_parameters(), **{option: path})


@pytest.mark.parametrize("rules", [None, "table1", {"weight": [1]}])
def test_a_model_that_owns_none_of_the_parameters_is_refused(rules):
    with pytest.raises(ValueError, match="none of the 2 parameters belongs to model="):
        SlimAdamW(linear().named_parameters(), model=linear(), rules=rules)
    model = linear()
    SlimAdamW([("weight", model.weight)], model=model, rules="table1").add_param_group(
        {"params": [("other.weight", nn.Parameter(torch.ones(2, 2)))]}
    )


def test_static_rules_say_what_a_model_reaches_and_names_do_not(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Embedding(9, 8))
    with pytest.raises(ValueError, match="model=model, which also tells every layer's type"):
        SlimAdamW(model.parameters(), rules="table1")
    with pytest.raises(ValueError, match=r"model.named_parameters\(\) instead") as error:
        SlimAdamW(model.parameters(), rules={"0.weight": [1]})
    assert "layer's type" not in str(error.value)
    by_name = SlimAdamW(model.named_parameters(), rules="table1")
    assert "with model= their layers' types decide" in caplog.text
    caplog.clear()
    by_type = SlimAdamW(model.named_parameters(), model=model, rules="table1")
    assert "with model=" not in caplog.text
    assert len(by_type.report().unreached) < len(by_name.report().unreached)


def test_a_module_in_place_of_its_parameters_is_told_what_to_pass() -> None:
    with pytest.raises(TypeError, match=r"pass model\.named_parameters\(\)"):
        SlimAdamW(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
