"""Row checksums and undo records, in native code.

A record of the undo journal is ``row, checksum, the row's old bytes``, all in 64-bit
words. Checksums find torn and damaged records; they are no defence against a forger.
Every step of :func:`row_hash` is a bijection of each input word, so a change of a single
word, a flipped bit among them, never goes unnoticed.
"""

from __future__ import annotations

import numpy as np
from numba import njit

RECORD_WORDS = 2  # row and checksum, before the row's own words

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SEED = np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)
_SHIFT_FINAL = np.uint64(29)


@njit(nogil=True, cache=True)
def row_hash(words):
    """A 64-bit checksum of a row's words (uint64)."""
    a = b = c = d = _SEED
    whole = words.size // 4 * 4
    for i in range(0, whole, 4):
        a = (a ^ words[i]) * _MULTIPLIER
        b = (b ^ words[i + 1]) * _MULTIPLIER
        c = (c ^ words[i + 2]) * _MULTIPLIER
        d = (d ^ words[i + 3]) * _MULTIPLIER
        a ^= a >> _SHIFT
        b ^= b >> _SHIFT
        c ^= c >> _SHIFT
        d ^= d >> _SHIFT
    for i in range(whole, words.size):
        a = (a ^ words[i]) * _MULTIPLIER
        a ^= a >> _SHIFT
    for lane in (b, c, d):
        a = (a ^ lane) * _MULTIPLIER
        a ^= a >> _SHIFT_FINAL
    return a


@njit(nogil=True, cache=True)
def _record_hash(row, row_sum, salt):
    mixed = (row_sum ^ salt) * _MULTIPLIER
    mixed ^= mixed >> _SHIFT
    mixed = (mixed ^ row) * _MULTIPLIER
    return mixed ^ (mixed >> _SHIFT_FINAL)


@njit(nogil=True, cache=True)
def untouched(rows, touched, found):
    """Write those of ``rows`` whose bit in ``touched`` is not set into ``found``; their number."""
    count = 0
    for i in range(rows.size):
        row = rows[i]
        if (touched[row >> 3] >> np.uint8(row & 7)) & 1 == 0:
            found[count] = row
            count += 1
    return count


@njit(nogil=True, cache=True)
def mark(rows, touched):
    """Set the bits of ``rows``."""
    for i in range(rows.size):
        row = rows[i]
        touched[row >> 3] |= np.uint8(1 << (row & 7))


@njit(nogil=True, cache=True)
def marked(touched, start, found):
    """Write rows whose bit is set into ``found`` until it may be full; their number, and where
    in ``touched`` to go on."""
    count = 0
    while start < touched.size and count + 8 <= found.size:
        byte = touched[start]
        if byte:
            for bit in range(8):
                if (byte >> np.uint8(bit)) & 1:
                    found[count] = start * 8 + bit
                    count += 1
        start += 1
    return count, start


@njit(nogil=True, cache=True)
def make_records(rows, lo, hi, table, sums, zero, salt, records):
    """Records ``lo:hi`` of the old bytes of ``rows``, checked against ``sums``.

    Returns the first row whose bytes do not match its checksum, or -1.
    """
    bad = np.int64(-1)
    for i in range(lo, hi):
        row = rows[i]
        words = table[row]
        row_sum = row_hash(words)
        if row_sum ^ zero != sums[row] and bad < 0:
            bad = row
        record = records[i]
        record[0] = np.uint64(row)
        record[1] = _record_hash(np.uint64(row), row_sum, salt)
        for j in range(words.size):
            record[RECORD_WORDS + j] = words[j]
    return bad


@njit(nogil=True, cache=True)
def count_sound(records, salt, rows):
    """How many records from the first on have a right checksum and a row below ``rows``."""
    for i in range(records.shape[0]):
        record = records[i]
        if record[0] >= np.uint64(rows):
            return i
        if _record_hash(record[0], row_hash(record[RECORD_WORDS:]), salt) != record[1]:
            return i
    return records.shape[0]


@njit(nogil=True, cache=True)
def restore(records, table, sums, zero):
    """Write the rows of sound ``records`` back, and their checksums."""
    for i in range(records.shape[0]):
        row = np.int64(records[i, 0])
        words = records[i, RECORD_WORDS:]
        for j in range(words.size):
            table[row, j] = words[j]
        sums[row] = row_hash(words) ^ zero


@njit(nogil=True, cache=True)
def hash_rows(rows, lo, hi, table, zero, sums):
    """``sums[row]`` for ``rows[lo:hi]``. A row of zeros has the checksum 0."""
    for i in range(lo, hi):
        row = rows[i]
        sums[row] = row_hash(table[row]) ^ zero


@njit(nogil=True, cache=True)
def find_damaged(first, last, table, zero, sums, damaged):
    """Write the rows of ``first:last`` that do not match ``sums`` into ``damaged``; how many."""
    count = 0
    for row in range(first, last):
        if row_hash(table[row]) ^ zero != sums[row]:
            if count < damaged.size:
                damaged[count] = row
            count += 1
    return count
