"""state_dict: small, checked on load, and both ways with torch.optim.SparseAdam."""

import copy

import pytest
import torch
from torch import nn

from lowmem import DSA
from lowmem.dsa.header import StoreError


def model():
    torch.manual_seed(0)
    return nn.ModuleDict({"table": nn.Embedding(30, 6, sparse=True), "out": nn.Linear(6, 2)})


def train(net, opt, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        opt.zero_grad()
        ids = torch.randint(0, 30, (8,), generator=generator)
        net["out"](net["table"](ids)).pow(2).sum().backward()
        opt.step()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_resume_is_bit_exact(tmp_path):
    straight, halved = model(), model()
    with DSA(straight.parameters(), lr=0.1, directory="straight") as opt:
        train(straight, opt, 5, seed=1)
        train(straight, opt, 5, seed=2)
    with DSA(halved.parameters(), lr=0.1, directory="halved") as opt:
        train(halved, opt, 5, seed=1)
        torch.save(
            {"model": halved.state_dict(), "opt": opt.state_dict()}, tmp_path / "checkpoint.pt"
        )
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = model()
    again.load_state_dict(saved["model"])
    with DSA(again.parameters(), lr=0.7, directory="halved", mode="resume") as opt:
        opt.load_state_dict(saved["opt"])
        assert opt.param_groups[0]["lr"] == 0.1
        train(again, opt, 5, seed=2)
    assert same(straight, again)


def test_the_state_dict_does_not_hold_the_table():
    big = nn.Embedding(100_000, 64, sparse=True)
    with DSA(big.parameters()) as opt:
        big(torch.tensor([5])).sum().backward()
        opt.step()
        saved = opt.state_dict()
        torch.save(saved, "small.pt")
    import os

    assert os.path.getsize("small.pt") < 5_000
    assert saved["state"][0] == {"step": 1}


def test_load_refuses_another_step_with_both_numbers():
    net = model()
    with DSA(net.parameters(), directory="d") as opt:
        train(net, opt, 3)
        saved = opt.state_dict()
        train(net, opt, 2)
        with pytest.raises(StoreError, match=r"saved at step 3; the store stands at step 5"):
            opt.load_state_dict(saved)
        later = opt.state_dict()
        later["lowmem"]["stores"][0]["step"] = 9
        with pytest.raises(StoreError, match=r"saved at step 9; the store stands at step 5"):
            opt.load_state_dict(later)


def test_load_refuses_another_store(tmp_path):
    net = model()
    with DSA(net.parameters(), directory="d") as first:
        train(net, first, 3)
        saved = first.state_dict()
    with DSA(net.parameters(), directory="e") as second:
        train(net, second, 3)
        with pytest.raises(StoreError, match="the state dict belongs to store") as caught:
            second.load_state_dict(saved)
        assert saved["lowmem"]["stores"][0]["identity"] in str(caught.value)
        assert str(tmp_path / "e" / "table-000.rows") in str(caught.value)
        assert "Open the folder that it was saved with, or an export of it" in str(caught.value)
    # As it says.
    with DSA(net.parameters(), directory="d", mode="resume") as again:
        again.load_state_dict(saved)
        again.export("x")
    with DSA(net.parameters(), directory="x", mode="resume") as again:
        again.load_state_dict(saved)
    with (
        DSA(net.parameters(), directory="f") as third,
        pytest.raises(StoreError, match=r'no store is open.*mode="resume"'),
    ):
        third.load_state_dict(saved)


def test_after_overwrite_the_old_state_names_what_is_left_to_do():
    net, other = model(), model()
    with DSA(net.parameters(), directory="d") as opt:
        train(net, opt, 3)
        opt.save_checkpoint("c.pt", net)
        opt.export("x")
    with DSA(other.parameters(), directory="d", mode="overwrite") as opt:
        for steps in (0, 1):  # before and after a new store is there
            train(other, opt, steps)
            with pytest.raises(StoreError, match='at step 3, which mode="overwrite" removed') as no:
                opt.load_checkpoint("c.pt", other)
            assert 'directory=… and mode="resume"' not in str(no.value), "that store is gone"
            assert not same(other, net)
        # The two ways that it names.
        assert 'torch.load(path)["model"]' in str(no.value)
        other.load_state_dict(torch.load("c.pt")["model"])
        assert same(other, net)
        train(other, opt, 1)
    with DSA(other.parameters(), directory="x", mode="resume") as opt:
        assert opt.load_checkpoint("c.pt", other) == 3
    assert same(other, net)


def test_load_refuses_other_groups_and_changes_nothing():
    net = model()
    with DSA(net.parameters(), lr=0.1) as opt:
        train(net, opt, 2)
        saved = opt.state_dict()
        for bad in (
            {**saved, "param_groups": saved["param_groups"] * 2},
            {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0]}]},
        ):
            with pytest.raises(ValueError, match="loaded state dict"):
                opt.load_state_dict(bad)
        train(net, opt, 2)


