"""DSA against torch.optim: the same steps give the same weights and moments."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowmem import DSA
from lowmem.dsa.reference import adam_rows_

DIMS = [1, 3, 8, 20, 100, 128, 513]
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

repeatable = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def run_pair(make_model, batches, ours, theirs, steps_loss):
    """Train two copies of a model; return them."""
    torch.manual_seed(0)
    first = make_model()
    second = copy.deepcopy(first)
    opt, peer = ours(first), theirs(second)
    for batch in batches:
        for model, optimizer in ((first, opt), (second, peer)):
            optimizer.zero_grad()
            steps_loss(model, batch).backward()
            optimizer.step()
    return first, second, opt, peer


def assert_same_state(opt, param, peer, peer_param):
    got = opt.read_state(param, torch.arange(len(param)))
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(got[name], peer.state[peer_param][name], **CLOSE)


@repeatable
@given(data=st.data())
def test_equals_sparse_adam_for_any_table_and_batch(data):
    rows = data.draw(st.integers(1, 60), "rows")
    dim = data.draw(st.sampled_from(DIMS), "dim")
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6), "batch sizes")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), "seed"))
    maximize = data.draw(st.booleans(), "maximize")
    ours = nn.Parameter(torch.randn(rows, dim, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    with DSA([ours], lr=0.01, betas=(0.8, 0.95), eps=1e-6, maximize=maximize) as opt:
        peer = torch.optim.SparseAdam(
            [theirs], lr=0.01, betas=(0.8, 0.95), eps=1e-6, maximize=maximize
        )
        for size in sizes:
            ids = torch.randint(0, rows, (size,), generator=generator)
            values = torch.randn(size, dim, generator=generator)
            for param in (ours, theirs):
                param.grad = torch.sparse_coo_tensor(
                    ids[None], values.clone(), (rows, dim), check_invariants=True
                )
            opt.step()
            peer.step()
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert_same_state(opt, ours, peer, theirs)


@repeatable
@given(data=st.data())
def test_equals_float64_brute_force(data, float64_adam):
    rows, dim = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([1, 3, 8, 20]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    weight = nn.Parameter(torch.from_numpy(rng.standard_normal((rows, dim), np.float32)))
    w = weight.detach().double().numpy().copy()
    m, v = np.zeros((rows, dim)), np.zeros((rows, dim))
    with DSA([weight], lr=0.05) as opt:
        for step in range(1, 5):
            ids = rng.integers(0, rows, data.draw(st.integers(0, 10)))
            grads = rng.standard_normal((len(ids), dim), np.float32)
            opt.step_rows(weight, torch.from_numpy(ids), torch.from_numpy(grads))
            float64_adam(w, m, v, step, ids, grads, 0.05, 0.9, 0.999, 1e-8)
        state = opt.read_state(weight, torch.arange(rows))
    np.testing.assert_allclose(weight.detach().numpy(), w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state["exp_avg"].numpy(), m, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["exp_avg_sq"].numpy(), v, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 20, 129])
def test_hundred_steps_equal_the_reference(dtype, dim):
    torch.manual_seed(dim)
    weight = nn.Parameter(torch.randn(50, dim).to(dtype))
    expected = weight.detach().clone()
    m, v = torch.zeros(50, dim), torch.zeros(50, dim)
    with DSA([weight], lr=0.01) as opt:
        for step in range(1, 101):
            ids = torch.randint(0, 50, (16,))
            grads = torch.randn(16, dim).to(dtype)
            opt.step_rows(weight, ids, grads)
            adam_rows_(
                expected, m, v, ids, grads,
                step=step, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8,
            )  # fmt: skip
        state = opt.read_state(weight, torch.arange(50))
    torch.testing.assert_close(state["exp_avg"], m, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state["exp_avg_sq"], v, rtol=1e-4, atol=1e-6)
    if dtype == torch.float32:
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)
    else:
        # One rounding of a half precision weight a step may fall to the other side.
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(weight.detach(), expected, rtol=4 * ulp, atol=4 * ulp)
    assert state["exp_avg"].dtype == torch.float32
    assert weight.dtype == dtype


def test_rows_whose_gradients_cancel_are_touched_rows():
    ours, theirs = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    with DSA([ours], lr=0.1) as opt:
        peer = torch.optim.SparseAdam([theirs], lr=0.1)
        for values in ([1.0, 2.0], [1.0, -1.0], [0.0, 0.0]):
            for param in (ours, theirs):
                param.grad = torch.sparse_coo_tensor(
                    [[2, 2]], torch.tensor(values)[:, None].expand(2, 3), (4, 3)
                )
            opt.step()
            peer.step()
        assert not torch.equal(ours[2], torch.ones(3))
        torch.testing.assert_close(ours, theirs, **CLOSE)
        assert_same_state(opt, ours, peer, theirs)


def test_an_empty_batch_counts_as_a_step():
    ours, theirs = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    with DSA([ours]) as opt:
        peer = torch.optim.SparseAdam([theirs])
        for ids in ([], [1], [], [1, 3]):
            for param in (ours, theirs):
                index = torch.tensor(ids, dtype=torch.int64)
                param.grad = torch.sparse_coo_tensor(
                    index[None], torch.ones(len(ids), 3), (4, 3), check_invariants=True
                )
            opt.step()
            peer.step()
        torch.testing.assert_close(ours, theirs, **CLOSE)


def mixed_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(40, 8, sparse=True, padding_idx=0)
            self.bag = nn.EmbeddingBag(30, 5, mode="sum", sparse=True)
            self.mean_bag = nn.EmbeddingBag(30, 3, mode="mean", sparse=True)
            self.out = nn.Linear(16, 2)

        def forward(self, ids):
            weights = torch.linspace(0.5, 1.5, ids.numel()).view_as(ids)
            parts = [
                self.words(ids).mean(1),
                self.bag(ids % 30, per_sample_weights=weights),
                self.mean_bag(ids % 30),
            ]
            return self.out(torch.cat(parts, 1))

    return Model()


class Split:
    """SparseAdam for the tables and Adam for the rest: what people do without DSA."""

    def __init__(self, model, **options):
        tables = [
            m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        ]
        others = [p for p in model.parameters() if not any(p is t for t in tables)]
        self.parts = [
            torch.optim.SparseAdam(tables, **options),
            torch.optim.Adam(others, **options),
        ]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def test_mixed_model_equals_sparse_adam_and_adam():
    batches = [torch.randint(0, 40, (6, 4)) for _ in range(30)]
    first, second, opt, _ = run_pair(
        mixed_model,
        batches,
        lambda m: DSA(m.parameters(), lr=0.01),
        lambda m: Split(m, lr=0.01),
        lambda m, ids: m(ids).pow(2).mean(),
    )
    for (name, ours), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(first.words.weight[0], torch.zeros(8)), "padding never moves"
    opt.close()


def test_dense_parameters_equal_torch_adam_exactly():
    def loss(model, batch):
        return model(batch).pow(2).mean()

    batches = [torch.randn(5, 7) for _ in range(20)]
    first, second, opt, _ = run_pair(
        lambda: nn.Linear(7, 3),
        batches,
        lambda m: DSA(m.parameters(), lr=0.01),
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
        loss,
    )
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)
    opt.close()


def test_groups_named_parameters_and_add_param_group():
    torch.manual_seed(0)
    first = mixed_model()
    second = copy.deepcopy(first)
    opt = DSA([{"params": [("words", first.words.weight)], "lr": 0.1}], lr=0.01)
    opt.add_param_group({"params": [("bag", first.bag.weight)], "betas": (0.5, 0.9)})
    peer = torch.optim.SparseAdam(
        [
            {"params": [second.words.weight], "lr": 0.1},
            {"params": [second.bag.weight], "betas": (0.5, 0.9)},
        ],
        lr=0.01,
    )
    for _ in range(10):
        ids = torch.randint(0, 40, (6, 4))
        for model, optimizer in ((first, opt), (second, peer)):
            model.zero_grad()
            model(ids).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(first.words.weight, second.words.weight, **CLOSE)
    torch.testing.assert_close(first.bag.weight, second.bag.weight, **CLOSE)
    assert opt.param_groups[0]["param_names"] == ["words"]
    opt.close()


def embedding_pair():
    torch.manual_seed(1)
    first = nn.Embedding(50, 6, sparse=True)
    return first, copy.deepcopy(first)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, max_lr=0.1, total_steps=20, cycle_momentum=False
        ),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)),
    ],
)
def test_schedulers(make):
    first, second = embedding_pair()
    opt, peer = DSA(first.parameters(), lr=0.1), torch.optim.SparseAdam(second.parameters(), lr=0.1)
    schedules = make(opt), make(peer)
    for _ in range(10):
        ids = torch.randint(0, 50, (9,))
        for model, optimizer, schedule in zip((first, second), (opt, peer), schedules, strict=True):
            optimizer.zero_grad()
            model(ids).pow(2).sum().backward()
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(first.weight, second.weight, **CLOSE)
    opt.close()


def test_closure_and_its_loss():
    first, second = embedding_pair()
    ids = torch.tensor([1, 2, 2])
    with DSA(first.parameters(), lr=0.1) as opt:
        peer = torch.optim.SparseAdam(second.parameters(), lr=0.1)

        def closure(model, optimizer):
            optimizer.zero_grad()
            loss = model(ids).pow(2).sum()
            loss.backward()
            return loss

        for _ in range(3):
            ours = opt.step(lambda: closure(first, opt))
            theirs = peer.step(lambda: closure(second, peer))
            torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(first.weight, second.weight, **CLOSE)


def test_hooks_run_around_the_step():
    first, _ = embedding_pair()
    seen = []
    with DSA(first.parameters()) as opt:
        opt.register_step_pre_hook(lambda *_: seen.append("before"))
        opt.register_step_post_hook(lambda *_: seen.append("after"))
        first(torch.tensor([1])).sum().backward()
        opt.step()
    assert seen == ["before", "after"]


def test_gradient_accumulation():
    first, second = embedding_pair()
    with DSA(first.parameters(), lr=0.1) as opt:
        peer = torch.optim.SparseAdam(second.parameters(), lr=0.1)
        for _ in range(4):
            for ids in (torch.randint(0, 50, (7,)), torch.randint(0, 50, (5,))):
                for model in (first, second):
                    (model(ids).pow(2).sum() / 2).backward()
            for optimizer in (opt, peer):
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(first.weight, second.weight, **CLOSE)


def test_grad_scaler_skips_a_step_with_infinities_whole():
    first, second = embedding_pair()
    before = first.weight.detach().clone()
    scaler, peer_scaler = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))
    with DSA(first.parameters(), lr=0.1) as opt:
        peer = torch.optim.SparseAdam(second.parameters(), lr=0.1)
        for factor in (float("inf"), 1.0, 1.0):
            ids = torch.tensor([3, 3, 7])
            for model, optimizer, scale in ((first, opt, scaler), (second, peer, peer_scaler)):
                optimizer.zero_grad()
                scale.scale((model(ids) * factor).pow(2).sum()).backward()
                scale.step(optimizer)
                scale.update()
            if factor == float("inf"):
                assert torch.equal(first.weight, before)
        torch.testing.assert_close(first.weight, second.weight, **CLOSE)
        assert_same_state(opt, first.weight, peer, second.weight)


def test_nan_gradients_do_what_torch_does():
    first, second = embedding_pair()
    with DSA(first.parameters()) as opt:
        peer = torch.optim.SparseAdam(second.parameters())
        for model, optimizer in ((first, opt), (second, peer)):
            values = torch.ones(2, 6)
            values[1, 2] = float("nan")
            model.weight.grad = torch.sparse_coo_tensor([[4, 9]], values, (50, 6))
            optimizer.step()
        torch.testing.assert_close(first.weight, second.weight, equal_nan=True, **CLOSE)
        assert first.weight[9].isnan().sum() == 1
        assert not first.weight[4].isnan().any()


def test_several_tables_of_different_widths_do_not_mix():
    torch.manual_seed(3)
    first = nn.ModuleList(nn.Embedding(20 + i, d, sparse=True) for i, d in enumerate(DIMS))
    second = copy.deepcopy(first)
    with DSA(first.parameters(), lr=0.1) as opt:
        peer = torch.optim.SparseAdam(second.parameters(), lr=0.1)
        for step in range(6):
            ids = torch.randint(0, 20, (11,))
            for model, optimizer in ((first, opt), (second, peer)):
                optimizer.zero_grad()
                used = list(model)[step % 2 :: 2] if step < 4 else model
                sum(table(ids).pow(2).sum() for table in used).backward()
                optimizer.step()
        for ours, theirs in zip(first, second, strict=True):
            torch.testing.assert_close(ours.weight, theirs.weight, **CLOSE)
            assert_same_state(opt, ours.weight, peer, theirs.weight)


def test_weights_that_are_not_contiguous():
    base, other = torch.randn(6, 40), None
    other = base.clone()
    ours, theirs = nn.Parameter(base.T), nn.Parameter(other.T)
    assert not ours.is_contiguous()
    with DSA([ours], lr=0.1) as opt:
        peer = torch.optim.SparseAdam([theirs], lr=0.1)
        for _ in range(3):
            ids, values = torch.randint(0, 40, (8,)), torch.randn(8, 6)
            for param, optimizer in ((ours, opt), (theirs, peer)):
                param.grad = torch.sparse_coo_tensor(ids[None], values, (40, 6))
                optimizer.step()
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_many_threads_give_the_bits_of_one():
    results = []
    for threads in (1, 2, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            generator = torch.Generator().manual_seed(0)
            weight = nn.Parameter(torch.randn(3000, 20, generator=generator))
            with DSA([weight], lr=0.1) as opt:
                for _ in range(3):
                    ids = torch.randint(0, 3000, (4000,), generator=generator) ** 2 % 3000
                    opt.step_rows(weight, ids, torch.randn(4000, 20, generator=generator))
                state = opt.read_state(weight, torch.arange(3000))
            results.append((weight.detach(), state["exp_avg"], state["exp_avg_sq"]))
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_autograd_notices_the_change_of_a_saved_weight():
    table = nn.Embedding(5, 3, sparse=True)
    with DSA(table.parameters()) as opt:
        product = table.weight[1] * table.weight[2]
        table(torch.tensor([1])).sum().backward()
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_tables_with_more_than_two_dimensions():
    ours, theirs = nn.Parameter(torch.ones(6, 2, 3)), nn.Parameter(torch.ones(6, 2, 3))
    with DSA([ours], lr=0.1) as opt:
        peer = torch.optim.SparseAdam([theirs], lr=0.1)
        for _ in range(2):
            values = torch.randn(2, 2, 3)
            for param, optimizer in ((ours, opt), (theirs, peer)):
                param.grad = torch.sparse_coo_tensor([[1, 4]], values, (6, 2, 3))
                optimizer.step()
        assert opt.read_state(ours, [1])["exp_avg"].shape == (1, 2, 3)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("kind", ["none", "pre", "post", "global pre", "global post"])
def test_hooks_and_the_profiler_see_a_step_as_any_optimizers(kind, tmp_path):
    table = nn.Embedding(10, 4, sparse=True)
    calls = []

    def note(*arguments):
        calls.append(arguments[0])

    with DSA(table.parameters(), directory=tmp_path / "m") as opt:
        register = {
            "none": lambda hook: None,
            "pre": opt.register_step_pre_hook,
            "post": opt.register_step_post_hook,
            "global pre": register_optimizer_step_pre_hook,
            "global post": register_optimizer_step_post_hook,
        }[kind]
        handle = register(note)
        try:
            table(torch.tensor([1, 2])).sum().backward()
            opt.step()
            assert calls == ([] if kind == "none" else [opt])
        finally:
            if handle is not None:
                handle.remove()
        with torch.profiler.profile() as profile:
            opt.step()
        opt.step()
    assert calls == ([] if kind == "none" else [opt])
    assert [
        event.count for event in profile.key_averages() if event.key == "Optimizer.step#DSA.step"
    ] == [1]


@pytest.mark.parametrize("ids", [range(9), [4, 0, 8, 2, 6, 1, 3], [1, 2, 2, 0, 1]])
def test_gradients_that_are_a_view_of_the_weights(ids):
    first, second = (nn.Embedding(9, 20, sparse=True) for _ in "ab")
    second.load_state_dict(first.state_dict())
    ids = torch.tensor(list(ids))
    with DSA(first.parameters(), lr=0.1) as opt:
        peer = torch.optim.SparseAdam(second.parameters(), lr=0.1)
        for _ in range(3):
            for model, optimizer in ((first, opt), (second, peer)):
                optimizer.zero_grad()
                model(ids).backward(model.weight.detach()[: len(ids)])
                optimizer.step()
        torch.testing.assert_close(first.weight, second.weight, **CLOSE)
        assert_same_state(opt, first.weight, peer, second.weight)


def test_a_model_that_became_double_keeps_its_precision():
    weight = nn.Parameter(torch.zeros(4, 3))
    with DSA([weight], lr=1e-3) as opt:
        opt.step_rows(weight, [1], torch.ones(1, 3))
        weight.data = weight.data.double() + 1 + 2**-40
        before = weight.detach().clone()
        opt.step_rows(weight, [1], torch.zeros(1, 3))
        moved = before - weight.detach()
    assert torch.equal(moved[[0, 2, 3]], torch.zeros(3, 3, dtype=torch.float64))
    # Exactly a float32 update: the weight itself was not rounded.
    change = moved[1].float().double()
    torch.testing.assert_close(moved[1], change, rtol=0, atol=1e-14)
    assert (change > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_default_device_is_for_the_users_own_tensors(dtype):
    ours = nn.Parameter(torch.ones(6, 4).to(dtype).T)
    theirs = nn.Parameter(torch.ones(4, 6).to(dtype))
    layer = nn.Linear(2, 2)
    with DSA([ours, *layer.parameters()], lr=0.1) as opt, DSA([theirs], lr=0.1) as peer:
        layer(torch.ones(1, 2)).sum().backward()
        for param in (ours, theirs):
            param.grad = torch.sparse_coo_tensor([[1, 3, 1]], torch.ones(3, 6).to(dtype), (4, 6))
        torch.set_default_device("meta")
        try:
            opt.step()
        finally:
            torch.set_default_device(None)
        peer.step()
    assert torch.equal(ours, theirs)


def test_expanded_weights_are_refused_before_anything_changes(tmp_path):
    weight = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    other = nn.Parameter(torch.ones(4, 3))
    with DSA([other, weight], directory=tmp_path / "s") as opt:
        for param in (other, weight):
            param.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (4, 3))
        with pytest.raises(ValueError, match=r"share memory, with strides \(0, 1\)"):
            opt.step()
        assert torch.equal(other, torch.ones(4, 3))
        weight.data = torch.ones(4, 3)
        opt.step()
    torch.testing.assert_close(weight, other, rtol=0, atol=0)
