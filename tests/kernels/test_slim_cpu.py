"""What the CPU kernels promise beyond the right numbers: threads, forks, NaN, memory."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from lowmem.kernels import cpu_slim
from lowmem.kernels.slim_layout import layout
from lowmem.kernels.threads import thread_count

HYPER = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
}
# One of each kind of job; the large ones are shared by all threads.
MIX: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((300, 700), ()),
    ((301, 129), (1,)),
    ((301, 129), (0,)),
    ((2_100, 512), (0,)),
    ((1_100_000,), (0,)),
    ((130, 8_200), (0,)),
    ((40, 24, 3, 3), (0, 2, 3)),
    ((4, 70_000), (1,)),
    ((900, 7, 5), (1,)),
    ((30, 300, 70), (1,)),
    ((600, 770), (0,)),
    ((3,), ()),
    ((0, 5), (1,)),
]


def problem(mix=MIX) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(shape, generator=generator) for shape, _ in mix]
    grads = [torch.randn(shape, generator=generator) for shape, _ in mix]
    seconds = [
        torch.zeros([1 if i in axes else n for i, n in enumerate(shape)]) for shape, axes in mix
    ]
    return [params, grads, [torch.zeros_like(p) for p in params], seconds]


def run(state: list[list[Tensor]], steps: int = 2, mix=MIX) -> None:
    for step in range(1, steps + 1):
        cpu_slim.slim_adamw_(*state, [axes for _, axes in mix], [step] * len(mix), **HYPER)


def identical(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for ours, theirs in zip(one, other, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(threads) -> None:
    results = []
    for count in (1, 2, 3, 7, 16):
        threads(count)
        assert thread_count() == count
        results.append(problem())
        run(results[-1])
    assert all(identical(results[0], other) for other in results[1:])


def test_all_tensors_in_one_call_equal_each_in_a_call_of_its_own(threads) -> None:
    threads(3)
    together, apart = problem(), problem()
    run(together)
    for number, entry in enumerate(MIX):
        run([[part[number]] for part in apart], mix=[entry])
    assert identical(together, apart)


def test_two_python_threads_may_step_at_once(threads) -> None:
    threads(4)
    expected = problem()
    run(expected, steps=5)
    states = [problem() for _ in range(3)]
    workers = [threading.Thread(target=run, args=(state, 5)) for state in states]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(identical(expected, state) for state in states)


def checksums(state: list[list[Tensor]]) -> list[float]:
    return [float(p.numpy().sum()) for p in state[0]]


def step_in_child(state: list[list[Tensor]], queue) -> None:
    run(state)
    queue.put(checksums(state))


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_steps_as_its_parent_does(threads) -> None:
    threads(2)
    fresh, state = problem(), problem()  # made here: torch's own threads do not survive a fork
    run(state)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=step_in_child, args=(fresh, queue))
    child.start()
    try:
        assert queue.get(timeout=60) == checksums(state)
    finally:
        child.join(10)
        child.kill()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_nan_and_infinity_go_where_adamw_lets_them_go(bad: float) -> None:
    start = torch.randn(40, 65)
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in (1, 2):
        grad = torch.randn(40, 65)
        if step == 1:
            grad[7, 30] = bad
        theirs.grad = grad
        optimizer.step()
        cpu_slim.slim_adamw_([ours], [grad], [first], [second], [()], [step], **HYPER)
    torch.testing.assert_close(ours, theirs.data, equal_nan=True)
    torch.testing.assert_close(second, optimizer.state[theirs]["exp_avg_sq"], equal_nan=True)
    assert not ours.isfinite().all() or bad == 1e30


@pytest.mark.parametrize("value", [1e18, 1.8e19, 1e20, 5e20])
@pytest.mark.parametrize(("shape", "axes"), MIX[:-1])
def test_large_gradients_stay_finite_as_in_adamw(shape, axes, value: float) -> None:
    p, m = torch.ones(shape), torch.zeros(shape)
    sign = torch.ones(shape)
    sign.view(-1)[::3] = -1
    kept = [1 if axis in axes else size for axis, size in enumerate(shape)]
    v = torch.zeros(kept)
    adamw = torch.nn.Parameter(p.clone())
    adamw.grad = value * sign
    theirs = torch.optim.AdamW(
        [adamw], lr=1e-2, betas=(0.9, 0.99 if value < 1e20 else 0.999), weight_decay=0.1
    )
    theirs.step()
    hyper = {**HYPER, "beta2": theirs.param_groups[0]["betas"][1]}
    cpu_slim.slim_adamw_([p], [value * sign], [m], [v], [axes], [1.0], **hyper)
    expected = theirs.state[adamw]["exp_avg_sq"]
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(v.expand(shape), expected)
    torch.testing.assert_close(p, adamw.detach())


def test_a_row_with_a_nan_is_lost_and_no_other() -> None:
    param, first, second = torch.randn(9, 33), torch.zeros(9, 33), torch.zeros(9, 1)
    grad = torch.randn(9, 33)
    grad[4, 20] = float("nan")
    cpu_slim.slim_adamw_([param], [grad], [first], [second], [(1,)], [1], **HYPER)
    assert param.isnan().any(1).tolist() == [row == 4 for row in range(9)]
    assert param[4].isnan().all()


def test_a_zero_gradient_moves_nothing_but_the_decay() -> None:
    for axes in ((), (0,), (1,), (0, 1)):
        param = torch.ones(6, 5)
        second = torch.zeros([1 if i in axes else n for i, n in enumerate(param.shape)])
        moment = torch.zeros_like(param)
        cpu_slim.slim_adamw_([param], [moment.clone()], [moment], [second], [axes], [1], **HYPER)
        torch.testing.assert_close(param, torch.full((6, 5), 1 - 1e-2 * 0.1))


def test_autograd_notices_that_the_weights_changed() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    other = torch.nn.Parameter(torch.randn(4, 4))
    loss = (weight @ other).sum()
    state = [torch.zeros(4, 4), torch.zeros(4, 1)]
    cpu_slim.slim_adamw_([weight], [torch.ones(4, 4)], [state[0]], [state[1]], [(1,)], [1], **HYPER)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_bytes_outside_a_part_stay_as_they_are() -> None:
    for axes in ((), (0,), (1,), (0, 1)):
        whole, moment = torch.full((20, 30), 7.0), torch.full((20, 30), 5.0)
        grad = torch.randn(20, 30)
        at = (slice(3, 17), slice(11, 22))
        second = torch.zeros([1 if i in axes else n for i, n in enumerate((14, 11))])
        cpu_slim.slim_adamw_([whole[at]], [grad[at]], [moment[at]], [second], [axes], [1], **HYPER)
        outside = torch.ones(20, 30, dtype=torch.bool)
        outside[at] = False
        assert (whole[outside] == 7).all()
        assert (moment[outside] == 5).all()
        assert (whole[at] != 7).all()


def test_moments_of_another_layout_are_refused() -> None:
    param = torch.randn(6, 5)
    with pytest.raises(ValueError, match="lay them out as the parameter is"):
        cpu_slim.slim_adamw_(
            [param], [param.clone()], [torch.zeros(5, 6).t()], [torch.zeros(6, 1)], [(1,)], [1],
            **HYPER,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("param", "grad"),
    [
        (torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float16)),
        (torch.zeros(3, 2), torch.zeros(3, 2).to_sparse()),
        (torch.zeros(3, 2), torch.zeros(2, 3)),
        (torch.zeros(5, 4), torch.zeros(4, 5).t()),
        (torch.zeros(8)[::2], torch.zeros(4)),
        (torch.zeros(3), torch.zeros(1).expand(3)),
        (torch.zeros(3, device="meta"), torch.zeros(3, device="meta")),
    ],
)
def test_what_it_does_not_take_it_says(param: Tensor, grad: Tensor) -> None:
    assert not cpu_slim.supports(param, grad, ())


def test_layouts_merge_to_as_few_jobs_as_there_are_means() -> None:
    def kinds(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
        param = torch.empty(shape)
        second = torch.empty([1 if i in axes else n for i, n in enumerate(shape)])
        jobs = layout(shape, *[param.stride()] * 3, second.stride(), axes)
        assert jobs is not None
        return [job[:4] for job in jobs]

    assert kinds((4, 5, 6), ()) == [(0, 1, 120, 1)]
    assert kinds((1, 50, 8), (2,)) == [(1, 50, 8, 1)]
    assert kinds((16, 4, 3, 3), (1, 2, 3)) == [(1, 16, 36, 1)]
    assert kinds((16, 4, 3, 3), (0, 2, 3)) == [(4, 16, 4, 9)]
    assert kinds((3, 20, 30), (1,)) == [(3, 20, 30, 1)] * 3
    assert kinds((60_000, 3, 4), (1,)) == [(3, 3, 4, 1)]
    assert kinds((7, 1), (0,)) == [(1, 1, 7, 1)]
    assert kinds((7, 1), (1,)) == [(1, 7, 1, 1)] or kinds((7, 1), (1,)) == [(0, 1, 7, 1)]


@pytest.mark.parametrize("axes", [(2,), (-3,), (0, 5)])
def test_axes_that_do_not_exist_are_refused(axes) -> None:
    with pytest.raises(ValueError, match="do not exist in shape"):
        layout((4, 6), (6, 1), (6, 1), (6, 1), (6, 1), axes)


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM")
def test_a_step_allocates_nothing_of_a_parameters_size() -> None:
    code = """
import torch
from lowmem.kernels.cpu_slim import slim_adamw_
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
def step(n, axes):
    p = torch.ones(n, n); g = torch.ones(n, n); m = torch.ones(n, n)
    v = torch.ones([1 if i in axes else n for i in range(2)])
    before = peak()
    slim_adamw_([p], [g], [m], [v], [axes], [1], lr=.1, beta1=.9, beta2=.9, eps=1e-8,
                weight_decay=0., maximize=False)
    return peak() - before
for axes in ((), (0,), (1,), (0, 1)):
    step(64, axes)
    used = step(3000, axes)
    assert used < 9000, (axes, used)  # kilobytes; a parameter has 36,000
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
