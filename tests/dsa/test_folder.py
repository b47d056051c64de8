"""Folders: kept or scratch, held by one process, and what each mode refuses."""

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from dsa_faults import in_child
from torch import nn

from lowmem import DSA
from lowmem.dsa.folder import SCRATCH_PREFIX, acquire_lock, file_system, release_lock
from lowmem.dsa.header import StoreError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


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


@pytest.mark.parametrize("mode", ["create", "resume", "overwrite"])
@pytest.mark.parametrize("name", ["file", "file/m", "broken-link"])
def test_a_folder_that_is_a_file(table, tmp_path, mode, name):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "broken-link").symlink_to("nowhere")
    place = name.partition("/")[0]
    with pytest.raises(
        NotADirectoryError, match=rf"directory= needs a folder, and \S*/{place} is none; choose"
    ):
        DSA([table], directory=tmp_path / name, mode=mode)
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_resume_of_an_empty_folder(table, tmp_path):
    with pytest.raises(FileNotFoundError, match="no store in the folder"):
        DSA([table], directory=tmp_path, mode="resume")


def test_resume_with_another_shape_or_other_parameters(table, tmp_path):
    with DSA([nn.Parameter(torch.ones(3, 3)), table], directory=tmp_path / "m") as opt:
        touch(opt, table)
    with pytest.raises(StoreError, match="holds 20 rows; the parameter has 21"):
        DSA([nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(21, 4))],
            directory=tmp_path / "m", mode="resume")  # fmt: skip
    with pytest.raises(
        StoreError, match=r'the parameter needs exp_avg: float32\[5\].* mode="overwrite"'
    ):
        DSA([nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(20, 5))],
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
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
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


# -- who holds a folder ----------------------------------------------------------------


def held_elsewhere(home):
    """Whether a process that did not open the folder is kept out of it."""
    script = "import sys, lowmem.dsa.folder as f; f.acquire_lock(f.Path(sys.argv[1]), patience=0)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(home / "LOCK")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return "held by another process" in done.stderr


def test_reading_the_lock_file_does_not_lose_the_lock(table, tmp_path):
    with DSA([table], directory=tmp_path / "m") as opt:
        touch(opt, table)
        shutil.copytree(tmp_path / "m", tmp_path / "copy")
        (tmp_path / "m" / "LOCK").read_text()
        assert held_elsewhere(tmp_path / "m")
        with pytest.raises(StoreError, match="another optimizer of this process"):
            DSA([table], directory=tmp_path / "m", mode="resume")
        assert held_elsewhere(tmp_path / "m")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_worker_that_outlives_its_killed_parent_holds_nothing(table, tmp_path, caplog):
    script = """
import os, signal, time, torch
from lowmem import DSA
table = torch.nn.Parameter(torch.ones(20, 4))
opt = DSA([table], directory="m")
opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
opt.commit()
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b"x")
    time.sleep(600)
os.read(reading, 1)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        worker = int(process.stdout.readline())
        try:
            process.wait()
            with DSA([table], directory=tmp_path / "m", mode="resume") as opt:
                assert opt.state_dict()["state"][0]["step"] == 1
            assert "waiting" not in caplog.text
            os.kill(worker, 0)  # it does outlive its parent
        finally:
            os.kill(worker, signal.SIGKILL)


def test_the_parent_still_holds_its_folder_after_a_fork_has_ended(table, tmp_path):
    with DSA([table], directory=tmp_path / "m") as opt:
        touch(opt, table)
        assert in_child(lambda: opt.close()) == 0
        assert (tmp_path / "m" / "LOCK").read_text() == f"{os.getpid()}\n"
        assert held_elsewhere(tmp_path / "m")
    assert not (tmp_path / "m" / "LOCK").exists()


DEAD = "999999999"  # above the largest process id


@pytest.fixture
def left_running(tmp_path):
    """A process that keeps the lock of a folder whose holder is dead."""
    path = tmp_path / "LOCK"
    path.write_text(f"{DEAD}\n")
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()])
    yield path, process
    process.kill()
    process.wait()


def test_what_a_dead_holder_left_running_is_waited_for(left_running, caplog):
    path, process = left_running
    with pytest.raises(
        StoreError,
        match=rf"is held by another process \(pid {DEAD}\), which has ended: a fork of it may "
        "still run; stop it, or choose another directory=",
    ):
        acquire_lock(path, patience=0.1)
    assert "waiting up to 0.1 s" in caplog.text
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    release_lock(acquire_lock(path, patience=60), path)
    timer.join()
    assert not path.exists()


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.parametrize(
    ("holder", "locks", "swept"),
    [
        (DEAD, True, True),
        (str(os.getpid()), True, True),  # a container gives the same ids again
        (str(os.getppid()), True, False),
        ("", True, False),
        ("-1", True, False),
        ("0", True, False),
        (DEAD, False, False),
        (str(os.getpid()), False, False),
        (str(os.getppid()), False, False),
    ],
)
def test_scratch_is_swept_only_where_its_process_is_dead_for_certain(
    table, tmp_path, monkeypatch, holder, locks, swept
):
    left = tmp_path / f"{SCRATCH_PREFIX}x"
    left.mkdir()
    (left / "LOCK").write_text(f"{holder}\n")
    (left / "table-000.rows").write_bytes(b"x")
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    with DSA([table]) as opt:
        touch(opt, table)
        with DSA([nn.Parameter(torch.ones(20, 4))]):
            assert (opt._estate.folder.path / "table-000.rows").exists()
        touch(opt, table)
    assert left.exists() is not swept


def test_a_disk_that_cannot_lock_is_a_warning(table, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with DSA([table], directory=tmp_path / "m") as opt:
        touch(opt, table)
    assert "a second process would go unnoticed" in caplog.text


def test_resume_without_a_folder_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="give directory=, the folder of the run before"):
        DSA([nn.Parameter(torch.ones(2, 2))], mode="resume")
    assert not list(tmp_path.iterdir())


def test_a_clean_resume_says_that_weights_do_not_come_back(tmp_path, caplog):
    table = nn.Parameter(torch.ones(10, 2))
    with DSA([table], directory=tmp_path / "m") as opt:
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 2))
    caplog.clear()
    DSA([table], directory=tmp_path / "m", mode="resume").close()
    assert "parameter 0 at step 1. Weights do not come back by themselves" in caplog.text


def test_files_of_a_store_are_no_programs(tmp_path):
    table = nn.Parameter(torch.ones(10, 2))
    with DSA([table], directory=tmp_path / "m") as opt:
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 2))
        opt.commit()
    modes = {path.name: path.stat().st_mode & 0o111 for path in (tmp_path / "m").iterdir()}
    assert len(modes) >= 3
    assert not any(modes.values()), modes
