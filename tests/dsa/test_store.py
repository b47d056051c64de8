"""The file: what it holds, what it refuses, and that nothing is left behind."""

import errno
import gc
import json
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem.dsa import store as store_module
from lowmem.dsa.header import HEADER_BYTES, StoreError, read_header, require_name, short_name
from lowmem.dsa.layout import Field, RowLayout
from lowmem.dsa.store import HUGE_SHARE, RowStore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table-000.rows"


def make(path, rows=10, dim=3, **options):
    store = RowStore.create(path, rows, RowLayout.adam(dim), **options)
    store.mark(clean=True)
    return store


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 300), dim=st.sampled_from([1, 3, 8, 20, 100, 128, 513]))
def test_rows_survive_close_and_open(tmp_path_factory, rows, dim):
    path = tmp_path_factory.mktemp("s") / "a.rows"
    rng = np.random.default_rng(rows)
    store = make(path, rows, dim)
    assert not store.fields["exp_avg"].any()
    m, v = (rng.standard_normal((rows, dim), np.float32) for _ in range(2))
    store.write(slice(None), {"exp_avg": m, "exp_avg_sq": v})
    store.close()
    assert path.stat().st_size == HEADER_BYTES + rows * dim * 8
    raw = np.fromfile(path, "<f4", offset=HEADER_BYTES).reshape(rows, 2, dim)
    np.testing.assert_array_equal(raw[:, 0], m)
    np.testing.assert_array_equal(raw[:, 1], v)
    again = RowStore.open(path, rows=rows, layout=RowLayout.adam(dim))
    ids = rng.integers(0, rows, 7)
    got = again.read(ids)
    np.testing.assert_array_equal(got["exp_avg"], m[ids])
    np.testing.assert_array_equal(got["exp_avg_sq"], v[ids])
    again.close()


def test_create_refuses_an_existing_store(path):
    make(path).close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="resume"):
        make(path)
    assert path.read_bytes() == before
    make(path, rows=5, overwrite=True).close()
    assert read_header(path)[0].rows == 5


def test_the_whole_file_is_reserved_when_it_is_made(path):
    store = make(path, rows=10_000, dim=64)
    assert store.disk_bytes >= store.file_bytes
    assert os.stat(path).st_blocks * 512 >= 10_000 * 64 * 8
    store.close()


def test_too_small_a_disk_names_both_figures_and_leaves_nothing(path, monkeypatch):
    usage = shutil.disk_usage(path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match=r"needs 10,244,096 bytes and 1,000,000 are free") as caught:
        make(path, rows=10_000, dim=128)
    assert caught.value.errno == errno.ENOSPC
    assert not list(path.parent.iterdir())


def test_missing_store(path):
    with pytest.raises(FileNotFoundError, match="no store to resume"):
        RowStore.open(path)


def test_another_shape_or_layout(path):
    make(path, 10, 3).close()
    with pytest.raises(StoreError, match="holds 10 rows; the parameter has 11"):
        RowStore.open(path, rows=11)
    with pytest.raises(StoreError, match=r"exp_avg: float32\[3\].*needs exp_avg: float32\[4\]"):
        RowStore.open(path, layout=RowLayout.adam(4))


def test_truncated(path):
    store = make(path, 100, 30)
    store.close()
    os.truncate(path, HEADER_BYTES + 99 * 240)
    with pytest.raises(StoreError, match=r"27,856 bytes long; its header says 28,096"):
        RowStore.open(path)


def test_unclean(path):
    store = make(path)
    store.mark(clean=False, committed_step=7)
    store.close()
    with pytest.raises(StoreError, match="not closed cleanly, and there is no commit"):
        RowStore.open(path)
    RowStore.open(path, recover=True).close()


def test_newer_format_version(path):
    make(path).close()
    data = bytearray(path.read_bytes())
    for slot in (0, 2048):
        data[slot + 8 : slot + 12] = struct.pack("<I", 9)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="format version 9; this lowmem reads version 1"):
        RowStore.open(path)


def test_a_torn_header_write_leaves_the_one_before(path):
    store = make(path)
    store.mark(step=5)
    store.mark(step=6)
    slot = 2048 * ((store._sequence + 1) % 2)
    store.close()
    data = bytearray(path.read_bytes())
    data[slot + 60] ^= 1
    path.write_bytes(data)
    header = read_header(path)[0]
    assert header.step == 5
    # One write behind, so perhaps from before rows changed: never taken for a clean end.
    assert not header.clean


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 9000, os.urandom(9000)])
def test_a_file_that_is_no_store(path, content):
    path.write_bytes(content)
    with pytest.raises(StoreError, match="not a sound row store"):
        RowStore.open(path)


