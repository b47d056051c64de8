"""The step itself: against torch.optim.AdamW, a float64 loop by hand, and the reference."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slim.slim_models import TinyGPT, TinyResNet, token_batches
from torch import nn

from lowmem import SlimAdamW
from lowmem.slim import dispatch, eager, reference
from lowmem.slim.rulesfile import fit_rule, parse_rule
from lowmem.slim.state import moment_shape, moment_views, param_views, part_axes

HYPER = {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(params=["kernels", "eager"])
def backend(request, monkeypatch):
    """Once as users have it, once as where there are no kernels."""
    if request.param == "eager":
        monkeypatch.setattr(dispatch, "kernels", lambda device: None)
    return request.param


def by_hand(p, m, v, g, axes, step, *, lr, beta1, beta2, eps, weight_decay):
    """One step in float64 numpy, slice by slice, written from the formulas."""
    p, m, v = p.copy(), m.copy(), v.copy()
    kept = [range(1 if axis in axes else size) for axis, size in enumerate(p.shape)]
    for index in itertools.product(*kept):
        whole = tuple(slice(None) if axis in axes else i for axis, i in enumerate(index))
        v[index] = beta2 * v[index] + (1 - beta2) * np.mean(g[whole] ** 2)
        m[whole] = beta1 * m[whole] + (1 - beta1) * g[whole]
        update = (m[whole] / (1 - beta1**step)) / (math.sqrt(v[index] / (1 - beta2**step)) + eps)
        p[whole] = p[whole] * (1 - lr * weight_decay) - lr * update
    return p, m, v


@st.composite
def ruled_shapes(draw):
    """A shape and a rule that fits it, splits included."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 17]), min_size=1, max_size=4)))
    axes = st.lists(st.integers(0, len(shape) - 1), unique=True)
    if draw(st.booleans()):
        return shape, draw(axes)
    axis = draw(st.integers(0, len(shape) - 1))
    repeat = draw(st.sampled_from([n for n in (1, 2, 3) if shape[axis] % n == 0]))
    left, parts = shape[axis] // repeat, []
    while left:
        size = draw(st.integers(1, left))
        parts.append({"size": size, "axes": draw(axes)})
        left -= size
    return shape, {"split": axis, "parts": parts, "repeat": repeat}


@pytest.mark.parametrize("path", ["optimizer", "eager", "reference"])
@settings(max_examples=60, deadline=None)
@given(case=ruled_shapes(), seed=st.integers(0, 9), maximize=st.booleans(), blocks=st.booleans())
def test_three_steps_equal_the_formulas(path, case, seed, maximize, blocks):
    shape, written = case
    rule = fit_rule(parse_rule(written, "w"), shape, "w")
    generator = torch.Generator().manual_seed(seed)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    grads = [torch.randn(shape, generator=generator) for _ in range(3)]
    oracle = []
    for whole in param_views(param.detach(), rule):
        oracle.append(whole.double().numpy())
    axes = part_axes(rule)
    firsts = [np.zeros(part.shape) for part in oracle]
    views = moment_views(torch.zeros(moment_shape(rule, shape)), rule, shape)
    seconds = [view.double().numpy() for view in views]

    optimizer = SlimAdamW(
        [("w", param)],
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
        rules={"w": written},
        maximize=maximize,
    )
    size = eager._CPU_BLOCK
    module = {"eager": eager, "reference": reference}.get(path)
    kernels = dispatch.kernels
    try:
        if blocks:
            eager._CPU_BLOCK = 7  # so that small tensors are cut as large ones are
        if module is not None:
            dispatch.kernels = lambda device: module
        for step, grad in enumerate(grads, start=1):
            param.grad = grad.clone()
            optimizer.step()
            for part, g in enumerate(param_views(-grad if maximize else grad, rule)):
                oracle[part], firsts[part], seconds[part] = by_hand(
                    oracle[part],
                    firsts[part],
                    seconds[part],
                    g.double().numpy(),
                    axes[part],
                    step,
                    **HYPER,
                )
    finally:
        eager._CPU_BLOCK, dispatch.kernels = size, kernels
    state = optimizer.state[param]
    assert state["exp_avg_sq"].shape == moment_shape(rule, shape)
    for part, v in enumerate(optimizer.second_moment_parts(param)):
        np.testing.assert_allclose(v.double().numpy(), seconds[part], rtol=2e-6, atol=1e-12)
    for part, p in enumerate(param_views(param.detach(), rule)):
        np.testing.assert_allclose(p.double().numpy(), oracle[part], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("make", [TinyGPT, TinyResNet])
@pytest.mark.parametrize("maximize", [False, True])
def test_without_rules_it_is_adamw(make, maximize, backend):
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    options = {"lr": 3e-3, "betas": (0.85, 0.97), "eps": 1e-7, "weight_decay": 0.2}
    optimizers = (
        SlimAdamW(ours.parameters(), **options, maximize=maximize),
        torch.optim.AdamW(theirs.parameters(), **options, maximize=maximize),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        grads = [torch.randn(p.shape, generator=generator) for p in ours.parameters()]
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g.clone()
            optimizer.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6, msg=lambda text, n=name: n + text)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                optimizers[0].state[p][key], optimizers[1].state[q][key], rtol=1e-5, atol=1e-7
            )


