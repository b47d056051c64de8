"""What the undo journal keeps: each touched row once, with the bytes of the commit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowmem import DSA
from lowmem.dsa.journal import Journal
from lowmem.dsa.layout import RowLayout
from lowmem.dsa.store import RowStore


def test_it_grows_with_the_rows_touched_and_a_commit_empties_it(tmp_path):
    table = nn.Parameter(torch.zeros(10_000, 8))
    undo = tmp_path / "m" / "table-000.undo"
    with DSA([table], directory=tmp_path / "m") as opt:
        opt.step_rows(table, torch.arange(10_000), torch.ones(10_000, 8))
        opt.commit()
        empty = undo.stat().st_size
        for _ in range(3):  # the second touch of a row costs nothing
            opt.step_rows(table, torch.arange(0, 10_000, 100), torch.ones(100, 8))
            assert undo.stat().st_size == empty + 100 * (16 + 64)
        opt.commit()
        assert undo.stat().st_size == empty


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    dim=st.integers(1, 9),
    batches=st.lists(st.lists(st.integers(0, 69), min_size=1, max_size=30), max_size=6),
    again=st.booleans(),
)
def test_roll_back_brings_every_byte_back(tmp_path_factory, rows, dim, batches, again):
    """Against a copy of the rows, whatever is touched in whatever order."""
    path = tmp_path_factory.mktemp("j") / "table-000.rows"
    store = RowStore.create(path, rows, RowLayout.adam(dim))
    rng = np.random.default_rng(0)
    store.raw[:] = rng.integers(0, 256, store.raw.shape)
    journal = Journal(store, sync=False)
    journal.attach(0)
    journal.begin(1)
    committed = store.raw.copy()
    for batch in batches:
        touched = np.unique(np.array(batch, np.int64) % rows)
        journal.protect(touched)
        store.raw[touched] = rng.integers(0, 256, (touched.size, store.raw.shape[1]))
    different = {n % rows for batch in batches for n in batch}
    assert journal.records == len(different)
    if again:  # as the next process finds it
        journal.close()
        journal = Journal(store, sync=False)
        journal.attach(1)
    assert journal.roll_back() == len(different)
    assert (store.raw == committed).all()
    store.mark(clean=True)
    assert journal.damaged_rows() == (0, [])
    journal.close()
    store.close()


@pytest.mark.parametrize("durability", ["process", "power"])
def test_scratch_folders_promise_nothing(durability):
    table = nn.Parameter(torch.zeros(10, 2))
    with DSA([table], durability=durability) as opt:
        opt.step_rows(table, torch.tensor([1]), torch.ones(1, 2))
        with pytest.raises(ValueError, match="a scratch folder is removed at exit"):
            opt.commit()
