"""Files from a stranger: bytes, edits of sound files, and JSON that lies with a right checksum."""

import json
import os
import pickle
import random

import pytest
import torch
from dsa_faults import Net, one_step
from fuzz_readers import READERS, commit, feed, header, manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem import DSA
from lowmem.dsa import checkpoint

_QUICK = settings(max_examples=150, deadline=None)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(
        [
            "",
            "x",
            "../../etc/passwd",
            "/dev/zero",
            "table-000.rows",
            "\x00",
            "٣",
            "\ud800",
            "0" * 32,
        ]
    )
)
keys = st.sampled_from(
    ["format", "epoch", "tables", "target", "fingerprint", "stores", "files", "block_bytes", "rows",
     "0", "²", "-1", "table-000.rows", "table-000.sums", "identity", "layout", "step", "name",
     "committed_step", "clean", "journaled", "boot", "history", "dtype", "count"]
)  # fmt: skip
documents = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=8),
    max_leaves=25,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("name", list(READERS))
def test_bytes(folder, name):
    @_QUICK
    @given(st.binary(max_size=400))
    def check(data):
        feed(name, data, folder)

    check()


def test_json_that_lies(folder):
    @settings(max_examples=300, deadline=None)
    @given(
        documents,
        st.fixed_dictionaries(
            {
                "format": st.sampled_from([1, 1, 1, 2, True]),
                "epoch": st.integers(-1, 2**70),
                "tables": documents,
                "block_bytes": st.just(4 << 20),
                "stores": documents,
                "files": documents,
                "target": scalars,
                "fingerprint": documents,
                "rows": st.integers(0, 2**50),
                "identity": scalars,
                "layout": documents,
                "step": scalars,
                "committed_step": scalars,
                "clean": st.booleans(),
                "journaled": st.booleans(),
                "name": scalars,
                "boot": scalars,
                "history": scalars,
            }
        ),
    )
    def check(anything, shaped):
        for document in (anything, shaped):
            data = json.dumps(document).encode()
            for reader in (commit, manifest):
                feed(reader.__name__, data, folder)
            feed(header.__name__, b"\1" + data, folder)

    check()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound checkpoint."""
    home = tmp_path_factory.mktemp("c")
    net = Net()
    with DSA(net.parameters(), directory=home / "m") as opt:
        one_step(net, opt, 0)
        opt.save_checkpoint(home / "c.pt", net)
    return home / "c.pt"


def test_edits_of_a_checkpoint(whole, folder):
    data = whole.read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        edited = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            edited[rng.randrange(len(edited))] = rng.randrange(256)
        if rng.random() < 0.3:
            del edited[rng.randrange(len(edited)) :]
        feed("checkpoint", bytes(edited), folder)


class Evil:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("where", ["model", "optimizer", "extra", "all"])
def test_a_checkpoint_runs_no_code(whole, tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    payload = Evil() if where == "all" else {**checkpoint.read(whole), where: Evil()}
    torch.save(payload, "evil.pt")
    with pytest.raises(ValueError, match="not a lowmem checkpoint"):
        checkpoint.read("evil.pt")
    with open("plain.pt", "wb") as file:
        pickle.dump(payload, file)
    with pytest.raises(ValueError, match="not a lowmem checkpoint"):
        checkpoint.read("plain.pt")
    assert not os.path.exists("pwned")


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"model": {"a.weight": 3}},
        {"optimizer": []},
        {"optimizer": {}},
        {"optimizer": {"state": 3, "param_groups": [], "lowmem": {}}},
        {"optimizer": {"state": {}, "param_groups": [{"params": [0, 1, 2, 3]}], "lowmem": 3}},
        {"optimizer": {"state": {}, "param_groups": 7}},
        {"step": "x"},
        {"lowmem_checkpoint": 2},
    ],
)
def test_checkpoints_that_lie_change_nothing(whole, tmp_path, changes):
    torch.save({**checkpoint.read(whole), **changes}, tmp_path / "c.pt")
    net = Net()
    with DSA(net.parameters(), directory=tmp_path / "m") as opt:
        one_step(net, opt, 0)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with pytest.raises((ValueError, OSError)):
            opt.load_checkpoint(tmp_path / "c.pt", net)
        for name, value in net.state_dict().items():
            assert torch.equal(before[name], value)
        one_step(net, opt, 1)
