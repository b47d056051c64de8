"""What a bad day brings, but for SIGKILL and full disks: damage, forks, interrupts, hooks."""

import logging
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from dsa_faults import LATE, STEPS, Net, assert_same, flip, in_child, one_step, outcome, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowmem import DSA
from lowmem.dsa import dense, recovery
from lowmem.dsa.header import HEADER_BYTES, StoreError, read_header
from lowmem.dsa.table import Table

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
HOME = Path(".")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def crash(steps=10, **options):
    """A run that dies after ``steps`` steps, with a checkpoint at 8."""

    def work():
        run(HOME, steps=steps, close=False, **options)
        os._exit(9)

    assert in_child(work) == 9


def snapshot():
    return {path.name: path.read_bytes() for path in Path("m").iterdir() if path.name != "LOCK"}


def resume(**options):
    net = Net()
    return net, DSA(net.parameters(), lr=0.1, directory="m", mode="resume", **options)


def refused(match):
    """Resume raises, and changes nothing: not even by what close() does then."""
    before = snapshot()
    with pytest.raises(StoreError, match=match):
        resume()
    assert snapshot() == before


# -- damage ----------------------------------------------------------------------------


@pytest.mark.parametrize("tail", [b"x", b"\0" * 40, os.urandom(500)])
def test_a_torn_tail_of_the_journal_is_ignored(whole_run, tail):
    crash()
    with open("m/table-000.undo", "ab") as file:
        file.write(tail)
    assert_same(run(HOME), whole_run)


@pytest.mark.parametrize(
    ("name", "at", "match"),
    [
        ("table-001.rows", None, "not a sound row store"),
        ("table-001.undo", 3, "header of .*undo is damaged"),
        ("table-001.undo", 20, "header of .*undo is damaged"),
        ("table-001.undo", 128 + 16 + 70, r"record \d+ of [\d,]+ in .*undo is damaged"),
        ("COMMIT.json", 12, r"COMMIT.json is damaged"),
    ],
)
def test_a_flipped_bit_in_what_leads_back_is_refused_and_changes_nothing(
    whole_run, name, at, match
):
    crash()
    places = [100, 2148] if at is None else [at]
    for place in places:
        flip(Path("m", name), place, 2)
    refused(match)
    for place in places:
        flip(Path("m", name), place, 2)
    assert_same(run(HOME), whole_run)


def test_a_flipped_bit_in_the_newest_copy_of_a_header_is_not_taken_for_clean(whole_run):
    run(HOME, steps=10)
    _, opt = resume()
    opt.close()  # one copy says in use, the newer one says clean
    with open("m/table-000.rows", "rb") as file:
        page = file.read(HEADER_BYTES)
    newest = max((0, 2048), key=lambda at: int.from_bytes(page[at + 20 : at + 28], "little"))
    flip(Path("m/table-000.rows"), newest + 90)
    assert not read_header("m/table-000.rows")[0].clean
    assert_same(run(HOME), whole_run)


@pytest.mark.parametrize("name", ["rows", "sums"])
def test_a_damaged_row_is_named_when_it_is_touched_and_nothing_changes(name):
    table = nn.Parameter(torch.zeros(50, 4))
    with DSA([table], directory="m") as opt:
        opt.step_rows(table, torch.arange(50), torch.ones(50, 4))
        opt.commit()
        flip(Path(f"m/table-000.{name}"), HEADER_BYTES + 17 * 32 if name == "rows" else 17 * 8, 4)
        before = table.detach().clone(), opt.read_state(table, torch.arange(50))
        with pytest.raises(StoreError, match=r"row 17 of .* is damaged"):
            opt.step_rows(table, torch.tensor([3, 17]), torch.ones(2, 4))
        assert torch.equal(table, before[0])
        for key, value in opt.read_state(table, torch.arange(50)).items():
            assert torch.equal(value, before[1][key])
        assert opt.state_dict()["state"][0]["step"] == 1
        opt.step_rows(table, torch.tensor([3, 18]), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("name", "size", "match"),
    [
        ("table-000.rows", 5000, "truncated"),
        ("table-000.undo", 100, "header of .* is damaged"),
        ("table-000.undo", 300, "damaged or missing"),
        ("table-000.sums", 8, "8 bytes long"),
        ("COMMIT.json", 30, r"COMMIT.json is damaged"),
    ],
)
def test_truncated_files(name, size, match):
    crash()
    os.truncate(Path("m", name), size)
    refused(match)


