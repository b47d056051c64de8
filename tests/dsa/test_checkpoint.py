"""Checkpoint files: what they hold comes back, and what cannot come back is not written."""

import collections
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from dsa_faults import in_child
from torch import nn

from lowmem import DSA

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Net(nn.Module):
    """One sparse table, one dense layer, and a state that is no tensor."""

    def __init__(self, extra_state=None):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.head = nn.Linear(4, 300)
        self.norm = nn.BatchNorm1d(300)
        self.kept = extra_state

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state

    def forward(self, ids):
        return self.norm(self.head(self.table(ids))).square().sum()


def train(net, opt, steps=1):
    for _ in range(steps):
        opt.zero_grad()
        net(torch.tensor([1, 2, 5])).backward()
        opt.step()


def folder_state():
    return {path.name: path.read_bytes() for path in sorted(Path("m").iterdir())}


def test_numpy_learning_rates_of_a_scheduler_come_back():
    net = Net({"seen": np.int64(3)})
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: np.float64(0.5) ** step)
        train(net, opt)
        scheduler.step()
        assert isinstance(opt.param_groups[0]["lr"], np.float64)
        opt.save_checkpoint("c.pt", net, extra={"scheduler": scheduler.state_dict()["_last_lr"]})
        train(net, opt)
    other = Net()
    with DSA(other.parameters(), directory="m", mode="resume") as opt:
        assert opt.load_checkpoint("c.pt", other) == 1
        assert opt.param_groups[0]["lr"] == 0.05
        assert opt.load_extra("c.pt") == {"scheduler": [0.05]}
    assert other.kept == {"seen": 3}


@pytest.mark.parametrize("state", [{"seen": 3, "mean": torch.ones(2)}, torch.ones(3), "text", [1]])
def test_the_extra_state_of_a_module_comes_back(state):
    net = Net(state)
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net)
        other = Net(torch.zeros(1))  # another kind and shape: that is the module's business
        opt.load_checkpoint("c.pt", other)
    assert str(other.kept) == str(state)


endless: list = [1]
endless.append(endless)
Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("option", "extra", "state", "named"),
    [
        (Path("x"), None, None, r"optimizer\['param_groups'\]\[0\]\['source'\] is a pathlib\."),
        (None, {"a": [1, Path("x")]}, None, r"extra\['a'\]\[1\] is a pathlib\."),
        (None, {Path("x"): 1}, None, r"a key of extra is a pathlib\."),
        (None, lambda: 0, None, "extra is a builtins.function"),
        (None, endless, None, "extra= contains itself"),
        (None, np.ones(3), None, "extra is a numpy.ndarray"),
        (None, Point(1, 2), None, r"extra is a .*Point"),
        (None, None, {"p": Path("x")}, r"model\['_extra_state'\]\['p'\] is a pathlib\."),
    ],
)
def test_what_could_not_be_loaded_is_neither_written_nor_committed(option, extra, state, named):
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net)
        train(net, opt)
        before, files = Path("c.pt").read_bytes(), folder_state()
        opt.param_groups[0]["source"], net.kept = option, state
        with pytest.raises(TypeError, match=named):
            opt.save_checkpoint("c.pt", net, extra=extra)
        assert folder_state() == files
        assert Path("c.pt").read_bytes() == before
        assert not os.path.exists("c.pt.new")
        opt.param_groups[0]["source"] = net.kept = None
        opt.load_checkpoint("c.pt", net)


def test_a_file_that_cannot_be_read_back_is_not_committed(monkeypatch):
    """Whatever the reason: here a tensor whose file lies."""
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net)
        train(net, opt)
        files, real = folder_state(), torch.save
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", lambda payload, file: real([payload], file))
            with pytest.raises(TypeError, match="so none was written"):
                opt.save_checkpoint("c.pt", net)
        changed = {n for n, data in folder_state().items() if data != files.get(n)}
        assert not [name for name in changed if not name.endswith(".sums")]
        opt.load_checkpoint("c.pt", net)