def test_from_sparse_adam_and_back():
    first, second = model(), model()
    peer = torch.optim.SparseAdam(first["table"].parameters(), lr=0.1)
    frozen = copy.deepcopy(first)
    table, out = first["table"], first["out"]
    generator = torch.Generator().manual_seed(3)

    def grads(net, generator):
        net.zero_grad()
        ids = torch.randint(0, 30, (8,), generator=generator)
        net["out"](net["table"](ids)).pow(2).sum().backward()

    for _ in range(4):
        grads(first, generator)
        peer.step()
    assert torch.equal(out.weight, frozen["out"].weight)
    # torch -> ours, before ours has seen a gradient
    second.load_state_dict(first.state_dict())
    with DSA(second["table"].parameters(), lr=0.5) as opt:
        opt.load_state_dict(peer.state_dict())
        assert opt.param_groups[0]["lr"] == 0.1
        state = opt.read_state(second["table"].weight, torch.arange(30))
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[name], peer.state[table.weight][name])
        ahead = copy.deepcopy(generator.get_state())
        for net, optimizer in ((first, peer), (second, opt)):
            generator.set_state(ahead)
            for _ in range(3):
                grads(net, generator)
                optimizer.step()
        torch.testing.assert_close(
            first["table"].weight, second["table"].weight, rtol=1e-5, atol=1e-6
        )
        # ours -> torch
        third = model()
        third.load_state_dict(second.state_dict())
        back = torch.optim.SparseAdam(third["table"].parameters(), lr=0.9)
        back.load_state_dict(opt.state_dict(materialize=True))
        ahead = generator.get_state()
        for net, optimizer in ((second, opt), (third, back)):
            generator.set_state(ahead)
            grads(net, generator)
            optimizer.step()
    torch.testing.assert_close(second["table"].weight, third["table"].weight, rtol=1e-5, atol=1e-6)


def test_sparse_adam_that_was_given_a_weight_decay_is_sparse_adam():
    """It keeps the key and does nothing with it; moments of a table belong on disk all the same."""
    first, second = model(), model()
    peer = torch.optim.SparseAdam([{"params": [first["table"].weight], "weight_decay": 0.1}])
    first["out"](first["table"](torch.tensor([1, 2]))).sum().backward()
    peer.step()
    with DSA(second["table"].parameters()) as opt:
        with pytest.warns(UserWarning, match="does not use weight_decay=0.1"):
            opt.load_state_dict(peer.state_dict())
        assert opt.state_bytes()["disk"] > 0
        second["out"](second["table"](torch.tensor([1]))).sum().backward()
        opt.step()


def test_materialized_round_trip_of_a_mixed_model():
    first, second = model(), model()
    with DSA(first.parameters(), lr=0.1) as opt, DSA(second.parameters(), lr=0.1) as other:
        train(first, opt, 4, seed=1)
        second.load_state_dict(first.state_dict())
        other.load_state_dict(copy.deepcopy(opt.state_dict(materialize=True)))
        train(first, opt, 4, seed=2)
        train(second, other, 4, seed=2)
        assert same(first, second)


def test_from_torch_adam_for_dense_parameters():
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    peer = torch.optim.Adam(first.parameters(), lr=0.1)
    data = torch.randn(3, 4)
    first(data).sum().backward()
    peer.step()
    second.load_state_dict(first.state_dict())
    with DSA(second.parameters(), lr=0.1) as opt:
        # As in torch, loading shares tensors with the dict; a file would not.
        opt.load_state_dict(copy.deepcopy(peer.state_dict()))
        for net, optimizer in ((first, peer), (second, opt)):
            net.zero_grad()
            net(data).pow(2).sum().backward()
            optimizer.step()
        assert same(first, second)
        assert opt.state_bytes()["disk"] == 0


def test_a_moment_of_another_shape_is_refused():
    table = nn.Embedding(30, 6, sparse=True)
    other = torch.optim.SparseAdam(nn.Embedding(31, 6, sparse=True).parameters())
    other.param_groups[0]["params"][0].grad = torch.sparse_coo_tensor(
        [[1]], torch.ones(1, 6), (31, 6)
    )
    other.step()
    with (
        DSA(table.parameters()) as opt,
        pytest.raises(ValueError, match=r"shape \(30, 6\); exp_avg in the state dict is \(31, 6\)"),
    ):
        opt.load_state_dict(other.state_dict())