@pytest.mark.parametrize("name", ["table-000.rows", "table-000.undo"])
def test_missing_files(name):
    crash()
    os.unlink(Path("m", name))
    refused("is missing")


def test_files_of_two_folders(whole_run):
    crash()
    shutil.copytree("m", "kept")
    table = Net()
    with DSA(table.parameters(), directory="other") as opt:
        one_step(table, opt, 0)
    for name, match in (("table-000.rows", "were mixed"), ("table-000.undo", "another store")):
        shutil.copy(Path("other", name), Path("m", name))
        refused(match)
        shutil.copy(Path("kept", name), Path("m", name))
    assert_same(run(HOME), whole_run)


@pytest.mark.parametrize("name", ["table-000.undo", "COMMIT.json"])
def test_newer_formats(name):
    import json
    import zlib

    from lowmem.dsa import commits, undofile

    crash()
    path = Path("m", name)
    if name == "COMMIT.json":
        body = {**json.loads(path.read_text()), "format": 2}
        del body["crc32"]
        path.write_text(json.dumps({**body, "crc32": commits._crc(body)}))
        refused("no format this lowmem knows")
        return
    data = bytearray(path.read_bytes())
    fields = list(undofile._HEADER.unpack_from(data))
    fields[1], fields[-1] = 2, 0
    fields[-1] = zlib.crc32(undofile._HEADER.pack(*fields))
    undofile._HEADER.pack_into(data, 0, *fields)
    path.write_bytes(data)
    refused("format version 2; this lowmem reads 1")


# -- all tables or none ----------------------------------------------------------------


def test_one_unclean_table_takes_all_back(whole_run):
    """As when a crash comes while close() marks one table after the other."""
    run(HOME, steps=10)
    from lowmem.dsa.store import RowStore

    store = RowStore.open("m/table-001.rows")
    store.mark(clean=False)
    store.close()
    assert_same(run(HOME), whole_run)


def test_a_machine_that_was_started_anew_is_refused_and_repair_is_the_way_out(
    whole_run, monkeypatch, capsys
):
    from lowmem.cli import main

    crash()
    monkeypatch.setattr(recovery, "this_boot", lambda: "another start")
    refused("machine was started anew")
    assert main(["store", "repair", "m"]) == 0
    assert "table-000.rows: sound" in capsys.readouterr().out
    assert_same(run(HOME), whole_run)


def test_with_power_a_machine_may_be_started_anew(whole_run, monkeypatch):
    crash(durability="power")
    monkeypatch.setattr(recovery, "this_boot", lambda: "another start")
    assert_same(run(HOME, durability="power"), whole_run)


def test_the_roll_back_is_said_in_one_line(caplog):
    crash()
    with caplog.at_level(logging.WARNING):
        resume()[1].close()
    (line,) = (r.getMessage() for r in caplog.records if "parameter 0" in r.getMessage())
    assert "rows back to the commit at step 8. Weights do not come back by themselves" in line


# -- durability none -------------------------------------------------------------------


def test_none_keeps_no_journal_and_an_unclean_store_is_refused():
    crash(durability="none")
    assert not list(Path("m").glob("*.undo")) + list(Path("m").glob("*.sums"))
    assert not Path("m/COMMIT.json").exists()
    refused("not closed cleanly, and there is no commit")
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m", mode="resume-unclean") as opt:
        one_step(net, opt, 0)  # every row's checksum is made anew
        one_step(net, opt, 10)


