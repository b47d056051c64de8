"""snr() is the published measure, exactly, at every scale and in every layout."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem import snr
from lowmem.slim.moments import slice_moments


def brute_force(v: np.ndarray, axes: tuple[int, ...]) -> float:
    """The definition, slice by slice, in the longest floats there are."""
    kept = [axis for axis in range(v.ndim) if axis not in axes]
    moved = np.transpose(v.astype(np.longdouble), [*kept, *axes])
    slices = moved.reshape(math.prod(v.shape[axis] for axis in kept), -1)
    ratios = []
    for values in slices:
        if not values.any():
            continue
        if (values == values[0]).all():
            return math.inf
        mean = values.mean()
        ratios.append(mean**2 / ((values - mean) ** 2).mean())
    return float(np.mean(ratios)) if ratios else 0.0


def every_subset(dims: int) -> list[tuple[int, ...]]:
    return [s for n in range(1, dims + 1) for s in itertools.combinations(range(dims), n)]


def eager(v: torch.Tensor, axes: tuple[int, ...]) -> float:
    """The path of other devices, forced: it is taken for the dtypes that numba does not read."""
    import lowmem.slim.moments as moments

    leaf = moments._leaf
    moments._leaf = moments._eager_leaf
    try:
        return snr(v, axes)
    finally:
        moments._leaf = leaf


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1.0, 1e-20, 1e-30, 1e-37, 1e30]),
    layout=st.sampled_from(["contiguous", "reversed", "sliced"]),
    path=st.sampled_from([snr, eager]),
)
def test_equals_the_definition(shape, seed, scale, layout, path):
    random = np.random.default_rng(seed)
    values = (random.chisquare(1, shape) * scale).astype(np.float32)
    v = torch.from_numpy(values)
    if layout == "reversed" and v.dim() > 1:
        v = v.permute(*reversed(range(v.dim()))).contiguous().permute(*reversed(range(v.dim())))
    if layout == "sliced":
        v = torch.stack([v, v + 1], dim=-1)[..., 0]
    for axes in every_subset(len(shape)):
        assert path(v, axes) == pytest.approx(brute_force(values, axes), rel=1e-6), axes


@pytest.mark.parametrize("path", [snr, eager])
@pytest.mark.parametrize("shape", [(64, 96), (5, 3000), (3000, 5), (7, 40, 33)])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-32])
def test_a_variance_far_below_the_mean_keeps_its_digits(shape, scale, path):
    random = np.random.default_rng(0)
    ulps = random.integers(-3, 4, shape)  # a relative deviation of about 1e-7
    values = ((1 + ulps * np.finfo(np.float32).eps) * np.float32(scale)).astype(np.float32)
    for axes in every_subset(len(shape)):
        expected = brute_force(values, axes)
        assert expected > 1e10
        assert path(torch.from_numpy(values), axes) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("path", [snr, eager])
def test_one_value_that_differs_is_not_lost(path):
    values = np.full((3, 40_000), 1e-12, np.float32)
    values[:, -1] = np.nextafter(np.float32(1e-12), np.float32(1))
    assert path(torch.from_numpy(values), (1,)) == pytest.approx(
        brute_force(values, (1,)), rel=1e-4
    )
    values[:, 0] = 1e12  # the value that others are compared with lies far off
    assert path(torch.from_numpy(values), (1,)) == pytest.approx(
        brute_force(values, (1,)), rel=1e-4
    )


@pytest.mark.parametrize("path", [snr, eager])
@pytest.mark.parametrize("value", [1.0, 0.1, 1e-30, 3e-42])
def test_zero_variance_is_infinitely_compressible(value, path):
    v = torch.full((300, 7), value)
    for axes in every_subset(2):
        assert path(v, axes) == math.inf
    v[0] = torch.rand(7)
    assert path(v, (1,)) == math.inf  # the mean over slices of which some are infinite


@pytest.mark.parametrize("path", [snr, eager])
def test_all_zero_slices_tell_nothing(path):
    v = torch.rand(6, 50)
    expected = snr(v, 1)
    holes = torch.cat([torch.zeros(3, 50), v, torch.zeros(1, 50)])
    assert path(holes, (1,)) == pytest.approx(expected, rel=1e-12)
    for axes in every_subset(2):
        assert path(torch.zeros(4, 5), axes) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32])
def test_every_real_dtype(dtype):
    v = (torch.rand(20, 30) * 100).to(dtype)
    for axes in every_subset(2):
        expected = brute_force(v.double().numpy(), axes)
        assert snr(v, axes) == pytest.approx(expected, rel=1e-9)


def test_large_tensors_are_cut_over_threads_and_blocks():
    values = np.random.default_rng(1).chisquare(1, (1500, 700)).astype(np.float32)
    for axes in every_subset(2):
        expected = brute_force(values, axes)
        assert snr(torch.from_numpy(values), axes) == pytest.approx(expected, rel=1e-9)
        assert eager(torch.from_numpy(values), axes) == pytest.approx(expected, rel=1e-9)


def test_blocks_of_every_size(monkeypatch):
    values = np.random.default_rng(4).chisquare(1, (5, 12, 7)).astype(np.float32)
    for block, joined in [(1, 1), (10, 20), (100, 1000), (1000, 10)]:
        monkeypatch.setattr("lowmem.slim.moments._BLOCK", block)
        monkeypatch.setattr("lowmem.slim.moments._JOINED", joined)
        for axes in every_subset(3):
            for path in (snr, eager):
                found = path(torch.from_numpy(values), axes)
                assert found == pytest.approx(brute_force(values, axes), rel=1e-9)


def test_a_part_of_a_tensor_is_read_in_place():
    whole = torch.rand(2, 9, 30)
    for part in (whole[:, 2:5, 10:17], whole[1:, :, -7:], whole[..., 3], whole.expand(3, 2, 9, 30)):
        for axes in every_subset(part.dim()):
            assert snr(part, axes) == pytest.approx(brute_force(part.numpy(), axes), rel=1e-9)


def test_channels_last_is_read_in_place():
    v = torch.rand(8, 6, 3, 3).to(memory_format=torch.channels_last)
    for axes in [(1, 2, 3), (0, 2, 3), (2, 3), (0, 1, 2, 3)]:
        assert snr(v, axes) == pytest.approx(brute_force(v.numpy(), axes), rel=1e-9)


def test_the_other_two_columns_are_squared_mean_and_variance():
    values = np.random.default_rng(2).chisquare(1, (11, 13)).astype(np.float32) * 1e-25
    found = slice_moments(torch.from_numpy(values), [(0,), (1,), (0, 1)])
    exact = values.astype(np.longdouble)
    for row, axes in zip(found.tolist(), [(0,), (1,), (0, 1)], strict=True):
        assert row[3] == 1
        assert row[1] == pytest.approx(float((exact.mean(axis=axes) ** 2).mean()), rel=1e-9)
        assert row[2] == pytest.approx(float(exact.var(axis=axes).mean()), rel=1e-9)


def test_float32_devices_work_at_every_scale(monkeypatch):
    """Devices without float64: everything in float32, scaled by the largest value."""
    monkeypatch.setattr("lowmem.slim.moments._NO_FLOAT64", {"cpu"})
    monkeypatch.setattr("lowmem.slim.moments._BLOCK", 64)
    import lowmem.slim.moments as moments

    monkeypatch.setattr(moments, "_leaf", moments._eager_leaf)
    for scale in (1.0, 1e-30, 1e30):
        values = (np.random.default_rng(3).chisquare(1, (30, 20)) * scale).astype(np.float32)
        for axes in every_subset(2):
            assert snr(torch.from_numpy(values), axes) == pytest.approx(
                brute_force(values, axes), rel=1e-4
            )
    assert snr(torch.full((5, 5), 0.3), 0) == math.inf


def test_a_parameter_that_requires_grad_and_negative_axes():
    v = torch.nn.Parameter(torch.rand(4, 5))
    assert snr(v, -1) == snr(v, (1,)) == snr(v, [1])


def test_nan_in_v_is_not_hidden():
    v = torch.rand(4, 5)
    v[2, 3] = math.nan
    assert math.isnan(snr(v, 0))
    assert math.isnan(snr(v, 1))


@pytest.mark.parametrize(
    ("v", "axes", "error", "said"),
    [
        (torch.rand(2, 2), 2, ValueError, r"axis 2 .*\(2, 2\)"),
        (torch.rand(2, 2), (0, -2), ValueError, "twice"),
        (torch.rand(2, 2), (), ValueError, "no axis"),
        (torch.rand(2, 2), ("0",), ValueError, "'0'"),
        (torch.rand(0, 2), 0, ValueError, "empty"),
        (torch.rand(2, 2, dtype=torch.complex64), 0, TypeError, "complex64"),
        (torch.eye(2).to_sparse(), 0, TypeError, "sparse"),
        ([[1.0, 2.0]], 0, TypeError, "list"),
        (torch.tensor(1.0), 0, ValueError, "does not exist"),
    ],
)
def test_bad_input(v, axes, error, said):
    with pytest.raises(error, match=said):
        snr(v, axes)


def test_axes_may_be_whole_numbers_of_any_type_but_no_truth_values():
    v = torch.rand(4, 6)
    for axes in (np.int64(1), [np.int64(1)], torch.tensor([1]), torch.tensor(1), (1,)):
        assert snr(v, axes) == snr(v, 1)
    for axes in (True, [True], np.bool_(True), torch.tensor([True]), "1", 1.5):
        with pytest.raises(ValueError, match="does not exist"):
            snr(v, axes)