CASES = [
    # shape, rule, dtype, layout
    *itertools.product(
        [(24, 40)],
        [None, [0], [1], [0, 1]],
        [torch.float32, torch.float64, torch.bfloat16, torch.float16],
        ["contiguous", "transposed", "strided"],
    ),
    *itertools.product(
        [(6, 4, 3, 3)],
        [None, [0], [1, 2, 3], [2, 3], [0, 1, 2, 3]],
        [torch.float32, torch.bfloat16],
        ["contiguous", "channels_last"],
    ),
    ((48, 12), {"split": 0, "parts": [{"size": 16, "axes": a} for a in ([1], None, [0])]},
     torch.float32, "contiguous"),
    ((12, 48), {"split": 1, "parts": [{"size": 8, "axes": a} for a in ([0], [1])], "repeat": 3},
     torch.bfloat16, "contiguous"),
    ((3, 8, 5), [1], torch.float32, "contiguous"),
    ((1, 9, 6), [2], torch.float32, "contiguous"),
    ((), None, torch.float32, "contiguous"),
    ((7,), [0], torch.float32, "contiguous"),
]  # fmt: skip


def laid_out(values, layout):
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "strided":
        return torch.empty((*values.shape[:-1], 2 * values.shape[-1]), dtype=values.dtype)[
            ..., ::2
        ].copy_(values)
    if layout == "channels_last":
        return values.contiguous(memory_format=torch.channels_last)
    return values


@pytest.mark.parametrize(("shape", "rule", "dtype", "layout"), CASES)
def test_a_hundred_steps_equal_the_reference(shape, rule, dtype, layout, backend, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(shape, generator=generator).to(dtype)
    params = [nn.Parameter(laid_out(start.clone(), layout)), nn.Parameter(start.clone())]
    rules = {"w": rule}
    optimizers = [SlimAdamW([("w", p)], lr=1e-2, rules=rules) for p in params]
    kernels = dispatch.kernels
    for _ in range(100):
        grad = torch.randn(shape, generator=generator).to(dtype)
        for which, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
            param.grad = laid_out(grad.clone(), layout)
            monkeypatch.setattr(dispatch, "kernels", kernels if not which else lambda d: reference)
            optimizer.step()
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5}.get(dtype, 2e-2)
    states = [o.state[p] for o, p in zip(optimizers, params, strict=True)]
    torch.testing.assert_close(params[0], params[1], rtol=tolerance, atol=tolerance)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(states[0][key], states[1][key], rtol=tolerance, atol=tolerance)
    assert states[0]["exp_avg_sq"].dtype == torch.float32
    assert states[0]["exp_avg"].dtype == dtype


def test_half_precision_gradients_neither_overflow_nor_vanish(backend):
    for scale in (3e4, 1e-6):
        param = nn.Parameter(torch.zeros(8, 8, dtype=torch.float16))
        optimizer = SlimAdamW([("w", param)], lr=1.0, weight_decay=0, eps=0, rules={"w": [1]})
        param.grad = torch.full_like(param, scale)
        optimizer.step()
        torch.testing.assert_close(param, torch.full_like(param, -1.0), rtol=1e-2, atol=0)


def test_the_memory_format_may_change_between_steps(backend):
    torch.manual_seed(0)
    models = [nn.Conv2d(4, 8, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        SlimAdamW(m.named_parameters(), lr=1e-2, rules={"weight": [1, 2, 3]}) for m in models
    ]
    for step in range(6):
        if step == 3:
            models[0].to(memory_format=torch.channels_last)
        x = torch.randn(2, 4, 5, 5)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight)