def test_resume_unclean_after_a_journaled_crash_takes_rows_as_they_are():
    crash()
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m", mode="resume-unclean") as opt:
        for step in range(STEPS):
            one_step(net, opt, step)
        expected = outcome(net, opt)
    other, again = resume()
    with again:
        found = outcome(other, again)
        for name in expected:
            if "exp_avg" in name and name[0] in "ab":
                assert torch.equal(found[name], expected[name])


def test_from_process_to_none_and_back(tmp_path):
    net = Net()
    plain = run(tmp_path / "", steps=6)
    del plain
    for durability, first in (("none", 6), ("process", 8), ("none", 10), ("process", 11)):
        with DSA(
            net.parameters(), lr=0.1, directory="m", mode="resume", durability=durability
        ) as opt:
            for step in range(first, first + 2):
                one_step(net, opt, step)
            if durability == "none":
                opt.commit()  # leaves no record: there would be no way back to it
            assert Path("m/COMMIT.json").exists() == (durability == "process")
            if durability == "process":  # and it can go back
                saved = opt.state_dict()
                one_step(net, opt, 50)
                with pytest.raises(StoreError, match="the store stands at step"):
                    opt.load_state_dict(saved)


def test_leftovers_of_a_store_removed_by_hand():
    crash()
    for path in Path("m").glob("*.rows"):
        path.unlink()
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(8):
            one_step(net, opt, step)


# -- processes and threads -------------------------------------------------------------


def test_data_loader_workers_leave_the_store_alone(whole_run, tmp_path):
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        data = TensorDataset(torch.arange(STEPS))
        for (step,) in DataLoader(data, batch_size=None, num_workers=2):
            one_step(net, opt, int(step))
        assert_same(outcome(net, opt), whole_run)


def test_a_fork_may_not_step_and_its_end_changes_nothing(whole_run):
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        one_step(net, opt, 0)

        def child():
            with pytest.raises(RuntimeError, match="and this is its fork"):
                one_step(net, opt, 1)
            opt.close()

        before = snapshot()
        assert in_child(child) == 0
        assert snapshot() == before
        for step in range(1, STEPS):
            one_step(net, opt, step)
        assert_same(outcome(net, opt), whole_run)


def test_readers_in_other_threads_change_nothing(whole_run):
    net, done, seen, errors = Net(), threading.Event(), [], []
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:

        def read():
            try:
                with torch.no_grad():
                    while not done.is_set():
                        net.out(net.a(torch.arange(60)))
                        seen.append(opt.read_state(net.a.weight, torch.arange(60)))
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for step in range(STEPS):
            one_step(net, opt, step)
        done.set()
        for thread in threads:
            thread.join()
        assert seen
        assert not errors
        assert_same(outcome(net, opt), whole_run)


@pytest.mark.parametrize("place", ["Table.__init__", "Journal.__init__", "Estate._mark_used"])
def test_a_table_that_cannot_be_made_leaves_nothing_and_can_be_made_later(monkeypatch, place):
    from lowmem.dsa import estate

    def out_of_memory(*args, **kwargs):
        raise MemoryError("after the file was made")

    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        one_step(net, opt, 0)
        before = {path.name for path in Path("m").iterdir()}
        with monkeypatch.context() as patch:
            holder, name = place.split(".")
            patch.setattr(getattr(estate, holder), name, out_of_memory)
            with pytest.raises(MemoryError):
                one_step(net, opt, LATE)
        assert {path.name for path in Path("m").iterdir()} == before
        one_step(net, opt, LATE)


