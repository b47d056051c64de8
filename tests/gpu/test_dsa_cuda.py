"""DSA with weights on a CUDA device: same numbers, and no optimizer state in device memory."""

import copy

import pytest
import torch
from torch import nn

from lowmem import DSA

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_equals_sparse_adam_on_the_device():
    torch.manual_seed(0)
    first = nn.Embedding(5000, 64, sparse=True).cuda()
    second = copy.deepcopy(first)
    with DSA(first.parameters(), lr=0.01) as opt:
        peer = torch.optim.SparseAdam(second.parameters(), lr=0.01)
        for _ in range(30):
            ids = torch.randint(0, 5000, (700,), device="cuda")
            for model, optimizer in ((first, opt), (second, peer)):
                optimizer.zero_grad()
                model(ids).pow(2).sum().backward()
                optimizer.step()
        torch.testing.assert_close(first.weight, second.weight, rtol=2e-5, atol=2e-6)
        state = opt.read_state(first.weight, torch.arange(5000))
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                state[name], peer.state[second.weight][name].cpu(), rtol=2e-5, atol=2e-6
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_state_on_the_device(dtype):
    table = nn.Embedding(200_000, 64, sparse=True, dtype=dtype).cuda()
    with DSA(table.parameters()) as opt:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            table(torch.randint(0, 200_000, (1000,), device="cuda")).sum().backward()
            opt.step()
            opt.zero_grad()
        torch.cuda.synchronize()
        assert opt.state_bytes()["vram"] == 0
        assert torch.cuda.memory_allocated() - before < 10_000_000
        assert not table.weight.isnan().any()


def test_pinned_buffers_are_not_given_out_too_early():
    # Many steps without a wait in between: a buffer reused while its copy is on the way
    # would write another step's rows.
    torch.manual_seed(0)
    first = nn.Parameter(torch.zeros(1000, 128, device="cuda"))
    second = nn.Parameter(torch.zeros(1000, 128))
    with DSA([first], lr=0.1) as gpu, DSA([second], lr=0.1) as cpu:
        for _ in range(200):
            ids, grads = torch.randint(0, 1000, (512,)), torch.randn(512, 128)
            gpu.step_rows(first, ids.cuda(), grads.cuda())
            cpu.step_rows(second, ids, grads)
    torch.testing.assert_close(first.cpu(), second, rtol=1e-5, atol=1e-6)


def test_grad_scaler():
    table = nn.Embedding(100, 8, sparse=True).cuda()
    before = table.weight.detach().clone()
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    with DSA(table.parameters()) as opt:
        for factor, moves in ((float("inf"), False), (1.0, True)):
            opt.zero_grad()
            scaler.scale((table(torch.tensor([3], device="cuda")) * factor).sum()).backward()
            scaler.step(opt)
            scaler.update()
            assert torch.equal(table.weight, before) != moves


def test_a_parameter_that_moved_to_the_device():
    table = nn.Embedding(20, 4, sparse=True)
    with DSA(table.parameters()) as opt:
        table(torch.tensor([1])).sum().backward()
        opt.step()
        table.weight.data = table.weight.data.cuda()
        with pytest.raises(RuntimeError, match=r"on cuda:0 now.*made for .* on cpu"):
            opt.step_rows(table.weight, torch.tensor([1]), torch.ones(1, 4))
