"""DDP and DTensor, in one process over gloo."""

from __future__ import annotations

import copy

import pytest
import torch
from slim.slim_models import TinyGPT, token_batches
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowmem import SlimAdamW
from lowmem.slim.axes import table1_rules

distributed = torch.distributed
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)


@pytest.fixture
def group(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("named", ["inside", "outside"])
def test_ddp(group, named):
    torch.manual_seed(0)
    plain = TinyGPT()
    model = DistributedDataParallel(copy.deepcopy(plain))
    rules = table1_rules(plain)
    source = model if named == "outside" else model.module
    optimizers = (
        SlimAdamW(plain.named_parameters(), lr=1e-2, rules=rules),
        SlimAdamW(source.named_parameters(), lr=1e-2, rules=rules),
    )
    for batch in token_batches(3):
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            out = net(batch[:, :-1]).flatten(0, 1)
            nn.functional.cross_entropy(out, batch[:, 1:].flatten()).backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q)
    optimizers[0].load_state_dict(optimizers[1].state_dict())
    table1 = SlimAdamW(model.parameters(), rules="table1", model=model)
    assert [row.axes for row in table1.report()] == [row.axes for row in optimizers[0].report()]


@pytest.mark.parametrize("rule", [None, [0], [1], [0, 1]])
def test_dtensor_equals_the_whole_tensor(group, rule):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    whole = nn.Parameter(torch.randn(8, 6))
    sharded = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)]))
    optimizers = [SlimAdamW([("w", p)], lr=1e-2, rules={"w": rule}) for p in (whole, sharded)]
    for _ in range(5):
        grad = torch.randn(8, 6)
        whole.grad, sharded.grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    state = optimizers[1].state[sharded]
    assert isinstance(state["exp_avg_sq"], DTensor)
    assert state["exp_avg_sq"].shape == optimizers[0].state[whole]["exp_avg_sq"].shape
    torch.testing.assert_close(sharded.full_tensor(), whole.detach(), rtol=1e-5, atol=1e-6)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    optimizers[1].step()


def test_dtensors_are_not_split(group):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    param = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)]))
    rule = {"split": 0, "parts": [{"size": 4, "axes": [0]}] * 2}
    with pytest.raises(ValueError, match="DTensor"):
        SlimAdamW([("w", param)], rules={"w": rule})
