"""clip_grad_norm_ equals torch's on the dense equivalent of every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowmem import clip_grad_norm_


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    sparse=st.lists(st.booleans(), min_size=4, max_size=4),
    max_norm=st.sampled_from([0.0, 0.1, 1.0, 1e6]),
    norm_type=st.sampled_from([1.0, 2.0, 3.5, float("inf")]),
)
def test_equals_torch_on_the_dense_equivalent(seed, sizes, sparse, max_norm, norm_type):
    generator = torch.Generator().manual_seed(seed)
    ours, dense = [], []
    for size, is_sparse in zip(sizes, sparse, strict=False):
        param, twin = nn.Parameter(torch.zeros(7, 3)), nn.Parameter(torch.zeros(7, 3))
        ids = torch.randint(0, 7, (1, size), generator=generator)
        grad = torch.sparse_coo_tensor(
            ids, torch.randn(size, 3, generator=generator), (7, 3), check_invariants=True
        )
        param.grad = grad if is_sparse else grad.to_dense()
        twin.grad = grad.to_dense()
        ours.append(param)
        dense.append(twin)
    norm = clip_grad_norm_(ours, max_norm, norm_type)
    expected = nn.utils.clip_grad_norm_(dense, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    for param, twin in zip(ours, dense, strict=True):
        grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
        torch.testing.assert_close(grad, twin.grad, rtol=1e-5, atol=1e-6)


def test_scales_in_place_and_stays_uncoalesced():
    param = nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.sparse_coo_tensor([[1, 1]], torch.full((2, 2), 10.0), (4, 2))
    before = param.grad._values().data_ptr()
    assert clip_grad_norm_(param, 1.0).item() == pytest.approx((2 * 20.0**2) ** 0.5)
    assert param.grad._values().data_ptr() == before
    assert param.grad._nnz() == 2


def test_duplicates_that_cancel_have_no_norm():
    param = nn.Parameter(torch.zeros(4, 2))
    values = torch.stack([torch.ones(2), -torch.ones(2)])
    param.grad = torch.sparse_coo_tensor([[3, 3]], values, (4, 2))
    assert clip_grad_norm_([param], 1.0).item() == 0.0


def test_nothing_to_clip():
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0


def test_non_finite_norm():
    param = nn.Parameter(torch.zeros(4, 2))
    param.grad = torch.sparse_coo_tensor([[3]], torch.full((1, 2), float("inf")), (4, 2))
    with pytest.raises(RuntimeError, match="inf"):
        clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
    assert torch.equal(param.grad._values(), torch.full((1, 2), float("inf"))), "left alone"


@pytest.mark.parametrize("bad", [{"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match="must not be negative"):
        clip_grad_norm_([nn.Parameter(torch.zeros(2))], **bad)


def test_a_gradient_shared_by_two_names_is_scaled_once():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([param, param], 1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


def clipped_alone(params, max_norm):
    """What torch gives where no two gradients share memory."""
    twins = [nn.Parameter(torch.zeros_like(param)) for param in params]
    for param, twin in zip(params, twins, strict=True):
        twin.grad = param.grad.detach().clone().to_dense()
    norm = nn.utils.clip_grad_norm_(twins, max_norm)
    return norm, [twin.grad for twin in twins]


def shared_by_a_sum():
    a, b = (nn.Embedding(10, 4, sparse=True) for _ in "ab")
    ids = torch.tensor([1, 2])
    ((a(ids) + b(ids)) * torch.randn(2, 4)).sum().backward()
    assert a.weight.grad._values().data_ptr() == b.weight.grad._values().data_ptr()
    return [a.weight, b.weight]


def shared_in_part():
    a, b, c = (nn.Embedding(10, 4, sparse=True) for _ in "abc")
    ids = torch.tensor([1, 2, 2, 5])
    joined = torch.cat([a(ids[:3]), b(ids[3:])])
    ((joined + c(ids)) * torch.randn(4, 4)).sum().backward()
    return [a.weight, b.weight, c.weight]


def dense_views(*parts):
    def make():
        buffer = torch.randn(6, 6)
        params = []
        for part in parts:
            params.append(nn.Parameter(torch.zeros_like(buffer[part])))
            params[-1].grad = buffer[part]
        return params

    return make


@pytest.mark.parametrize(
    "make",
    [
        shared_by_a_sum,
        shared_in_part,
        dense_views(slice(0, 3), slice(3, 6)),
        dense_views(slice(0, 4), slice(2, 6), slice(0, 4)),
        dense_views((slice(0, 6), slice(0, 2)), (slice(0, 6), slice(2, 6))),
        dense_views((slice(0, 6, 2), slice(0, 4)), slice(1, 3)),
    ],
    ids=["sum", "cat", "apart", "overlapping", "columns", "every other row"],
)
def test_memory_that_gradients_share_is_scaled_once(make):
    params = make()
    norm, expected = clipped_alone(params, 0.1)
    torch.testing.assert_close(clip_grad_norm_(params, 0.1), norm)
    for param, grad in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad.to_dense(), grad)
