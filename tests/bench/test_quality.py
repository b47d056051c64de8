"""lowmem bench quality compares equals, averages what it says, and says what it found."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowmem.bench import quality
from lowmem.bench.quality import CONTENDERS, Job, Outcome, fixed_rules, summarize, verdict
from lowmem.bench.report import Result
from lowmem.demo.gpt import GPT


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The same code on a model of a few kilobytes."""
    from lowmem.demo import gpt

    build, text, evaluate = gpt.GPT, gpt.python_text(0.2), gpt.evaluate
    monkeypatch.setattr(gpt, "GPT", lambda seed: build(1, 16, 2, 16, seed))
    monkeypatch.setattr(gpt, "python_text", lambda: text)
    monkeypatch.setattr(gpt, "evaluate", lambda model, held_out: evaluate(model, held_out, 1))


def outcomes(losses):
    """``{contender: [loss of each seed]}`` at one rate."""
    return [
        Outcome(Job(contender, 1e-3, seed, 10), loss, 0.0 if contender == "AdamW" else 0.9, 0.45)
        for contender, several in losses.items()
        for seed, loss in enumerate(several)
    ]


def test_rules_of_the_contenders():
    model = GPT(1, 16, 2, 16)
    static = fixed_rules("Slim static", model)
    wrong = fixed_rules("wrong axis", model)
    one = fixed_rules("one value", model)
    assert static["blocks.0.attn.q_proj.weight"] == (1,)
    assert wrong["blocks.0.attn.q_proj.weight"] == [0]
    assert wrong["blocks.0.attn.v_proj.weight"] == [1]
    for name, param in model.named_parameters():
        averaged = param.dim() == 2
        assert (one[name] == [0, 1]) == averaged
        assert (wrong[name] is None) == (not averaged)
        if averaged:
            assert list(wrong[name]) != list(static[name])
    with pytest.raises(ValueError, match="other"):
        fixed_rules("other", model)


def test_without_rules_the_slim_run_is_the_adamw_run():
    """The same start, the same batches, the same hyper-parameters: only the rules differ."""
    adam = quality.train_one(Job("AdamW", 3e-3, 1, 12))
    slim = quality.train_one(Job("Slim SNR", 3e-3, 1, 12, rules={}))
    assert slim.loss == pytest.approx(adam.loss, rel=1e-4)
    assert slim.saved_v == adam.saved_v == 0
    other = quality.train_one(Job("AdamW", 3e-3, 2, 12))
    assert other.loss != adam.loss


def test_calibration_gives_rules_for_the_trained_model():
    rules = quality.calibrate(3e-4, 20)
    model = GPT(1, 16, 2, 16)
    assert set(rules) == {name for name, _ in model.named_parameters()}
    assert any(rules.values())
    assert 0 < quality.train_one(Job("Slim SNR", 3e-3, 0, 10, rules)).saved_v < 1


def test_differences_are_taken_seed_by_seed():
    losses = {name: [2.0, 3.0] for name in CONTENDERS} | {"one value": [2.5, 3.5]}
    rows = {row["contender"]: row for row in summarize(outcomes(losses))}
    assert rows["one value"]["gaps"] == [0.5, 0.5]
    assert rows["one value"]["gap_text"] == "+0.500 (+0.500 to +0.500)"
    assert rows["AdamW"]["loss_text"] == "2.500 (2.000 to 3.000)"
    assert rows["AdamW"]["gap_text"] == "–"
    assert rows["Slim static"]["gap"] == 0


def test_the_verdict_names_defeats_and_victories():
    losses = {name: [2.0, 3.0] for name in CONTENDERS}
    losses |= {"wrong axis": [2.5, 3.1], "Slim SNR": [1.9, 2.9], "one value": [1.9, 3.2]}
    *notes, order = verdict(summarize(outcomes(losses)))
    said = dict(zip(CONTENDERS, notes, strict=True))
    assert "Slim SNR, AdamW, Slim static, one value, wrong axis" in order
    assert "loses to AdamW with every seed at 0.001" in said["wrong axis"]
    assert "wins with every seed at 0.001" in said["Slim SNR"]
    assert "seed" not in said["one value"] + said["Slim static"]
    assert "90.0% of the second moment saved" in said["Slim SNR"]


def test_a_run_that_diverged_is_shown_as_such():
    losses = {name: [2.0] for name in CONTENDERS} | {"one value": [math.nan]}
    rows = summarize(outcomes(losses))
    assert "nan" in next(row["loss_text"] for row in rows if row["contender"] == "one value")
    verdict(rows)
    quality.draw(rows)


def test_the_result_has_a_table_a_picture_and_comes_back_from_json(monkeypatch, tmp_path):
    losses = {name: [2.0 + number / 10, 2.2] for number, name in enumerate(CONTENDERS)}
    monkeypatch.setattr(quality, "measure", lambda rates, seeds, steps: outcomes(losses))
    parser = argparse.ArgumentParser()
    quality.configure(parser)
    args = parser.parse_args(["--seeds", "2"])
    args.quick, args.command_line = False, "lowmem bench quality"
    result = quality.run(args)
    assert "Slim static" in result.table()
    result.save(tmp_path / "quality.json")
    again = Result.load(tmp_path / "quality.json")
    assert quality.draw(again.rows).axes
    result.plot(tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    for bad in (["--seeds", "0"], ["--steps", "3"], ["--rates", "0"]):
        args = parser.parse_args(bad)
        args.quick, args.command_line = True, ""
        with pytest.raises(ValueError, match="--seeds"):
            quality.run(args)


@pytest.mark.slow
def test_the_command_from_end_to_end(monkeypatch, tmp_path):
    from lowmem.cli import main

    monkeypatch.undo()  # processes of its own: nothing patched gets there
    json = tmp_path / "q.json"
    command = ["bench", "quality", "--quick", "--seeds", "1", "--steps", "10"]
    assert main([*command, "--json", str(json)]) == 0
    rows = Result.load(json).rows
    assert [row["contender"] for row in rows] == list(CONTENDERS)
    assert all(math.isfinite(row["loss"]) for row in rows)


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("after", [0.0, 1.5, 4.0])
def test_ctrl_c_ends_it_with_its_workers(after: float, tmp_path: Path) -> None:
    """As a terminal sends it: to the command and to all that it started, importing or not."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lowmem", "bench", "quality", "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        read = b""
        while b"calibrating" not in read:
            read += process.stderr.read(1)
        time.sleep(after)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors.decode()
        assert b"stopped" in errors
        assert b"Traceback" not in errors
        deadline = time.monotonic() + 10
        while alive(process.pid):
            assert time.monotonic() < deadline, "somebody is left in the group"
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
