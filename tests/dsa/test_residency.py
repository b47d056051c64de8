"""Asking for pages: on while pages are missing, off when they are resident, and optional."""

import itertools
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lowmem import DSA
from lowmem.dsa.folder import file_system
from lowmem.dsa.store import RowStore
from lowmem.kernels import pages

ROWS, DIM = 40_000, 64

linux_disk = pytest.mark.skipif(
    not pages.AVAILABLE or file_system(Path(tempfile.gettempdir())) in ("tmpfs", "overlay"),
    reason="needs Linux and a disk whose cache can be dropped",
)


@pytest.fixture
def cold(tmp_path):
    """An optimizer whose store is on the disk and not in memory, with a full table of values."""
    table = nn.Parameter(torch.zeros(ROWS, DIM))
    with DSA([table], directory=tmp_path / "d") as opt:
        opt.step_rows(table, torch.arange(ROWS), torch.ones(ROWS, DIM))
        entry = opt._estate.tables[table]
        entry.store.advise_random()
        entry.store.evict()
        yield opt, table, entry


def batch(seed, size=2000):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, ROWS, (size,), generator=generator), torch.ones(size, DIM)


@linux_disk
def test_auto_turns_on_when_pages_are_missing_and_off_when_they_are_resident(cold):
    opt, table, entry = cold
    assert not entry.residency.asking
    opt.step_rows(table, *batch(0))
    assert entry.residency.asking, "the first step met major faults"
    for _ in range(6):
        opt.step_rows(table, *batch(0))
    assert not entry.residency.asking, "the same rows are resident now"


@linux_disk
def test_pages_that_were_asked_for_arrive(cold):
    _, _, entry = cold
    rows = np.unique(batch(1)[0].numpy())
    row_bytes, page = entry.store.layout.row_bytes, pages.PAGE
    missing = pages.count_missing(rows, rows.size, entry.store.address, row_bytes, page)
    assert missing > 0.9 * rows.size
    entry.store.will_need(rows)
    checksum = entry.store.raw[rows].sum()  # waits for the reads
    missing = pages.count_missing(rows, rows.size, entry.store.address, row_bytes, page)
    assert missing == 0
    assert checksum > 0


@pytest.mark.skipif(not pages.AVAILABLE, reason="needs Linux")
@pytest.mark.parametrize("row_bytes", [8, 104, 1024, 4096, 4104])
def test_one_call_a_run_of_pages(row_bytes):
    area = mmap.mmap(-1, 1 << 20)
    base = np.frombuffer(area, np.uint8).ctypes.data
    rows = np.array([0, 1, 2, 50, 51, 120], np.int64)
    touched = [
        page
        for row in rows
        for page in range(row * row_bytes // 4096, ((row + 1) * row_bytes - 1) // 4096 + 1)
    ]
    runs = 1 + sum(b > a + 1 for a, b in itertools.pairwise(touched))
    got = pages.advise_rows(rows, 0, rows.size, base, row_bytes, 4096, pages.MADV_WILLNEED)
    assert got == runs


@pytest.mark.parametrize("prefetch", ["always", "never"])
def test_always_and_never_stay_as_they_are(prefetch, tmp_path):
    table = nn.Parameter(torch.zeros(100, 4))
    with DSA([table], prefetch=prefetch) as opt:
        for _ in range(6):
            opt.step_rows(table, torch.tensor([1, 99]), torch.ones(2, 4))
        asking = opt._estate.tables[table].residency.asking
    assert asking == (prefetch == "always" and pages.AVAILABLE)


def test_a_roomy_store_that_misses_pages_gives_up_huge_reads(tmp_path):
    table = nn.Parameter(torch.zeros(1000, 4))
    with DSA([table]) as opt:
        opt.step_rows(table, torch.arange(1000), torch.ones(1000, 4))
        entry = opt._estate.tables[table]
        entry.residency.after_step(1000, faults=500)
        assert not entry.store.roomy
        assert entry.residency.asking == pages.AVAILABLE


def test_without_advice_calls_everything_else_is_the_same(monkeypatch, tmp_path):
    """What macOS and Windows run: no madvise, no fadvise, no fallocate."""

    def train(directory):
        torch.manual_seed(0)
        table = nn.Embedding(500, 12, sparse=True)
        with DSA(table.parameters(), directory=directory, prefetch="always") as opt:
            for seed in range(8):
                ids = torch.randint(0, 500, (64,), generator=torch.Generator().manual_seed(seed))
                table(ids).pow(2).sum().backward()
                opt.step()
                opt.zero_grad()
                if seed == 4:
                    opt.commit()
            moments = opt.read_state(table.weight, torch.arange(500))
        return [table.weight.detach(), *moments.values()]

    expected = train(tmp_path / "with")
    monkeypatch.setattr(pages, "AVAILABLE", False)
    for name in ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_RANDOM", "MADV_DONTNEED"):
        monkeypatch.delattr(mmap, name, raising=False)
    for name in ("posix_fallocate", "posix_fadvise", "fdatasync"):
        monkeypatch.delattr(os, name, raising=False)
    got = train(tmp_path / "without")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert RowStore.open(tmp_path / "without" / "table-000.rows").rows == 500