def test_averaging_trains(backend):
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = SlimAdamW(model.parameters(), lr=3e-3, model=model, rules="table1")
    (batch,) = token_batches(1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("rule", [None, [0], [1]])
@pytest.mark.parametrize(
    ("first", "then"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_the_dtype_may_change_between_steps(first, then, rule, backend):
    p = nn.Parameter(torch.ones(64, 64, dtype=first))
    optimizer = SlimAdamW([("w", p)], lr=0.25, weight_decay=0, rules={"w": rule})
    for dtype in (first, then, first):
        p.data = p.data.to(dtype)
        p.grad = torch.ones(64, 64, dtype=dtype)
        optimizer.step()
    torch.testing.assert_close(p, torch.full((64, 64), 0.25, dtype=first))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "narrow"])
def test_a_part_that_is_not_averaged_in_any_layout(layout, backend):
    torch.manual_seed(0)
    values, axis = torch.randn(4, 6), 1
    if layout == "transposed":
        param = nn.Parameter(values.t().contiguous().t())
    else:
        param = nn.Parameter(torch.randn(4, 9)[:, :6] if layout == "narrow" else values.clone())
    plain = nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))
    rule = {"split": 0, "parts": [{"size": 2, "axes": [axis]}, {"size": 2, "axes": None}]}
    slim = SlimAdamW([("p", param)], rules={"p": rule})
    adamw = torch.optim.AdamW([plain], weight_decay=1e-2)
    for _ in range(3):
        plain.grad = torch.randn(4, 6)
        param.grad = torch.empty_like(param).copy_(plain.grad)
        slim.step()
        adamw.step()
    torch.testing.assert_close(param[2:], plain[2:])
    whole = adamw.state[plain]["exp_avg_sq"]
    first, second = slim.second_moment_parts(param)
    torch.testing.assert_close(first, whole[:2].mean(axis, keepdim=True))
    torch.testing.assert_close(second, whole[2:])


@pytest.mark.parametrize("value", [1.0, 1e18, 1.8e19, 1e20, 5e20])
@pytest.mark.parametrize("axes", [[0], [1], [0, 1], None])
@pytest.mark.parametrize("shape", [(40, 65), (300, 700)])
def test_gradients_whose_squares_overflow_leave_what_adamw_leaves(shape, axes, value, backend):
    slim, plain = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(shape))
    ours = SlimAdamW([("w", slim)], lr=1e-2, rules={"w": axes})
    theirs = torch.optim.AdamW([plain], lr=1e-2)
    for p in (slim, plain):
        p.grad = torch.full(shape, value)
        p.grad.view(-1)[::3] *= -1
    ours.step()
    theirs.step()
    expected = theirs.state[plain]["exp_avg_sq"]
    assert expected.isfinite().all()
    torch.testing.assert_close(ours.state[slim]["exp_avg_sq"].expand(shape), expected)
    torch.testing.assert_close(slim, plain)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("equal", [False, True])
def test_many_heads_of_parts_are_stepped_as_one_by_one(axis, equal, backend):
    axes = [[1 - axis], [1 - axis] if equal else [axis], None]
    parts = [{"size": size, "axes": a} for size, a in zip((4, 4, 2), axes, strict=True)]
    rule = {"split": axis, "parts": parts, "repeat": 30}
    shape = (300, 48) if axis == 0 else (48, 300)
    torch.manual_seed(0)
    start = torch.randn(shape)
    together = nn.Parameter(start.clone())
    ours = SlimAdamW([("w", together)], lr=1e-2, rules={"w": rule})
    apart = [nn.Parameter(part.clone()) for part in param_views(start, fit_rule(
        parse_rule(rule, "w"), shape, "w"))]  # fmt: skip
    names = [f"p{number}" for number in range(len(apart))]
    theirs = SlimAdamW(
        list(zip(names, apart, strict=True)),
        lr=1e-2,
        rules={name: axes[number % 3] for number, name in enumerate(names)},
    )
    parsed = ours.rule(together)
    for _ in range(3):
        together.grad = torch.randn(shape)
        for part, grad in zip(apart, param_views(together.grad, parsed), strict=True):
            part.grad = grad.clone()
        ours.step()
        theirs.step()
    views = zip(
        param_views(together.detach(), parsed), ours.second_moment_parts(together), apart,
        strict=True,
    )  # fmt: skip
    for value, second, part in views:
        torch.testing.assert_close(value, part.detach())
        torch.testing.assert_close(second, theirs.state[part]["exp_avg_sq"])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lr", [1e38, 1e30, 1e-30, 0.0])
@pytest.mark.parametrize("shape", [(1, 1), (5, 4), (0, 3)])
def test_extreme_rates_and_shapes_do_what_adamw_does(lr, shape, backend):
    torch.manual_seed(0)
    slim = nn.Parameter(torch.randn(shape))
    plain = nn.Parameter(slim.detach().clone())
    ours = SlimAdamW([slim], lr=torch.tensor(lr))
    theirs = torch.optim.AdamW([plain], lr=torch.tensor(lr))
    for _ in range(3):
        slim.grad = torch.randn(shape)
        plain.grad = slim.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(slim, plain, rtol=1e-4, atol=1e-6, equal_nan=True)
