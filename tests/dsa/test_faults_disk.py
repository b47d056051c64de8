"""A disk that is full, read-only or gone: real small file systems, which need root."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsa_faults import STEPS, Net, assert_same, in_child, one_step, outcome, run
from torch import nn

from lowmem import DSA
from lowmem.dsa.header import StoreError

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="mounts"),
    pytest.mark.filterwarnings("ignore:.*RAM-backed:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


# torch's writer turns the error of the disk into one of its own.
FULL = re.compile("No space left|file write failed|unexpected pos")


def mounted(place: Path, *options: str):
    place.mkdir()
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    return place


@pytest.fixture
def small(tmp_path):
    """A file system of 2 MB."""
    place = mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def ext4(tmp_path):
    """A real one on a real block device of 16 MB."""
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    place = mounted(tmp_path / "ext4", "-o", "loop", str(image))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def full(place: Path, leave: int = 0):
    """Fill the file system, but for ``leave`` bytes; there is space again afterwards."""
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    if leave:
        os.truncate(filler, max(0, filler.stat().st_size - leave))
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(params=["small", "ext4"])
def disk(request):
    return request.getfixturevalue(request.param)


def test_full_at_construction(disk):
    table = nn.Parameter(torch.zeros(20_000, 128))
    with DSA([table], directory=disk / "m") as opt:
        with pytest.raises(OSError, match=r"needs 20,48\d,\d+ bytes and [\d,]+ are free") as caught:
            opt.step_rows(table, torch.tensor([1]), torch.ones(1, 128))
        assert caught.value.errno == errno.ENOSPC
        assert not list((disk / "m").glob("table-*"))
    # A table that is surely one is refused before training.
    likely = nn.Parameter(torch.zeros(150_000, 128))
    with pytest.raises(OSError, match=r"needs 153,600,000 bytes and [\d,]+ are free"):
        DSA([likely], directory=disk / "n")


def test_full_when_the_checksums_are_made_leaves_no_store(small):
    """The rows fit and what belongs to them does not."""
    table = nn.Parameter(torch.zeros(4000, 16))
    opt = DSA([table], directory=small / "m")
    with (
        full(small, leave=4000 * 128 + 4096 + 8192),
        pytest.raises(OSError, match=r"needs 32,000 bytes and [\d,]+ are free"),
    ):
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 16))
    assert not list((small / "m").glob("table-*"))
    opt.step_rows(table, torch.tensor([1]), torch.ones(1, 16))
    opt.close()


def test_full_at_a_journal_append_fails_the_step_whole_and_training_goes_on(disk, whole_run):
    net, wide = Net(), nn.Parameter(torch.zeros(300, 64))
    with DSA([*net.parameters(), wide], lr=0.1, directory=disk / "m") as opt:
        opt.step_rows(wide, torch.arange(300), torch.ones(300, 64))
        for step in range(7):
            one_step(net, opt, step)
        opt.commit()
        before, moments = outcome(net, opt), opt.read_state(wide, torch.arange(300))
        one_step_with = sparse(wide)
        with full(disk), pytest.raises(OSError, match="No space left") as caught:
            # One step on all tables: the small ones are kept first, the wide one has no room.
            one_step_with(net, opt, 7)
        assert caught.value.errno == errno.ENOSPC
        assert_same(outcome(net, opt), before)
        for name, value in opt.read_state(wide, torch.arange(300)).items():
            assert torch.equal(value, moments[name])
        assert {int(s["step"]) for s in opt.state_dict()["state"].values()} == {7, 1}
        wide.grad = None
        for step in range(7, STEPS):
            one_step(net, opt, step)
        assert_same(outcome(net, opt), whole_run)


def sparse(wide):
    def step_with(net, opt, step):
        hook = opt.register_step_pre_hook(
            lambda *_: setattr(
                wide,
                "grad",
                torch.sparse_coo_tensor(torch.arange(300)[None], torch.ones(300, 64), wide.shape),
            )
        )
        try:
            one_step(net, opt, step)
        finally:
            hook.remove()

    return step_with


@pytest.mark.parametrize("how", ["commit", "save_checkpoint"])
def test_full_at_a_commit_keeps_the_one_before(disk, whole_run, how):
    net = Net()
    home = disk
    with DSA(net.parameters(), lr=0.1, directory=home / "m") as opt:
        for step in range(8):
            if step == 7:
                opt.save_checkpoint(home / "c.pt", net)
            one_step(net, opt, step)
        before = sorted(p.name for p in home.rglob("*") if p.name != "filler")
        with full(home), pytest.raises((OSError, RuntimeError), match=FULL):
            opt.commit() if how == "commit" else opt.save_checkpoint(home / "c.pt", net)
        assert sorted(p.name for p in home.rglob("*") if p.name != "filler") == before
        assert_goes_on(home, whole_run)
        for step in range(8, STEPS):
            one_step(net, opt, step)
        assert_same(outcome(net, opt), whole_run)
        opt.save_checkpoint(home / "c.pt", net)


def assert_goes_on(home, whole_run):
    """A copy of the folder, as a crash at this moment would leave it, goes on."""
    copy = home.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns("filler", "lost+found", "LOCK"))
    assert_same(run(copy), whole_run)


def test_full_at_export_goes_on_once_there_is_space(disk, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = nn.Parameter(torch.zeros(5000, 16))
    with DSA([table], directory=tmp_path / "m") as opt:
        opt.step_rows(table, torch.arange(5000), torch.ones(5000, 16))
        with full(disk, leave=300_000):
            with pytest.raises(OSError, match=r"needs [\d,]+ more bytes and [\d,]+ are free"):
                opt.export(disk / "x")
            # The check before the copy cannot see what others write meanwhile.
            monkeypatch.setattr("lowmem.dsa.transfer._require_room", lambda *_: None)
            with pytest.raises(OSError, match="No space left"):
                opt.export(disk / "x")
            with pytest.raises(FileNotFoundError, match=r"no MANIFEST\.json"):
                DSA.import_(disk / "x")
            opt.step_rows(table, torch.tensor([3]), torch.ones(1, 16))
        opt.export(disk / "x")
    assert DSA.import_(disk / "x") == disk / "x"


def test_read_only(ext4, whole_run):
    run(ext4, steps=10)
    subprocess.run(["mount", "-o", "remount,ro", str(ext4)], check=True)
    for mode in ("resume", "create", "overwrite"):
        with pytest.raises(OSError, match="Read-only file system"):
            DSA(Net().parameters(), lr=0.1, directory=ext4 / "m", mode=mode)
    subprocess.run(["mount", "-o", "remount,rw", str(ext4)], check=True)
    assert_same(run(ext4), whole_run)


def test_a_file_system_that_turns_read_only_in_training(ext4, whole_run):
    """As ext4 does on an error: what is not written can no longer be, and the kernel says so."""

    def work():
        net = Net()
        opt = DSA(net.parameters(), lr=0.1, directory=ext4 / "m", durability="power")
        for step in range(5):
            if step == 4:
                opt.save_checkpoint(ext4 / "c.pt", net)
            one_step(net, opt, step)
        subprocess.run(["mount", "-o", "remount,abort", str(ext4)], check=True)
        try:
            for step in range(5, STEPS):
                one_step(net, opt, step)
            opt.commit()
        except OSError:
            os._exit(7)
        os._exit(8)

    # An error, or the kernel's SIGBUS: never a run that goes on as if nothing were.
    assert in_child(work) in (7, -7)
    subprocess.run(["umount", str(ext4)], check=True)
    image = ext4.parent / "image"
    subprocess.run(["e2fsck", "-fy", str(image)], capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(ext4)], check=True)
    assert_same(run(ext4, durability="power"), whole_run)


def test_a_folder_removed_underneath(tmp_path):
    table = nn.Parameter(torch.zeros(50, 4))
    opt = DSA([table], directory=tmp_path / "m")
    opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
    opt.commit()
    shutil.rmtree(tmp_path / "m")
    before = table.detach().clone()
    with pytest.raises(StoreError, match="was removed while it was in use"):
        opt.step_rows(table, torch.tensor([2]), torch.ones(1, 4))
    assert torch.equal(table, before)
    with pytest.raises(FileNotFoundError):
        opt.commit()
    opt.close()
    assert not (tmp_path / "m").exists()