# -- inside a step ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["_run_kernel", "make_records"])
def test_ctrl_c_inside_a_step_leaves_no_half_step(whole_run, monkeypatch, name):
    """It is raised, and the step either happened as a whole or not at all."""
    from lowmem.kernels import undo

    module = Table if name == "_run_kernel" else undo
    real, armed = getattr(module, name), []

    def interrupted(*args, **kwargs):
        if armed and armed.pop():
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, interrupted)
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(STEPS):
            if step == 3:
                opt.commit()
            before = opt.state_dict()["state"].get(0, {}).get("step", 0)
            if step in (3, 7):
                armed.append(True)
                with pytest.raises(KeyboardInterrupt):
                    one_step(net, opt, step)
                if opt.state_dict()["state"][0]["step"] > before:
                    continue
            one_step(net, opt, step)
        assert_same(outcome(net, opt), whole_run)


@pytest.mark.parametrize("place", ["step_pre", "step_post", "gradient"])
def test_exceptions_in_hooks(whole_run, place):
    net, armed = Net(), []

    def hook(*args):
        if armed and armed.pop():
            raise ZeroDivisionError("in a hook")

    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        if place == "gradient":
            net.out.weight.register_hook(hook)
        else:
            getattr(opt, f"register_{place}_hook")(hook)
        for step in range(STEPS):
            if step == 5:
                armed.append(True)
                with pytest.raises(ZeroDivisionError):
                    one_step(net, opt, step)
                if place == "step_post":
                    continue
            one_step(net, opt, step)
        assert_same(outcome(net, opt), whole_run)


def test_a_step_that_breaks_half_way_is_not_gone_on_with(whole_run, monkeypatch):
    net = Net()
    opt = DSA(net.parameters(), lr=0.1, directory="m")
    for step in range(9):
        if step == 8:
            opt.save_checkpoint("c.pt", net)
        one_step(net, opt, step)

    def out_of_memory(*args):
        raise MemoryError("as on a full GPU, after the tables were updated")

    with monkeypatch.context() as patch:
        patch.setattr(dense, "update", out_of_memory)
        with pytest.raises(MemoryError):
            one_step(net, opt, 9)
    for action in (opt.commit, lambda: opt.save_checkpoint("d.pt", net), lambda: opt.export("x")):
        with pytest.raises(RuntimeError, match="ended half way"):
            action()
    with pytest.raises(RuntimeError, match="ended half way"):
        one_step(net, opt, 9)
    opt.close()
    assert_same(run(HOME), whole_run)


# -- loading ---------------------------------------------------------------------------


def test_the_checkpoint_of_the_last_commit_takes_rows_back(whole_run):
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(10):
            if step == 8:
                opt.save_checkpoint("c.pt", net, extra={"epoch": 3})
            one_step(net, opt, step)
        assert opt.load_checkpoint("c.pt", net) == 8
        assert opt.load_extra("c.pt") == {"epoch": 3}
        for step in range(8, STEPS):
            one_step(net, opt, step)
        assert_same(outcome(net, opt), whole_run)


def test_an_older_checkpoint_is_refused_with_both_steps():
    net = Net()
    with DSA(net.parameters(), lr=0.1, directory="m") as opt:
        for step in range(6):
            one_step(net, opt, step)
            opt.save_checkpoint(f"{step + 1}.pt", net)
        with pytest.raises(StoreError, match=r"step 2; the store stands at step 6 and can go back"):
            opt.load_checkpoint("2.pt", net)


def test_moments_loaded_as_tensors_then_a_crash(whole_run):
    net = Net()
    with DSA(net.parameters(), lr=0.1) as opt:
        for step in range(8):
            one_step(net, opt, step)
        full = opt.state_dict(materialize=True)

    run(HOME, steps=10)

    def work():
        other, opt = resume()
        opt.load_checkpoint("c.pt", other)
        opt.load_state_dict(full)
        one_step(other, opt, 3)
        os._exit(9)

    assert in_child(work) == 9
    assert_same(run(HOME), whole_run)


def test_overwrite_after_a_crash(whole_run):
    crash()
    os.unlink("c.pt")
    assert_same(run(HOME), whole_run)
