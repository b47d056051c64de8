"""Equal step counts of different trainings: a checkpoint is taken for its own rows only."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from dsa_faults import Net, assert_same, one_step, outcome
from torch import nn

from lowmem import DSA
from lowmem.dsa.header import StoreError

OTHER = "of another training of this store"


def train(net, opt, first, last, seed=0):
    for step in range(first, last):
        one_step(net, opt, step + 1000 * seed)


def start(folder, steps=8, **options):
    net = Net()
    opt = DSA(net.parameters(), lr=0.1, directory=folder, **options)
    train(net, opt, 0, steps)
    return net, opt


def resumed(folder, **options):
    net = Net()
    return net, DSA(net.parameters(), lr=0.1, directory=folder, mode="resume", **options)


def test_moments_from_elsewhere_at_the_committed_step_are_not_the_commits():
    """Loading the commit's checkpoint afterwards brings the commit's rows back."""
    table = nn.Embedding(30, 6, sparse=True)
    peer = torch.optim.SparseAdam(copy.deepcopy(table).parameters(), lr=0.1)
    for _ in range(3):
        param = peer.param_groups[0]["params"][0]
        param.grad = torch.sparse_coo_tensor([[1, 2]], torch.full((2, 6), 5.0), (30, 6))
        peer.step()
    ids = torch.arange(30)
    for close in (False, True):
        with DSA(table.parameters(), lr=0.1, directory=f"m{close}") as opt:
            for _ in range(3):
                opt.step_rows(table.weight, torch.tensor([1, 7]), torch.ones(2, 6))
            opt.save_checkpoint("c.pt", table)
            expected = opt.read_state(table.weight, ids)
            at_commit = opt.state_dict()
            opt.load_state_dict(copy.deepcopy(peer.state_dict()))
            assert opt.state_dict()["state"][0]["step"] == 3
            assert not torch.equal(
                opt.read_state(table.weight, ids)["exp_avg"][1], expected["exp_avg"][1]
            )
            if not close:
                opt.load_checkpoint("c.pt", table)
                found = opt.read_state(table.weight, ids)
                assert all(torch.equal(found[name], expected[name]) for name in expected)
                continue
            loaded = opt.state_dict()
        with DSA(table.parameters(), lr=0.1, directory="mTrue", mode="resume") as opt:
            opt.load_state_dict(loaded)  # the clean end is known by its own name
            opt.load_checkpoint("c.pt", table)
            found = opt.read_state(table.weight, ids)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            opt.load_state_dict(copy.deepcopy(peer.state_dict()))
            opt.commit()
            with pytest.raises(StoreError, match=OTHER):
                opt.load_state_dict(at_commit)


def test_a_state_dict_of_steps_that_were_rolled_back_is_refused():
    net, opt = start("m")
    with opt:
        opt.save_checkpoint("c.pt", net)
        train(net, opt, 8, 10)
        ahead = opt.state_dict()
        opt.load_checkpoint("c.pt", net)
        train(net, opt, 8, 10, seed=1)
        with pytest.raises(StoreError, match=r"saved at step 10 of another training"):
            opt.load_state_dict(ahead)
        assert opt.load_checkpoint("c.pt", net) == 8
        train(net, opt, 8, 10, seed=2)
        opt.save_checkpoint("d.pt", net)
        assert opt.load_checkpoint("d.pt", net) == 10


@pytest.mark.parametrize("how", ["export", "folder", "folder, no commit"])
def test_a_copy_and_its_original_do_not_take_each_others_checkpoints(how):
    """Both are trained to one step from where they parted."""
    net, opt = start("m", durability="none" if "no" in how else "process")
    options = {"durability": "none"} if "no" in how else {}
    with opt:
        opt.save_checkpoint("c.pt", net)
        opt.export("copy")
    if how != "export":
        shutil.rmtree("copy")
        shutil.copytree("m", "copy")
    first, opt = resumed("m", **options)
    with opt:
        assert opt.load_checkpoint("c.pt", first) == 8
        train(first, opt, 8, 10)
        opt.save_checkpoint("original.pt", first)
    second, opt = resumed("copy", **options)
    with opt:
        assert opt.load_checkpoint("c.pt", second) == 8
        train(second, opt, 8, 10, seed=1)
        opt.save_checkpoint("copy.pt", second)
        with pytest.raises(StoreError, match=OTHER):
            opt.load_checkpoint("original.pt", second)
        assert opt.load_checkpoint("copy.pt", second) == 10
        expected = outcome(second, opt)
    third, opt = resumed("copy", **options)
    with opt:
        assert opt.load_checkpoint("copy.pt", third) == 10
        assert_same(outcome(third, opt), expected)


def test_an_old_folder_from_a_backup_and_a_newer_checkpoint():
    net, opt = start("m")
    with opt:
        opt.commit()
        opt.save_checkpoint("old.pt", net)
    shutil.copytree("m", "backup")
    net, opt = resumed("m")
    with opt:
        opt.load_checkpoint("old.pt", net)
        train(net, opt, 8, 12)
        opt.save_checkpoint("new.pt", net)
    shutil.rmtree("m")
    shutil.copytree("backup", "m")
    net, opt = resumed("m")
    with opt:
        with pytest.raises(StoreError, match=r"saved at step 12; the store stands at step 8"):
            opt.load_checkpoint("new.pt", net)
        assert opt.load_checkpoint("old.pt", net) == 8
        train(net, opt, 8, 12, seed=1)
        with pytest.raises(StoreError, match=r"saved at step 12 of another training"):
            opt.load_checkpoint("new.pt", net)


def test_a_folder_may_be_renamed_between_runs():
    net, opt = start("m")
    with opt:
        opt.save_checkpoint("c.pt", net)
        train(net, opt, 8, 10)
    Path("m").rename("elsewhere")
    net, opt = resumed("elsewhere")
    with opt:
        assert opt.load_checkpoint("c.pt", net) == 8


def test_an_unclean_store_that_is_taken_as_it_is_matches_no_state_dict():
    net, opt = start("m", durability="none")
    saved = opt.state_dict()
    opt._finalizer.detach()  # as a crash leaves it
    opt._estate.folder.release()
    net = Net()
    with (
        DSA(net.parameters(), lr=0.1, directory="m", mode="resume-unclean") as opt,
        pytest.raises(StoreError, match=r"saved at step 8; the store stands at step 0"),
    ):
        opt.load_state_dict(saved)
