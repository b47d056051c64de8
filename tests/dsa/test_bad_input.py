"""Every bad input is a clear error, and nothing has changed after it."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from lowmem import DSA


@pytest.fixture
def table():
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(20, 4))


@pytest.fixture
def opt(table):
    with DSA([table], lr=0.1) as optimizer:
        optimizer.step_rows(table, torch.tensor([1, 2]), torch.ones(2, 4))
        yield optimizer


def snapshot(opt, table):
    state = opt.read_state(table, torch.arange(len(table)))
    return [table.detach().clone(), state["exp_avg"], state["exp_avg_sq"]]


@pytest.mark.parametrize(
    ("indices", "grads", "error", "message"),
    [
        ([20], torch.ones(1, 4), IndexError, r"index 20 is out of range; the table has 20 rows"),
        ([3, -1], torch.ones(2, 4), IndexError, r"index -1 is out of range"),
        ([2**40], torch.ones(1, 4), IndexError, r"index 1099511627776 is out of range"),
        ([2**62], torch.ones(1, 4), IndexError, r"index 4611686018427387904 is out of range"),
        ([-(2**62)], torch.ones(1, 4), IndexError, r"out of range"),
        ([1], torch.ones(1, 5), ValueError, r"shape \(1, 5\).*need \(1, 4\)"),
        ([1, 2], torch.ones(1, 4), ValueError, r"need \(2, 4\)"),
        ([[1, 2]], torch.ones(2, 4), ValueError, r"indices must have one dimension"),
        ([1], torch.ones(1, 4, dtype=torch.int64), TypeError, r"floats, not torch.int64"),
        ([1], torch.ones(1, 4, dtype=torch.complex64), TypeError, r"floats, not torch.complex64"),
        ([1.0], torch.ones(1, 4), TypeError, r"whole numbers, not torch.float32"),
        ([True], torch.ones(1, 4), TypeError, r"whole numbers, not torch.bool"),
    ],
)
def test_step_rows(opt, table, indices, grads, error, message):
    before = snapshot(opt, table)
    with pytest.raises(error, match=message):
        opt.step_rows(table, torch.tensor(indices), grads)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(opt, table), strict=True))


def test_a_bad_gradient_of_one_table_leaves_the_others_alone(table):
    other = nn.Parameter(torch.zeros(5, 2))
    dense = nn.Parameter(torch.zeros(3))
    with DSA([table, dense, other]) as opt:
        table.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (20, 4))
        dense.grad = torch.ones(3)
        other.grad = torch.sparse_coo_tensor([[7]], torch.ones(1, 2), (5, 2))
        before = table.detach().clone()
        with pytest.raises(IndexError, match=r"parameter 2: index 7 is out of range"):
            opt.step()
        assert torch.equal(table, before)
        assert torch.equal(dense, torch.zeros(3))
        assert not opt.read_state(table, [1])["exp_avg"].any()


def test_gradient_with_two_sparse_dimensions(table):
    with DSA([table]) as opt:
        table.grad = torch.sparse_coo_tensor([[1], [2]], torch.ones(1), (20, 4))
        with pytest.raises(ValueError, match="2 sparse dimensions"):
            opt.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"eps": -1e-8}, "Invalid epsilon value: -1e-08"),
        ({"betas": (1.0, 0.999)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\) must be two numbers"),
        ({"mode": "append"}, "mode='append'"),
        ({"durability": "high"}, "durability='high'"),
        ({"prefetch": "yes"}, "prefetch='yes'"),
        ({"betas": 0.9}, r"^betas=0.9 must be two numbers, such as \(0.9, 0.999\)"),
        ({"betas": None}, "^betas=None must be two numbers"),
        ({"betas": (0.9, "0.999")}, r"^betas\[1\]='0.999' must be a number"),
        ({"lr": None}, "^lr=None must be a number"),
        ({"lr": "0.1"}, "^lr='0.1' must be a number"),
        ({"eps": [1e-8]}, r"^eps=\[1e-08\] must be a number"),
    ],
)
def test_hyper_parameters(table, options, message, tmp_path):
    wrong_kind = message.startswith("^")
    with pytest.raises(TypeError if wrong_kind else ValueError, match=message):
        DSA([table], **options)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_options_of_adam_that_are_not_used_are_named_once(table):
    dense = nn.Parameter(torch.zeros(3))
    groups = [
        {"params": [table], "weight_decay": 0.1, "my_scale": 3.0, "source": "films"},
        {"params": [dense], "weight_decay": 0, "amsgrad": True, "momentum": None},
    ]
    with pytest.warns(UserWarning, match="DSA does not use") as caught:
        opt = DSA(groups)
    (said,) = (str(w.message) for w in caught)
    assert "weight_decay=0.1 of parameter group 0, amsgrad=True of parameter group 1:" in said
    assert "torch.optim.AdamW or lowmem.SlimAdamW" in said
    assert "my_scale" not in said
    assert caught[0].filename == __file__
    with opt:
        assert opt.param_groups[0]["weight_decay"] == 0.1, "kept, as torch keeps any key"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.load_state_dict(opt.state_dict())  # nothing new
        late = {"params": [nn.Parameter(torch.zeros(2))], "nesterov": True}
        with pytest.warns(UserWarning, match="use nesterov=True of parameter group 2:") as more:
            opt.add_param_group(late)
        assert len(more) == 1


def test_options_of_adam_that_change_nothing_are_no_warning(table, recwarn):
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], weight_decay=0.0).param_groups[0]
    DSA([{**adam, "params": [table], "mine": 1}]).close()
    assert not [w for w in recwarn if "does not use" in str(w.message)]


def test_weight_decay_in_a_loaded_state_is_named_once(recwarn):
    peer = torch.optim.AdamW([nn.Parameter(torch.zeros(3))])
    with DSA([nn.Parameter(torch.zeros(3))]) as opt:
        opt.load_state_dict(peer.state_dict())
        opt.load_state_dict(peer.state_dict())
    (told,) = (w for w in recwarn if "does not use" in str(w.message))
    assert "weight_decay=0.01 of parameter group 0" in str(told.message)
    assert told.filename == __file__


def test_a_bad_group_is_an_error_at_construction(table):
    with pytest.raises(ValueError, match="Invalid learning rate: -2"):
        DSA([{"params": [table], "lr": -2}])


def test_empty_parameter_list():
    with pytest.raises(ValueError, match="empty parameter list"):
        DSA([])


def test_sparse_and_complex_parameters_are_refused():
    with pytest.raises(ValueError, match="complex64"):
        DSA([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


def test_a_tensor_of_somebody_else(opt):
    with pytest.raises(ValueError, match=r"shape \(20, 4\) is no parameter of this DSA"):
        opt.step_rows(torch.zeros(20, 4), torch.tensor([1]), torch.ones(1, 4))


def test_a_parameter_that_changed_its_shape(opt, table):
    table.data = torch.zeros(30, 4)
    with pytest.raises(RuntimeError, match=r"is \(30, 4\) on cpu now.*made for \(20, 4\)"):
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))


def test_a_dense_gradient_after_sparse_ones(opt, table):
    table.grad = torch.ones_like(table)
    with pytest.raises(RuntimeError, match="tied weights"):
        opt.step()


def test_a_sparse_gradient_after_dense_ones(table):
    with DSA([table]) as opt:
        table.grad = torch.ones_like(table)
        opt.step()
        table.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (20, 4))
        with pytest.raises(RuntimeError, match="sparse=True"):
            opt.step()


def test_a_dense_gradient_of_an_embedding_warns_and_names_sparse():
    big = nn.Embedding(200_000, 100)
    with DSA(big.named_parameters()) as opt:
        big(torch.tensor([1])).sum().backward()
        with pytest.warns(UserWarning, match=r"weight \(200,000 × 100\).*0\.16 GB.*sparse=True"):
            opt.step()


def test_step_after_close(opt, table):
    opt.close()
    opt.close()  # twice is no error
    with pytest.raises(RuntimeError, match="this DSA is closed"):
        opt.step()
    with pytest.raises(RuntimeError, match="this DSA is closed"):
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="this DSA is closed"):
        opt.read_state(table, [1])


def test_pickle_says_what_to_do_instead(opt):
    import pickle

    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(opt)


def test_torch_itself_refuses_what_cannot_be_sparse():
    with pytest.raises((RuntimeError, ValueError)):
        nn.EmbeddingBag(5, 2, mode="max", sparse=True)(torch.tensor([[1, 2]]))
    table = nn.Embedding(5, 2, sparse=True, scale_grad_by_freq=True)
    with pytest.raises(RuntimeError):
        table(torch.tensor([1])).sum().backward()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_cannot_step_and_leaves_the_files_alone(tmp_path):
    script = """
