"""``lowmem store``: what is there, whether it is sound, and the way back."""

import os
from pathlib import Path

import pytest
import torch
from dsa_faults import Net, flip, in_child, one_step
from torch import nn

from lowmem import DSA
from lowmem.cli import main
from lowmem.dsa.header import HEADER_BYTES


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def crashed(steps=8, commit_at=4, name="m"):
    def work():
        net = Net()
        opt = DSA(net.parameters(), lr=0.1, directory=name)
        for step in range(steps):
            if step == commit_at:
                opt.commit()
            one_step(net, opt, step)
        os._exit(9)

    assert in_child(work) == 9


def closed(name="m", **options):
    table = nn.Parameter(torch.zeros(300, 4))
    with DSA([table], directory=name, **options) as opt:
        opt.step_rows(table, torch.arange(0, 300, 3), torch.ones(100, 4))
    return table


def test_info(capsys):
    closed()
    assert main(["store", "info", "m"]) == 0
    out = capsys.readouterr().out
    assert "commit 1, 1 table(s)" in out
    assert "300 of exp_avg: float32[4] + exp_avg_sq: float32[4]" in out
    assert "closed cleanly at step 1, can go back to the commit at step 1" in out
    assert main(["store", "info", "m/table-000.rows"]) == 0


def test_info_of_a_crash(capsys):
    crashed()
    assert main(["store", "info", "m"]) == 0
    out = capsys.readouterr().out
    assert "not closed cleanly, can go back to the commit at step 4" in out
    assert "not closed cleanly, and there is no commit to go back to" in out


def test_verify_sound(capsys):
    closed()
    assert main(["store", "verify", "m"]) == 0
    assert "sound: 300 rows match their checksums" in capsys.readouterr().out


def test_verify_names_damaged_rows(capsys):
    closed()
    for row in (7, 299):
        flip_row(row)
    assert main(["store", "verify", "m"]) == 1
    assert "2 damaged row(s): 7, 299." in capsys.readouterr().out


def flip_row(row):
    flip(Path("m/table-000.rows"), HEADER_BYTES + row * 32 + 5, 3)


def test_resume_unclean_accepts_damaged_rows(capsys):
    table = closed()
    flip_row(7)
    DSA([table], directory="m", mode="resume-unclean").close()
    assert main(["store", "verify", "m"]) == 0


def test_verify_without_checksums(capsys):
    closed(durability="none")
    assert main(["store", "verify", "m"]) == 0
    assert "there are no checksums" in capsys.readouterr().out
    assert not os.path.exists("m/table-000.sums")


@pytest.mark.parametrize("what", ["header", "cut", "journal", "record"])
def test_verify_damage(capsys, what):
    crashed(8, 7)
    if what == "header":
        flip(Path("m/table-000.rows"), 100)
        flip(Path("m/table-000.rows"), 2148)
    elif what == "cut":
        os.truncate("m/table-000.rows", 5000)
    elif what == "journal":
        flip(Path("m/table-000.undo"), 20)
    else:
        flip(Path("m/COMMIT.json"), 12)
    assert main(["store", "verify", "m"]) == 1
    assert "damaged" in (out := capsys.readouterr().out) or "truncated" in out or "sound" in out
    assert main(["store", "repair", "m"]) == 2  # nothing is written where the way back is damaged


def test_repair_rolls_back(capsys):
    crashed()
    assert main(["store", "verify", "m"]) == 1  # the second table is not in the commit
    capsys.readouterr()
    assert main(["store", "repair", "m"]) == 0
    out = capsys.readouterr().out
    assert "back to the commit at step 4" in out
    assert "removed" in out
    assert "every store is closed cleanly now" in out
    assert "table-000.rows: sound" in out
    with DSA(Net().parameters(), directory="m", mode="resume") as opt:
        assert opt.state_dict()["state"][0]["step"] == 4


def test_repair_of_a_sound_folder_changes_nothing(capsys):
    closed()
    before = Path("m/table-000.rows").read_bytes()
    assert main(["store", "repair", "m"]) == 0
    assert Path("m/table-000.rows").read_bytes() == before


def test_an_export_is_held_to_its_manifest(capsys, tmp_path):
    net = Net()
    with DSA(net.parameters(), directory="m") as opt:
        one_step(net, opt, 0)
        opt.export("x")
    assert main(["store", "verify", "x"]) == 0
    assert "every file matches" in capsys.readouterr().out
    flip(tmp_path / "x" / "table-000.sums", 3)
    assert main(["store", "verify", "x"]) == 1


@pytest.mark.parametrize("action", ["info", "verify", "repair"])
def test_a_held_folder_is_left_alone(capfd, action):
    table = nn.Parameter(torch.zeros(30, 4))
    with DSA([table], directory="m") as opt:
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 4))
        before = Path("m/table-000.rows").read_bytes()
        assert in_child(lambda: os._exit(main(["store", action, "m"]))) == 2
        assert f"held by another process (pid {os.getpid()})" in capfd.readouterr().err
        assert Path("m/table-000.rows").read_bytes() == before


def test_bad_paths(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "x.rows").write_text("")
    for path in ("nowhere", "empty", "a.txt", "x.rows"):
        assert main(["store", "info", path]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert not os.path.exists("empty/LOCK")
