"""Export and import: an independent copy that is checked, can be broken off, and resumes."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from dsa_faults import Net, assert_same, flip, one_step, outcome
from torch import nn

from lowmem import DSA
from lowmem.dsa import manifest, transfer
from lowmem.dsa.header import HEADER_BYTES, StoreError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks in small files."""
    monkeypatch.setattr(transfer, "BLOCK_BYTES", 4608)
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 4608)


def trained(folder="m", steps=8, **options):
    net = Net()
    opt = DSA(net.parameters(), lr=0.1, directory=folder, **options)
    for step in range(steps):
        one_step(net, opt, step)
    return net, opt


def resumed(folder, net):
    params = Net()
    params.load_state_dict(net.state_dict())
    return params, DSA(params.parameters(), lr=0.1, directory=folder, mode="resume")


def same_tables(net, opt, folder):
    other, again = resumed(folder, net)
    with again:
        found, expected = outcome(other, again), outcome(net, opt)
        for name in expected:
            if name.startswith(("a.", "b.")):
                assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("durability", ["process", "none"])
def test_a_copy_resumes_and_the_original_goes_on(tmp_path, small_blocks, durability):
    net, opt = trained(durability=durability)
    with opt:
        opt.export(tmp_path / "x")
        assert DSA.import_(tmp_path / "x") == tmp_path / "x"
        place = DSA.import_(tmp_path / "x", to=tmp_path / "y")
        assert place == tmp_path / "y"
        same_tables(net, opt, "x")
        same_tables(net, opt, "y")
        one_step(net, opt, 8)


def test_a_checkpoint_fits_the_copy_of_its_step(tmp_path):
    net, opt = trained()
    with opt:
        opt.save_checkpoint("c.pt", net)
        opt.export("x")
        for step in range(8, 11):
            one_step(net, opt, step)
        expected = outcome(net, opt)
    other = Net()
    with DSA(other.parameters(), lr=0.1, directory="x", mode="resume") as again:
        assert again.load_checkpoint("c.pt", other) == 8
        for step in range(8, 11):
            one_step(other, again, step)
        assert_same(outcome(other, again), expected)


def test_a_scratch_folder_can_be_exported(tmp_path):
    net, opt = trained(None)
    with opt:
        opt.export("x")
        same_tables(net, opt, "x")


def test_a_second_export_writes_only_what_changed(tmp_path, small_blocks, monkeypatch):
    rows = 40_000
    table = nn.Parameter(torch.zeros(rows, 16))
    written = []
    real = transfer.write_all

    def count(file, data, at):
        written.append(len(data))
        real(file, data, at)

    with DSA([table], directory="m") as opt:
        opt.step_rows(table, torch.arange(rows), torch.ones(rows, 16))
        monkeypatch.setattr(transfer, "write_all", count)
        opt.export("x")
        whole = sum(written)
        assert whole == os.path.getsize("x/table-000.rows") + os.path.getsize("x/table-000.sums")
        written.clear()
        before = (tmp_path / "x" / "MANIFEST.json").read_bytes()
        opt.export("x")
        assert not written
        assert (tmp_path / "x" / "MANIFEST.json").read_bytes() == before
        opt.step_rows(table, torch.tensor([5]), torch.ones(1, 16))
        opt.export("x")
        assert 0 < sum(written) <= 3 * 4608
    DSA.import_("x")


def test_broken_off_and_gone_on_with(tmp_path, small_blocks, monkeypatch):
    net, opt = trained()
    with opt:
        opt.export("x")
        one_step(net, opt, 8)
        real, calls = transfer.write_all, []

        def broken(file, data, at):
            calls.append(at)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
            real(file, data, at)

        monkeypatch.setattr(transfer, "write_all", broken)
        with pytest.raises(OSError, match="No space"):
            opt.export("x")
        monkeypatch.setattr(transfer, "write_all", real)
        # Half old, half new: neither imported nor resumed by mistake.
        with pytest.raises(FileNotFoundError, match="broken off"):
            DSA.import_("x")
        with pytest.raises(StoreError, match="no header"):
            resumed("x", net)
        opt.export("x")
        same_tables(net, opt, DSA.import_("x", to="y"))
        assert not list(tmp_path.glob("*/MANIFEST.part"))


def test_other_peoples_stores_are_not_written_over(tmp_path):
    _, other = trained("other", 2)
    other.close()
    before = (tmp_path / "other" / "table-000.rows").read_bytes()
    _, opt = trained("m", 2)
    with opt:
        with pytest.raises(FileExistsError, match="no earlier copy"):
            opt.export("other")
        with pytest.raises(ValueError, match="the folder in use"):
            opt.export("m")
        opt.export("x")
        with pytest.raises(FileExistsError, match="no earlier copy"):
            DSA.import_("x", to="other")
        with pytest.raises(StoreError, match="another optimizer of this process"):
            DSA.import_("x", to="m")
    assert (tmp_path / "other" / "table-000.rows").read_bytes() == before


