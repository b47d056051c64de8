"""Sorting and dividing the ids of a step, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowmem.kernels import ids as kernel


class Sorted:
    """What ``sort_ids`` says about some ids of a table of ``rows`` rows."""

    def __init__(self, ids: np.ndarray, rows: int, parts: int, touched: np.ndarray | None) -> None:
        size = ids.size
        self.arrays = {
            kernel.IDS: np.ascontiguousarray(ids, np.int64),
            kernel.KEYS: np.full(size, -1),
            kernel.SPARE: np.full(size, -1),
            kernel.FOUND: np.full(size, -1),
            kernel.DIGITS: np.empty(1 << kernel.DIGIT_BITS, np.int64),
            kernel.BOUNDS: np.full(parts + 1, -1),
            kernel.FIRSTS: np.full(parts, -1),
        }
        job = np.zeros(kernel.JOB_SIZE, np.int64)
        for place, array in self.arrays.items():
            job[place] = array.ctypes.data
        job[kernel.ROWS], job[kernel.COUNT], job[kernel.PARTS] = rows, size, parts
        if touched is not None:
            job[kernel.TOUCHED] = touched.ctypes.data
        kernel.sort_ids.ctypes(job.ctypes.data)
        self.bad, self.unique, self.fresh = (
            int(job[place]) for place in (kernel.BAD, kernel.UNIQUE, kernel.FRESH)
        )
        moved = job[kernel.KEYS] != self.arrays[kernel.KEYS].ctypes.data
        keys = self.arrays[kernel.SPARE if moved else kernel.KEYS]
        shift = kernel.shift_of(size)
        self.rows, self.positions = keys >> shift, keys & ((1 << shift) - 1)
        self.found = self.arrays[kernel.FOUND][: self.unique]
        self.bounds, self.firsts = self.arrays[kernel.BOUNDS], self.arrays[kernel.FIRSTS]


@st.composite
def batches(draw) -> tuple[np.ndarray, int]:
    # Around each number of digits that a row number can have, and the largest tables.
    rows = draw(st.sampled_from([1, 2, 3, 2047, 2048, 2049, 1 << 22, (1 << 22) + 1, 1 << 40]))
    kind = draw(st.sampled_from(["few", "any", "ends"]))
    inside = {
        "few": st.integers(0, min(rows, 5) - 1),
        "any": st.integers(0, rows - 1),
        "ends": st.sampled_from([0, rows - 1]),
    }[kind]
    return np.array(draw(st.lists(inside, max_size=300)), np.int64), rows


@given(batches(), st.integers(1, 9))
def test_ids_are_sorted_and_divided_as_numpy_sorts_them(batch, parts: int) -> None:
    ids, rows = batch
    found = Sorted(ids, rows, parts, None)
    order = np.argsort(ids, kind="stable")
    assert found.bad == -1
    np.testing.assert_array_equal(found.rows, ids[order])
    np.testing.assert_array_equal(found.positions, order)
    np.testing.assert_array_equal(found.found, np.unique(ids))
    # The parts are all keys, in order, and no row stands in two of them.
    assert found.bounds[0] == 0 or ids.size == 0
    assert found.bounds[-1] == ids.size
    assert (np.diff(found.bounds) >= 0).all()
    for part in range(parts):
        before = found.rows[: found.bounds[part]]
        assert found.firsts[part] == np.unique(before).size
        assert not np.isin(found.rows[found.bounds[part] : found.bounds[part + 1]], before).any()


@given(batches(), st.data())
def test_an_id_out_of_range_is_found_wherever_it_stands(batch, data) -> None:
    ids, rows = batch
    wrong = data.draw(st.sampled_from([-1, -(2**63), rows, rows + 1, 2**63 - 1]))
    at = data.draw(st.integers(0, ids.size))
    assert Sorted(np.insert(ids, at, wrong), rows, 1, None).bad == at


@given(st.lists(st.integers(0, 99), max_size=200), st.sets(st.integers(0, 99)))
def test_rows_without_a_bit_are_counted_once_each(ids, marked) -> None:
    bits = np.zeros(104, bool)
    bits[list(marked)] = True
    found = Sorted(np.array(ids, np.int64), 100, 4, np.packbits(bits, bitorder="little"))
    assert found.fresh == len(set(ids) - marked)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 1023, 1024, 1025, 1 << 20])
def test_a_key_has_room_for_every_position(count: int) -> None:
    assert (1 << kernel.shift_of(count)) > max(0, count - 1)
