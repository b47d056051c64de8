"""Where the bytes are: files, RSS, and what forwards without gradients leave alone."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from lowmem import DSA


def test_state_bytes_are_what_the_file_system_counts(tmp_path):
    tables = [nn.Parameter(torch.zeros(5000, d)) for d in (3, 64)]
    dense = nn.Parameter(torch.zeros(10, 7))
    with DSA([*tables, dense], directory=tmp_path / "d") as opt:
        assert opt.state_bytes() == {"vram": 0, "ram": 0, "disk": 0}
        for table in tables:
            opt.step_rows(table, torch.tensor([4]), torch.ones(1, table.shape[1]))
        dense.grad = torch.ones_like(dense)
        opt.step()
        sizes = opt.state_bytes()
        on_disk = sum(p.stat().st_blocks * 512 for p in (tmp_path / "d").glob("table-*"))
    assert sizes["disk"] == on_disk
    lengths = 2 * 4096 + 5000 * 8 * (3 + 64) + 2 * 5000 * 8
    assert lengths <= on_disk <= lengths + 6 * 4096
    assert sizes["ram"] == 2 * 10 * 7 * 4 + 4, "two moments and the step of the dense parameter"
    assert sizes["vram"] == 0


def test_forwards_without_gradients_change_nothing(tmp_path):
    table = nn.Embedding(2000, 16, sparse=True)
    with DSA(table.parameters(), directory=tmp_path / "d") as opt:
        table(torch.tensor([3])).sum().backward()
        opt.step()
        (path,) = (tmp_path / "d").glob("*.rows")
        before = path.read_bytes(), opt.state_bytes()
        with torch.no_grad():
            for _ in range(50):
                table(torch.randint(0, 2000, (64,)))
        assert (path.read_bytes(), opt.state_bytes()) == before


MEASURE = """
import sys, torch, lowmem
rows, batch = int(sys.argv[1]), int(sys.argv[2])

def private_kib():
    # Memory of this process alone: the store's file pages belong to the page cache.
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])

weight = torch.nn.Parameter(torch.empty(rows, 32))  # never touched as a whole: not resident
opt = lowmem.DSA([weight], lr=0.1)
generator = torch.Generator().manual_seed(0)
def step():
    # Always among the same rows, so that the weights' own pages do not count.
    ids = torch.randint(0, 10_000, (batch,), generator=generator) * (rows // 10_000)
    opt.step_rows(weight, ids, torch.ones(batch, 32))
step()
before = private_kib()
for _ in range(20):
    step()
print(private_kib() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("rows", [20_000, 2_000_000])
def test_memory_beyond_weights_does_not_grow_with_rows(rows, tmp_path):
    batch = 4096
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(rows), str(batch)],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    grown = int(done.stdout) * 1024
    # Weight pages that later batches touch for the first time, and a few batches of slack.
    weight_pages = 10_000 * 4096
    assert grown < weight_pages + 8 * batch * 32 * 4
