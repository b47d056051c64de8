"""Folders: kept or scratch, held by one process, and what each mode refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowmem import DSA
from lowmem.dsa.folder import SCRATCH_PREFIX, file_system
from lowmem.dsa.store import StoreError


@pytest.fixture
def table():
    return nn.Parameter(torch.ones(20, 4))


def touch(opt, table):
    opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))


def test_scratch_is_removed_at_close(table, tmp_path):
    opt = DSA([table])
    touch(opt, table)
    assert [p.name.startswith(SCRATCH_PREFIX) for p in tmp_path.iterdir()] == [True]
    opt.close()
    assert not list(tmp_path.iterdir())


def test_a_forgotten_optimizer_closes_itself(table, tmp_path):
    opt = DSA([table])
    touch(opt, table)
    del opt
    assert not list(tmp_path.iterdir())


def test_exit_without_close(tmp_path):
    script = """
import torch
from lowmem import DSA
table = torch.nn.Parameter(torch.ones(20, 4))
opt, kept = DSA([table]), DSA([table], directory="kept")
for o in (opt, kept):
    o.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    table = nn.Parameter(torch.ones(20, 4))
    with DSA([table], directory=tmp_path / "kept", mode="resume") as opt:
        assert opt.state_dict()["state"][0]["step"] == 1


def test_scratch_of_a_killed_process_is_swept(table, tmp_path):
    script = """
import os, signal, torch
from lowmem import DSA
table = torch.nn.Parameter(torch.ones(20, 4))
opt = DSA([table])
opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, timeout=120)
    (left,) = tmp_path.iterdir()
    with DSA([table]) as opt:
        touch(opt, table)
        assert not left.exists()


def test_modes(table, tmp_path):
    folder = tmp_path / "m"
    with pytest.raises(FileNotFoundError, match="no folder of stores"):
        DSA([table], directory=folder, mode="resume")
    assert not folder.exists()
    opt = DSA([table], directory=folder)
    touch(opt, table)
    first = opt.read_state(table, [1])
    opt.close()
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".rows") == ["table-000.rows"]
    with pytest.raises(FileExistsError, match='mode="resume" to go on'):
        DSA([table], directory=folder)
    with DSA([table], directory=folder, mode="resume") as again:
        for name, value in again.read_state(table, [1]).items():
            assert torch.equal(value, first[name])
    with DSA([table], directory=folder, mode="overwrite") as fresh:
        touch(fresh, table)
        assert fresh.state_dict()["state"][0]["step"] == 1


def test_resume_of_an_empty_folder(table, tmp_path):
    with pytest.raises(FileNotFoundError, match="no store in the folder"):
        DSA([table], directory=tmp_path, mode="resume")


def test_resume_with_another_shape_or_other_parameters(table, tmp_path):
    with DSA([nn.Parameter(torch.ones(3, 3)), table], directory=tmp_path / "m") as opt:
        touch(opt, table)
    with pytest.raises(StoreError, match="holds 20 rows; the parameter has 21"):
        DSA([nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(21, 4))],
            directory=tmp_path / "m", mode="resume")  # fmt: skip
    with pytest.raises(StoreError, match="belongs to parameter 1; this optimizer has 1"):
        DSA([table], directory=tmp_path / "m", mode="resume")
    # A failed resume holds nothing and has marked nothing.
    DSA([nn.Parameter(torch.ones(3, 3)), table], directory=tmp_path / "m", mode="resume").close()


def test_second_optimizer_of_this_process(table, tmp_path):
    with DSA([table], directory=tmp_path / "m") as opt:
        with pytest.raises(StoreError, match="another optimizer of this process"):
            DSA([table], directory=tmp_path / "m")
        touch(opt, table)
        with pytest.raises(StoreError, match="another optimizer of this process"):
            DSA([table], directory=tmp_path / "m", mode="resume")


def test_second_process_is_told_the_holder(table, tmp_path):
    with DSA([table], directory=tmp_path / "m") as opt:
        touch(opt, table)
        script = """
import torch
from lowmem import DSA
DSA([torch.nn.Parameter(torch.ones(20, 4))], directory="m", mode="resume")
"""
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode != 0
        assert f"held by another process (pid {os.getpid()})" in done.stderr


def test_a_stale_lock_is_no_obstacle(table, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "LOCK").write_text("999999999\n")
    with DSA([table], directory=tmp_path / "m") as opt:
        touch(opt, table)


def test_a_folder_that_is_a_file(table, tmp_path):
    (tmp_path / "m").write_text("")
    with pytest.raises(FileExistsError):
        DSA([table], directory=tmp_path / "m")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses")
def test_a_folder_that_cannot_be_written(table):
    with pytest.raises(OSError, match="/proc"):
        DSA([table], directory="/proc/lowmem")


@pytest.mark.skipif(
    file_system(Path("/dev/shm")) != "tmpfs",
    reason="needs a RAM-backed /dev/shm",
)
def test_a_ram_backed_folder_says_so(table):
    import tempfile

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        pytest.warns(UserWarning, match=r"RAM-backed file system \(tmpfs\)"),
    ):
        DSA([table], directory=folder).close()


def test_too_small_a_disk_is_an_error_before_training(tmp_path, monkeypatch):
    import shutil

    from lowmem.dsa import store

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    table = nn.Embedding(200_000, 100, sparse=True)
    with pytest.raises(OSError, match=r"needs 160,000,000 bytes and 10,000,000 are free"):
        DSA(table.parameters(), directory=tmp_path / "m")
    assert not (tmp_path / "m").exists() or not list((tmp_path / "m").iterdir())


def test_resume_in_another_order_is_refused_where_names_tell(tmp_path):
    a, b = (nn.Parameter(torch.ones(20, 4)) for _ in "ab")
    with DSA([("a", a), ("b", b)], directory=tmp_path / "m") as opt:
        touch(opt, a)
        touch(opt, b)
    for mode in ("resume", "resume-unclean"):
        with pytest.raises(StoreError, match=r"was made for a; the parameter here is b\."):
            DSA([("b", b), ("a", a)], directory=tmp_path / "m", mode=mode)
    DSA([b, a], directory=tmp_path / "m", mode="resume").close()  # without names: their order
    DSA([("a", a), ("b", b)], directory=tmp_path / "m", mode="resume").close()
    assert not (tmp_path / "m" / "LOCK").exists()


def test_a_long_name_trains_commits_and_resumes(tmp_path, table):
    name = "encoder." * 214
    with DSA([(name, table)], directory=tmp_path / "m") as opt:
        for _ in range(11):
            touch(opt, table)
        opt.commit()
    with DSA([(name, table)], directory=tmp_path / "m", mode="resume") as opt:
        assert opt.state_dict()["state"][0]["step"] == 11
