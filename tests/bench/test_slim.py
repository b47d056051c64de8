"""`lowmem bench slim`: the tensors, the rules, the check, and the figures of a small run."""

from __future__ import annotations

import pytest
import torch

from lowmem.bench import slim
from lowmem.bench.report import Result
from lowmem.cli import main


def test_the_tensors_are_those_of_gpt2_124m() -> None:
    with torch.device("meta"):
        transformers = pytest.importorskip("transformers")
        model = transformers.GPT2Model(transformers.GPT2Config())
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    ours = {name: tuple(p.shape) for name, p in slim.gpt2_tensors().named_parameters()}
    assert ours == expected
    assert sum(p.numel() for p in model.parameters()) == 124_439_808


def test_bytes_that_must_move_are_those_of_the_theory() -> None:
    model = slim.gpt2_tensors(1, 24, 5000)
    figures = {
        kind: slim.bytes_to_move(model, slim.rules_for(kind, model))
        for kind in ("none", "rows", "columns", "static")
    }
    assert figures["none"] == 28
    assert figures["rows"] == pytest.approx(20, abs=0.1)
    assert figures["columns"] == pytest.approx(24, abs=0.1)
    assert figures["rows"] < figures["static"] < figures["columns"]


def test_every_contender_that_is_installed_computes_what_it_should() -> None:
    names, messages = slim.check()
    assert {"AdamW", "AdamW foreach", "AdamW fused", "Slim none", "Slim static"} <= names
    assert not [message for message in messages if "left out" in message]


def test_a_wrong_contender_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = slim._Reference
    monkeypatch.setattr(slim, "_Reference", lambda kind, model: reference("columns", model))
    _, messages = slim.check()
    assert any("Slim rows is left out" in message for message in messages)
    assert not any("Slim columns is left out" in message for message in messages)


def test_a_small_run_has_every_figure(tmp_path) -> None:
    path = tmp_path / "slim.json"
    words = ["bench", "slim", "--quick", "--layers", "1", "--repeats", "2", "--json", str(path)]
    assert main(words) == 0
    result = Result.load(path)
    rows = {row["contender"]: row for row in result.rows}
    assert {"AdamW", "Adafactor", "Slim none", "Slim static", "SNR measurement"} <= set(rows)
    assert rows["AdamW fused"]["to_fused"] == 1
    assert rows["Slim static"]["state_bytes"] < 0.51 * rows["AdamW"]["state_bytes"]
    assert rows["Slim none"]["state_bytes"] == rows["AdamW"]["state_bytes"]
    assert result.machine["update_bytes_per_s"] > 0


@pytest.mark.parametrize("option", ["--repeats", "--layers", "--threads"])
def test_nothing_to_do_is_refused(option: str, capsys) -> None:
    assert main(["bench", "slim", option, "0"]) == 2
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_a_reference_that_starves_is_said() -> None:
    rows = [{"contender": "Slim rows", "memory_share": 0.1}]
    assert slim._starved(rows) == []  # no machine without AdamW fused to go by
    assert slim._starved([*rows, {"contender": "AdamW fused", "memory_share": 0.8}]) == []
    [said] = slim._starved([{"contender": "AdamW fused", "memory_share": 0.18}])
    assert "18% of the memory's bandwidth" in said