def test_a_file_is_no_place_for_a_copy(tmp_path):
    (tmp_path / "file").write_text("mine")
    _, opt = trained("m", 2)
    with opt:
        opt.export("x")
        for call in (
            lambda: opt.export("file"),
            lambda: opt.export("file/x"),
            lambda: DSA.import_("file"),
            lambda: DSA.import_("x", to="file"),
        ):
            with pytest.raises(NotADirectoryError, match=r"needs a folder, and .*/file is none"):
                call()
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("at", "where"),
    [
        (100, "bytes 0 to 4,608"),  # the header itself
        (HEADER_BYTES + 70, r"bytes 0 to 4,608 \(rows 0 to 7\)"),
        (HEADER_BYTES + 700, r"bytes 4,608 to 6,656 \(rows 8 to 39\)"),
    ],
)
def test_a_flipped_bit_is_found_and_its_rows_named(small_blocks, at, where):
    _, opt = trained()
    opt.export("x")
    opt.close()
    flip(Path("x/table-001.rows"), at)
    with pytest.raises(StoreError, match=f"table-001.rows is damaged: {where}"):
        DSA.import_("x")
    with pytest.raises(StoreError, match=r"table-001.rows is damaged"):
        DSA.import_("x", to="y")
    with pytest.raises(StoreError, match="no header"):
        resumed("y", Net())


def test_truncated_missing_and_linked_files(tmp_path):
    _, opt = trained()
    opt.export("x")
    opt.close()
    shutil.copytree("x", "cut")
    os.truncate("cut/table-000.rows", 5000)
    with pytest.raises(StoreError, match="5,000 bytes long; the manifest says"):
        DSA.import_("cut")
    shutil.copytree("x", "gone")
    os.unlink("gone/table-000.sums")
    with pytest.raises(FileNotFoundError, match=r"table-000.sums"):
        DSA.import_("gone")
    shutil.copytree("x", "linked")
    os.rename("linked/table-000.rows", "elsewhere")
    os.symlink(tmp_path / "elsewhere", "linked/table-000.rows")
    with pytest.raises(OSError, match=r"table-000.rows"):
        DSA.import_("linked")


def lie(folder, **changes):
    path = Path(folder) / "MANIFEST.json"
    fields = json.loads(path.read_text())
    del fields["digest"]
    fields.update(changes)
    digest = manifest.digest(json.dumps(fields, sort_keys=True).encode())
    path.write_text(json.dumps({**fields, "digest": digest}))


@pytest.mark.parametrize(
    "name", ["../table-000.rows", "/etc/passwd", "table-000.rows/../../x", "COMMIT.json", ""]
)
def test_names_in_a_manifest_cannot_leave_the_folder(tmp_path, name):
    _, opt = trained()
    opt.export("x")
    opt.close()
    fields = json.loads(Path("x/MANIFEST.json").read_text())
    lie("x", files={**fields["files"], name: fields["files"]["table-000.sums"]})
    with pytest.raises(StoreError, match="no name of a store's file"):
        DSA.import_("x", to="y")
    assert not Path("y").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": {}},
        {"files": {"table-000.rows": [2**62, []]}},
        {"files": {"table-000.rows": [10**9, ["0" * 32]]}},
        {"files": {"table-000.sums": [10, ["zz"]]}, "stores": {}},
        {"files": {"table-000.rows": 5}},
        {"block_bytes": 1},
        {"format": 2},
        {"stores": {"table-009.rows": "x"}},
        {"stores": 3},
    ],
)
def test_manifests_that_lie(changes):
    _, opt = trained()
    opt.export("x")
    opt.close()
    lie("x", **changes)
    with pytest.raises(StoreError, match=r"MANIFEST.json is damaged"):
        DSA.import_("x", to="y")


def test_what_is_trained_on_is_no_export_any_more():
    net, opt = trained()
    opt.export("x")
    opt.close()
    _, again = resumed("x", net)
    again.close()
    with pytest.raises(FileNotFoundError, match="no export"):
        DSA.import_("x")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_memory_stays_bounded(tmp_path):
    """60 MB are copied; the process does not grow by a third of that."""
    rows = 60_000
    table = nn.Parameter(torch.zeros(rows, 128))
    with DSA([table], directory="m") as opt:
        opt.step_rows(table, torch.arange(0, rows, 7), torch.ones(len(range(0, rows, 7)), 128))
        opt.export("warm")
        shutil.rmtree("warm")
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        opt.export("x")
        DSA.import_("x", to="y")
        assert memory("VmHWM") - before < 20 << 20
    assert np.array_equal(*(np.fromfile(f"{d}/table-000.rows", np.uint8) for d in "xy"))


def memory(name):
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024
