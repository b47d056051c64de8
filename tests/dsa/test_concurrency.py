"""Threads, signal handlers and hyper-parameters that go bad: a step is whole or not at all."""

import os
import signal
import threading

import pytest
import torch
from torch import nn

from lowmem import DSA


def sparse(param, ids=(1,)):
    param.grad = torch.sparse_coo_tensor(
        [list(ids)], torch.ones(len(ids), *param.shape[1:]), param.shape
    )


@pytest.fixture
def pair(tmp_path):
    params = [nn.Parameter(torch.zeros(8, 4)) for _ in "ab"]
    with DSA(params, directory=tmp_path / "s") as opt:
        for param in params:
            sparse(param)
        opt.step()
        opt.commit()
        yield opt, params


def interrupt_second_table(opt, params, monkeypatch):
    """A signal comes between the update of the first table and that of the second."""
    table = opt._estate.tables[params[1]]
    update = table.update
    monkeypatch.setattr(
        table, "update", lambda *a: (os.kill(os.getpid(), signal.SIGTERM), update(*a))[1]
    )


@pytest.fixture
def on_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, before)


def test_a_signal_handler_cannot_commit_half_a_step(pair, monkeypatch, on_sigterm):
    opt, params = pair
    seen = []

    def handler(*_):
        try:
            opt.commit()
        except RuntimeError as error:
            seen.append(str(error))

    on_sigterm(handler)
    interrupt_second_table(opt, params, monkeypatch)
    opt.step()
    assert "Set a flag in the handler" in seen[0]
    assert {point.step for point in opt._estate._commit.tables.values()} == {1}
    assert {table.step for table in opt._estate.tables.values()} == {2}
    opt.commit()


def test_close_in_a_signal_handler_waits_for_the_end_of_the_step(
    pair, monkeypatch, on_sigterm, tmp_path
):
    opt, params = pair
    on_sigterm(lambda *_: opt.close())
    interrupt_second_table(opt, params, monkeypatch)
    opt.step()
    with pytest.raises(RuntimeError, match="this DSA is closed"):
        opt.step()
    with DSA(params, directory=tmp_path / "s", mode="resume") as again:
        assert [s["step"] for s in again.state_dict()["state"].values()] == [2, 2]


@pytest.mark.parametrize("durability", ["process", "none"])
def test_a_step_that_waited_while_another_thread_closed(tmp_path, durability):
    param = nn.Parameter(torch.zeros(8, 4))
    opt = DSA([param], directory=tmp_path / "s", durability=durability)
    sparse(param)
    opt.step()
    errors = []

    def step():
        try:
            opt.step()
        except RuntimeError as error:
            errors.append(str(error))

    with opt._estate.busy:
        threads = [threading.Thread(target=work) for work in (opt.close, step, opt.close)]
        for thread in threads:
            thread.start()
            thread.join(0.05)
    for thread in threads:
        thread.join()
    assert len(errors) in (0, 1)  # the lock does not say who comes first
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="this DSA is closed"):
        opt.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("durability", ["process", "none"])
def test_a_closure_that_closes_the_optimizer(tmp_path, durability):
    param = nn.Parameter(torch.zeros(8, 4))
    opt = DSA([param], directory=tmp_path / "s", durability=durability)
    sparse(param)
    opt.step()
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="this DSA is closed"):
        opt.step(lambda: opt.close() or 0.0)
    assert torch.equal(param, before)


def test_two_threads_on_one_table_take_turns(tmp_path):
    param = nn.Parameter(torch.zeros(1000, 64))
    errors = []
    with DSA([param], directory=tmp_path / "s") as opt:

        def loop(seed):
            generator = torch.Generator().manual_seed(seed)
            try:
                for _ in range(40):
                    count = int(torch.randint(1, 4000, (1,), generator=generator))
                    ids = torch.randint(0, 1000, (count,), generator=generator)
                    opt.step_rows(param, ids, torch.ones(count, 64))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert opt.state_dict()["state"][0]["step"] == 80
        assert torch.isfinite(param).all()


@pytest.mark.parametrize("directory", [None, "kept"])
def test_a_bad_learning_rate_in_the_second_group_changes_nothing(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    p, q = (nn.Parameter(torch.zeros(4, 2)) for _ in "pq")
    with DSA([{"params": [p]}, {"params": [q]}], directory=directory) as opt:
        for param in (p, q):
            sparse(param)
        opt.param_groups[1]["lr"] = None
        with pytest.raises(TypeError):
            opt.step()
        assert not p.any()
        opt.param_groups[1]["lr"] = 0.1
        opt.step()
        assert p.any()
        assert q.any()


def test_a_resized_dense_parameter_changes_nothing(tmp_path):
    p, q = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
    with DSA([p, q], directory=tmp_path / "s") as opt:
        sparse(p)
        q.grad = torch.ones(3)
        opt.step()
        before = p.detach().clone()
        q.data, q.grad = torch.zeros(5), None
        q.grad = torch.ones(5)
        with pytest.raises(RuntimeError, match=r"is \(5,\) on cpu now.*made for \(3,\)"):
            opt.step()
        assert torch.equal(p, before)
        q.grad = None
        opt.step()
        assert not torch.equal(p, before)


@pytest.mark.parametrize("index", [-(1 << 63), 1 << 62, (1 << 63) - 1, -1, 8])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_index_wraps_around(index, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    param = nn.Parameter(torch.zeros(8, 4))
    with DSA([param]) as opt:
        with pytest.raises(IndexError, match=f"index {index} is out of range"):
            opt.step_rows(param, torch.tensor([index] * count), torch.ones(count, 4))
        assert not param.any()


def test_odd_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="stands twice"), pytest.warns(UserWarning, match="dupl"):
        DSA([a, a, b])
    double = nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    with DSA([double]) as opt:
        values = torch.ones(1, 2, dtype=torch.float64)
        double.grad = torch.sparse_coo_tensor([[1]], values, (4, 2))
        with pytest.raises(TypeError, match="float64 weights"):
            opt.step()
        assert not list(tmp_path.glob("*/*.rows"))
    for shape in ((0, 4), (4, 0)):
        empty = nn.Parameter(torch.zeros(shape))
        with DSA([empty]) as opt:
            index = torch.zeros((1, 0 if shape[0] == 0 else 1), dtype=torch.int64)
            empty.grad = torch.sparse_coo_tensor(index, torch.ones(index.shape[1], shape[1]), shape)
            opt.step()
    lazy = nn.LazyLinear(3)
    with DSA(lazy.parameters()) as opt:
        lazy(torch.ones(2, 5)).sum().backward()
        opt.step()
