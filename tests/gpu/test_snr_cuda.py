"""SNR on the GPU: the same figures as on the CPU, and one synchronisation a measurement."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowmem import SNRTracker, snr

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-32])
@pytest.mark.parametrize("shape", [(300, 700), (5000, 900), (4, 30, 50), (64, 3, 3, 3)])
def test_equals_the_cpu(shape, scale):
    v = torch.rand(shape).square() * scale
    for axes in [(0,), (1,), (0, 1), tuple(range(1, len(shape)))]:
        assert snr(v.cuda(), axes) == pytest.approx(snr(v, axes), rel=1e-9)


def test_one_synchronisation_a_measurement(tmp_path):
    model = nn.Sequential(nn.Linear(40, 50), nn.LayerNorm(50), nn.Linear(50, 30)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    model(torch.randn(8, 40, device="cuda")).square().sum().backward()
    optimizer.step()
    tracker = SNRTracker(save_dir=tmp_path)
    tracker.measure_and_save(model=model, optimizer=optimizer, step=1)  # warm
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        tracker.measure_and_save(model=model, optimizer=optimizer, step=2)
    copies = [event for event in profile.events() if "DtoH" in event.name]
    assert len(copies) == 1
    for record in tracker.records[: len(tracker.records) // 2]:
        v = optimizer.state[dict(model.named_parameters())[record.key]]["exp_avg_sq"].cpu()
        assert record.snr == pytest.approx(snr(v, record.compress_dims), rel=1e-9)
