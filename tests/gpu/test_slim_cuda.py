"""The triton kernels on a GPU: the reference's numbers, repeatable, through SlimAdamW too."""

from __future__ import annotations

import pytest
import torch

from lowmem.slim import reference

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from lowmem.kernels import cuda

HYPER = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def problem(shape: tuple[int, ...], axes: tuple[int, ...], dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(shape, generator=generator).to("cuda", dtype)
    grad = torch.randn(shape, generator=generator).to("cuda", dtype)
    kept = [1 if i in axes else n for i, n in enumerate(shape)]
    return param, grad, torch.zeros_like(param), torch.zeros(kept, device="cuda")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("axes", [(), (0,), (1,)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (768, 2304), (2304, 768), (5003, 129)])
def test_equals_the_reference(shape, axes, dtype) -> None:
    param, grad, moment, second = problem(shape, axes, dtype)
    exact = [t.double() for t in (param, grad, moment, second)]
    assert cuda.supports(param, grad, axes)
    for step in (1, 2, 3):
        cuda.slim_adamw_([param], [grad], [moment], [second], [axes], [step], **HYPER)
        reference.slim_adamw_(*([t] for t in exact), [axes], [step], **HYPER)
    for ours, theirs in zip((param, moment, second), (exact[0], *exact[2:]), strict=True):
        size = TOLERANCE[dtype]
        torch.testing.assert_close(
            ours.double(), theirs, rtol=size, atol=size * float(theirs.abs().max())
        )


def test_column_sums_repeat_bit_for_bit() -> None:
    results = []
    for _ in range(3):
        param, grad, moment, second = problem((5003, 129), (0,), torch.float32)
        cuda.slim_adamw_([param], [grad], [moment], [second], [(0,)], [1], **HYPER)
        results.append(param)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_slimadamw_on_a_gpu_equals_the_one_on_the_cpu() -> None:
    from lowmem import SlimAdamW

    rules = {"0.weight": [1], "0.bias": None, "2.weight": [0], "2.bias": None}
    weights = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)
        ).to(device)
        optimizer = SlimAdamW(model.named_parameters(), lr=1e-2, rules=rules)
        inputs = torch.linspace(-1, 1, 16 * 64).view(16, 64).to(device)
        for _ in range(5):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
        weights.append([p.detach().cpu() for p in model.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