def test_nothing_stays_mapped_onto_the_file():
    """A mapped file that is cut short would end the process with SIGBUS."""
    net = Net({"mean": torch.ones(5000)})
    ema = torch.randn(5000)
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net, extra={"ema": ema, "same": [ema]})

    def work():
        other = Net()
        again = DSA(other.parameters(), lr=0.1, directory="m", mode="resume")
        again.load_checkpoint("c.pt", other)
        extra = again.load_extra("c.pt")
        os.truncate("c.pt", 0)
        assert torch.equal(extra["ema"], ema)
        assert extra["same"][0].data_ptr() == extra["ema"].data_ptr()
        train(other, again)
        assert other.kept["mean"].sum() == 5000
        os._exit(7)

    assert in_child(work) == 7


@pytest.mark.parametrize("kind", ["text", "nothing", "state_dict", "part", "list"])
def test_a_file_that_is_no_checkpoint_is_called_that(kind):
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net)
        data = Path("c.pt").read_bytes()
        if kind == "state_dict":
            torch.save(net.state_dict(), "c.pt")
        elif kind == "list":
            torch.save([1], "c.pt")
        else:
            content = {
                "text": b"step,loss\n1,0.5\n",
                "nothing": b"",
                "part": data[: len(data) // 2],
            }
            Path("c.pt").write_bytes(content[kind])
        for read in (lambda: opt.load_checkpoint("c.pt", net), lambda: opt.load_extra("c.pt")):
            with pytest.raises(ValueError, match=r"^c\.pt is not a lowmem checkpoint") as caught:
                read()
            assert not any(word in str(caught.value) for word in ("pickle", "Unpickl", "zip"))


def test_a_folder_is_no_checkpoint():
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net)
        train(net, opt)
        files, place = folder_state(), sorted(os.listdir())
        for call in (
            lambda: opt.save_checkpoint("m", net),
            lambda: opt.load_checkpoint("m", net),
            lambda: opt.load_extra(Path("m")),
        ):
            with pytest.raises(IsADirectoryError, match=r"name a file, such as m/checkpoint\.pt"):
                call()
        with pytest.raises(NotADirectoryError, match=r"needs a folder, and .*/c\.pt is none"):
            opt.save_checkpoint("c.pt/c.pt", net)
        with pytest.raises(FileNotFoundError, match=r"make it first: 'new/c\.pt'"):
            opt.save_checkpoint("new/c.pt", net)
        assert (folder_state(), sorted(os.listdir())) == (files, place)


def test_a_path_below_home_is_written_and_read_by_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("~/c.pt", net, extra=5)
        assert (tmp_path / "home" / "c.pt").exists()
        assert opt.load_checkpoint("~/c.pt", net) == 1
        assert opt.load_extra("~/c.pt") == 5


def test_a_checkpoint_cut_anywhere_is_refused_and_changes_nothing():
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        train(net, opt)
        opt.save_checkpoint("c.pt", net)
        data = Path("c.pt").read_bytes()
        train(net, opt)
        before = {
            name: tensor.clone()
            for name, tensor in net.state_dict().items()
            if torch.is_tensor(tensor)
        }
        for size in range(0, len(data), 1024):
            Path("c.pt").write_bytes(data[:size])
            with pytest.raises(ValueError, match="not a lowmem checkpoint"):
                opt.load_checkpoint("c.pt", net)
        assert opt.state_dict()["state"][0]["step"] == 2
        assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in before.items())
        Path("c.pt").write_bytes(data)
        assert opt.load_checkpoint("c.pt", net) == 1


def test_a_checkpoint_of_a_scratch_folder_is_refused_with_what_it_needs():
    net = Net()
    with DSA(net.parameters()) as opt:
        train(net, opt)
        with pytest.raises(ValueError, match=r"a checkpoint needs DSA\(..., directory=...\)"):
            opt.save_checkpoint("c.pt", net)
        assert not os.path.exists("c.pt")
        torch.save(opt.state_dict(materialize=True), "moments.pt")  # as the message says
