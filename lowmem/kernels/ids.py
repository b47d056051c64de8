"""The ids of a step: checked, sorted, and divided among the threads.

Ids become *keys*: the row and the position of its gradient packed into one int64. Sorted,
equal ids are neighbours, rows come in the order of the file, and the sum of duplicates has
one fixed order whatever the number of threads.
"""

from __future__ import annotations

import numpy as np
from numba import carray, cfunc, njit, types

from lowmem.kernels.native import pointer, prefetch
from lowmem.kernels.notice import announce

announce(__name__, "DSA")

_AHEAD = 16  # rows between asking for a byte of the bitmap and looking at it

# The work of one step, as int64: addresses, sizes, flags and counters, in this order. The
# first line is what the caller sets once, the second what it sets at every step, the third
# what comes back.
(
    ROWS, DIM, STATE, TOUCHED, KEYS, SPARE, DIGITS, FOUND, BOUNDS, FIRSTS, SCALARS,
    COUNT, PARTS, IDS, GRADS, TARGET, EMIT,
    BAD, UNIQUE, FRESH, NEXT, FAULTS,
    JOB_SIZE,
) = range(23)  # fmt: skip

SHARED = -2  # of ``BAD``: the ids are in range, and the gradients are a view of the weights
DIGIT_BITS = 11  # of a row number, sorted in one pass; its counters stay in the first-level cache


@njit(nogil=True, cache=True)
def shift_of(count):
    """Bits that a key of ``count`` ids keeps for the position."""
    shift = 1
    while count >> shift:
        shift += 1
    return shift


@njit(nogil=True, cache=True)
def pack_keys(ids, rows, shift, keys):
    """``keys[i] = ids[i] << shift | i``.

    Returns the position of the first id outside ``0 … rows - 1``, or -1.
    """
    for i in range(ids.size):
        row = ids[i]
        if row < 0 or row >= rows:
            return i
        keys[i] = (row << shift) | i
    return -1


@njit(nogil=True, cache=True)
def sort_keys(keys, spare, rows, shift, digits):
    """Sort packed keys by row; positions are ascending already, and stay so.

    A radix sort from the lowest digit on: one counting pass and one moving pass a digit of
    ``DIGIT_BITS`` or fewer bits. ``spare`` is as large as ``keys``, ``digits`` holds
    ``1 << DIGIT_BITS`` counters. Returns whether the sorted keys are in ``spare``.
    """
    bits = 0
    while (rows - 1) >> bits:
        bits += 1
    passes = (bits + DIGIT_BITS - 1) // DIGIT_BITS
    if passes == 0:
        return False
    width = (bits + passes - 1) // passes
    mask = (np.int64(1) << width) - 1
    source, target = keys, spare
    for number in range(passes):
        at = shift + number * width
        digits[: mask + 1] = 0
        for i in range(source.size):
            digits[(source[i] >> at) & mask] += 1
        total = np.int64(0)
        for digit in range(mask + 1):
            here = digits[digit]
            digits[digit] = total
            total += here
        for i in range(source.size):
            key = source[i]
            digit = (key >> at) & mask
            target[digits[digit]] = key
            digits[digit] += 1
        source, target = target, source
    return passes % 2 == 1


@njit(nogil=True, cache=True)
def divide(keys, shift, parts, rows, bounds, firsts):
    """Find the different rows of the sorted keys, and cut the keys into parts.

    Writes the rows into ``rows``, the bounds of the parts into ``bounds`` (``parts + 1``)
    and the number of different rows before each part into ``firsts``. No row stands in two
    parts. Returns the number of different rows.
    """
    size = keys.size
    unique = part = 0
    last = np.int64(-1)
    next_cut = np.int64(0)
    for i in range(size):
        row = keys[i] >> shift
        if row == last:
            continue
        while part < parts and i >= next_cut:
            bounds[part] = i
            firsts[part] = unique
            part += 1
            next_cut = size * part // parts
        rows[unique] = row
        unique += 1
        last = row
    while part <= parts:
        bounds[part] = size
        if part < parts:
            firsts[part] = unique
        part += 1
    return unique


@njit(nogil=True, cache=True)
def count_untouched(rows, touched):
    """How many of ``rows`` have no bit in the bitmap ``touched``."""
    count = 0
    for i in range(rows.size):
        row = rows[i]
        if i + _AHEAD < rows.size:  # the bitmap of a tall table is not in the caches
            prefetch(np.uintp(touched.ctypes.data + (rows[i + _AHEAD] >> 3)))
        count += 1 - ((touched[row >> 3] >> np.uint8(row & 7)) & 1)
    return count


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def sort_ids(job_address):
    """Check and sort the ids of a step, and divide them into parts.

    Sets ``BAD`` to the position of an id out of range, or to -1, or to ``SHARED`` where the
    gradients lie in the memory of the table at ``TARGET``, and then ``UNIQUE`` to the
    number of different rows and ``FRESH`` to how many of them are not yet in the bitmap
    ``TOUCHED`` (0 without one). ``KEYS`` and ``SPARE`` may have changed places.
    """
    job = carray(job_address, (JOB_SIZE,), np.int64)
    count, rows, parts = job[COUNT], job[ROWS], job[PARTS]
    ids = carray(pointer(job[IDS]), (count,), np.int64)
    keys = carray(pointer(job[KEYS]), (count,), np.int64)
    spare = carray(pointer(job[SPARE]), (count,), np.int64)
    digits = carray(pointer(job[DIGITS]), (1 << DIGIT_BITS,), np.int64)
    found = carray(pointer(job[FOUND]), (count,), np.int64)
    bounds = carray(pointer(job[BOUNDS]), (parts + 1,), np.int64)
    firsts = carray(pointer(job[FIRSTS]), (parts,), np.int64)
    shift = shift_of(count)
    job[BAD] = pack_keys(ids, rows, shift, keys)
    if job[BAD] >= 0:
        return
    if sort_keys(keys, spare, rows, shift, digits):
        job[KEYS], job[SPARE] = job[SPARE], job[KEYS]
        keys = spare
    grads, target, row_bytes = job[GRADS], job[TARGET], 4 * job[DIM]
    if grads < target + rows * row_bytes and target < grads + count * row_bytes:
        job[BAD] = SHARED
    unique = divide(keys, shift, parts, found, bounds, firsts)
    job[UNIQUE] = unique
    job[FRESH] = 0
    if job[TOUCHED] != 0:
        touched = carray(pointer(job[TOUCHED]), ((rows + 7) // 8,), np.uint8)
        job[FRESH] = count_untouched(found[:unique], touched)