def header_page(**changes):
    """A header with a right checksum and wrong contents."""
    import zlib

    fields = {
        "identity": "x", "rows": 10, "layout": RowLayout.adam(3).to_json(),
        "step": 0, "committed_step": 0, "clean": True, "journaled": False, "name": "",
    }  # fmt: skip
    payload = json.dumps({**fields, **changes}).encode()
    crc = zlib.crc32(struct.pack("<Q", 1) + payload)
    slot = struct.pack("<8sIIIQ", b"LMROWST\0", 1, len(payload), crc, 1) + payload
    return slot.ljust(HEADER_BYTES, b"\0")


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 0},
        {"rows": -1},
        {"rows": 2**60},
        {"rows": "10"},
        {"rows": True},
        {"step": -1},
        {"clean": 1},
        {"identity": None},
        {"layout": []},
        {"layout": [{"name": "a", "dtype": "object", "count": 1}]},
        {"layout": [{"name": "a", "dtype": "float32", "count": 0}]},
        {"layout": [{"name": "a", "dtype": "float32", "count": 2**40}]},
        {"layout": [{"name": "a", "dtype": ">f4", "count": 3}]},
        {"layout": [{"name": "a", "dtype": "float32", "count": 3}] * 2},
    ],
)
def test_headers_that_lie(path, changes):
    path.write_bytes(header_page(**changes) + bytes(240))
    with pytest.raises(StoreError):
        RowStore.open(path)


def test_a_header_that_claims_more_rows_than_the_file_has_reserves_nothing(path):
    path.write_bytes(header_page(rows=2**40) + bytes(240))
    with pytest.raises(StoreError, match="its header says"):
        RowStore.open(path)


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 4095), bit=st.integers(0, 7))
def test_any_flipped_bit_in_the_header_is_noticed_or_harmless(tmp_path_factory, position, bit):
    path = tmp_path_factory.mktemp("f") / "a.rows"
    store = make(path)
    store.mark(step=3, clean=True)
    before, header = store.header, None
    store.close()
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
    try:
        header, _ = read_header(path)
    except StoreError:
        return
    # Either the bit was in unused space, or one copy serves, and is not taken for clean.
    behind = replace(before, clean=False)
    assert header in (before, behind, replace(behind, step=0))


def test_layout_offsets_and_bad_fields():
    layout = RowLayout((Field("a", "float32", 3), Field("b", "int32", 1), Field("c", "float64", 2)))
    assert layout.row_bytes == 32
    assert [layout.offset(n) for n in "abc"] == [0, 12, 16]
    assert RowLayout.from_json(layout.to_json()) == layout
    with pytest.raises(KeyError, match="no field 'd'"):
        layout.offset("d")
    with pytest.raises(ValueError, match="bfloat99"):
        Field("a", "bfloat99", 1)
    with pytest.raises(ValueError, match="names of their own"):
        RowLayout((Field("a", "float32", 1), Field("a", "float32", 1)))


def test_evicted_rows_come_back_from_the_disk(path):
    store = make(path, 5000, 16)
    values = np.random.default_rng(0).standard_normal((5000, 16)).astype(np.float32)
    store.write(slice(None), {"exp_avg": values})
    store.evict()
    np.testing.assert_array_equal(store.fields["exp_avg"], values)
    store.close()


@pytest.mark.parametrize("fails", ["_populate", "_advise_by_memory"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_fails_after_the_rename_leaves_nothing(path, monkeypatch, fails, error):
    def fail(self):
        raise error

    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else None
    with monkeypatch.context() as patch:
        patch.setattr(RowStore, fails, fail)
        with pytest.raises(error):
            make(path)
    assert not list(path.parent.iterdir())
    if before is not None:
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
    make(path).close()


@pytest.mark.parametrize(
    "name", ["x" * 1712, "é" * 1000, "\x01" * 500, "\ud800" * 300, "𝄞" * 51, "a" * 200, "層"]
)
def test_a_name_of_any_length_fits_the_header_at_any_step(path, name):
    store = make(path, name=name)
    store.mark(step=(1 << 48) - 1, committed_step=(1 << 48) - 1, boot="f" * 64, clean=True)
    store.close()
    kept = read_header(path)[0].name
    assert len(kept.encode("utf-8", "replace")) <= 200
    assert kept == name or (kept.endswith("…") and len(name.encode("utf-8", "replace")) > 200)
    require_name(path, read_header(path)[0], name)


@pytest.mark.parametrize(
    ("made_for", "label", "fits"),
    [
        ("user.weight", "user.weight", True),
        ("user.weight", "item.weight", False),
        ("parameter 0", "item.weight", True),
        ("user.weight", "parameter 3", True),
        ("", "item.weight", True),
        ("user.weight", "module.user.weight", True),
        ("_orig_mod.module.user.weight", "user.weight", True),
        ("a" * 300, "module." + "a" * 300, True),
        ("module." + "a" * 300, "a" * 300, True),
        ("module." + "a" * 300, "b" + "a" * 300, False),
    ],
)
def test_a_store_belongs_to_the_parameter_of_its_name(path, made_for, label, fits):
    make(path, name=made_for).close()
    header = read_header(path)[0]
    if fits:
        require_name(path, header, label)
        return
    with pytest.raises(StoreError) as caught:
        require_name(path, header, label)
    assert short_name(made_for) in str(caught.value)
    assert label in str(caught.value)


def test_huge_pages_are_for_stores_that_are_small_together(tmp_path, monkeypatch):
    layout = RowLayout.adam(64)
    size = 100 * layout.row_bytes + HEADER_BYTES
    monkeypatch.setattr(store_module, "available_memory_bytes", lambda: 2.5 * size / HUGE_SHARE)
    stores = [RowStore.create(tmp_path / f"{n}", 100, layout) for n in range(3)]
    assert [store.roomy for store in stores] == [True, True, False]
    stores[0].close()
    again = RowStore.create(tmp_path / "again", 100, layout)
    assert again.roomy, "what is closed takes no share"
    for store in (*stores[1:], again):
        store.close()
