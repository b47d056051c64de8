"""The small training set-up is a real language model on real text, and repeats itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from lowmem.demo.gpt import GPT, evaluate, python_text, sample, train
from lowmem.slim.axes import decide_model


@pytest.fixture(scope="module")
def text():
    return python_text(1.0)


def small(seed=0):
    return GPT(layers=2, width=16, heads=2, context=16, seed=seed)


def test_the_text_is_python_and_the_held_out_part_is_apart(text):
    learned, held_out = (bytes(part.numpy()) for part in text)
    assert 1_000_000 <= len(learned) < 2_000_000
    assert len(held_out) > 16_000
    for part in (learned, held_out):
        assert part.count(b"def ") > 20
        assert part.count(b"import ") > 5
    assert held_out[2000:2200] not in learned


def test_samples_are_stretches_of_the_text(text):
    batch = sample(text[0], 5, 16, torch.Generator().manual_seed(0))
    assert batch.shape == (5, 17)
    assert batch.dtype == torch.int64
    learned = bytes(text[0].numpy())
    for row in batch:
        assert bytes(row.to(torch.uint8).numpy()) in learned


def test_a_byte_is_predicted_from_what_stands_before_it_only():
    model = small()
    text = torch.randint(256, (2, 16))
    before = model(text)
    changed = text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    after = model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_the_loss_is_nats_per_byte():
    model = small()
    text = torch.randint(256, (3, 17))
    log_p = F.log_softmax(model(text[:, :16]).double(), dim=-1)
    chosen = log_p.gather(2, text[:, 1:, None])
    assert model.loss(text).item() == pytest.approx(-chosen.mean().item(), rel=1e-5)
    assert model.loss(text).item() == pytest.approx(math.log(256), rel=0.02)  # knows nothing yet


def test_training_learns_and_repeats_itself(text):
    runs = []
    for _ in range(2):
        model = small(seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = train(model, optimizer, text[0], 40, seed=5)
        runs.append((losses, evaluate(model, text[1], batches=2)))
    assert runs[0] == runs[1]
    assert runs[0][1] < math.log(256) - 1
    other = small(seed=4)
    assert not torch.equal(other.lm_head.weight, small(seed=3).lm_head.weight)


def test_the_learning_rate_rises_and_falls(text):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    rates = []
    optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
    train(model, optimizer, text[0], 20)
    assert rates[0] == 0.5
    assert max(rates) == rates[1] == pytest.approx(1.0)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert 0.1 < rates[-1] < 0.12


def test_a_callback_can_end_the_training(text):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def on_step(step, loss):
        seen.append((step, loss))
        return step < 3

    losses = train(model, optimizer, text[0], 50, on_step=on_step)
    assert seen == list(enumerate(losses, 1))
    assert len(losses) == 3


def test_every_weight_has_a_static_rule():
    model = GPT()
    decisions = decide_model(model)
    for name, param in model.named_parameters():
        assert decisions[id(param)].reached, name
        assert (decisions[id(param)].rule is None) == (param.dim() < 2), name