import os, sys, torch
from lowmem import DSA
table = torch.nn.Parameter(torch.zeros(20, 4))
opt = DSA([table], directory="kept")
opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
child = os.fork()
if child == 0:
    try:
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
    except RuntimeError as error:
        print(error, flush=True)
    sys.exit(0)  # a full exit, finalizers included
os.waitpid(child, 0)
opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
opt.close()
resumed = DSA([table], directory="kept", mode="resume")
print(resumed.state_dict()["state"][0]["step"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "two processes must not write one store" in lines[0]
    assert lines[1] == "2"


def test_a_module_instead_of_parameters_and_arguments_in_the_wrong_order(tmp_path):
    model = nn.Embedding(5, 2, sparse=True)
    with pytest.raises(TypeError, match=r"pass model.parameters\(\)"):
        DSA(model)
    with DSA(model.parameters(), directory=tmp_path / "s") as opt:
        for call in (opt.save_checkpoint, opt.load_checkpoint):
            with pytest.raises(TypeError, match="path comes first"):
                call(model, "c")


def test_a_folder_that_got_no_store_says_so_at_close(tmp_path, caplog):
    model = nn.Embedding(5, 2)
    with DSA(model.parameters(), directory=tmp_path / "s") as opt:
        model(torch.tensor([1])).sum().backward()
        opt.step()
    assert "no parameter had a sparse gradient" in caplog.text
