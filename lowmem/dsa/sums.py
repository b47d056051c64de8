"""A checksum of every row of a store, as of the last commit, in a mapped file beside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lowmem.dsa.header import StoreError
from lowmem.dsa.space import reserve
from lowmem.dsa.store import RowStore
from lowmem.kernels.threads import run_parallel, thread_count

_ROWS = 1 << 16  # at a time
_SAMPLES = 64


class RowSums:
    """The checksums of one store's rows. A row of zeros has the checksum 0.

    Args:
        store: the open store.
        fresh: it was made just now, so all its rows are zeros.

    Attributes:
        values: uint64, one a row.
        zero: what a row of zeros hashes to; ``values`` are relative to it.
    """

    def __init__(self, store: RowStore, *, fresh: bool) -> None:
        from lowmem.kernels import undo

        self.path = store.path.with_suffix(".sums")
        self._store = store
        self._words: NDArray[np.uint64] = store.raw.view(np.uint64)
        self.zero = np.uint64(undo.row_hash(np.zeros(self._words.shape[1], np.uint64)))
        self.values = self._open(fresh)

    def _open(self, fresh: bool) -> NDArray[np.uint64]:
        path, rows = self.path, self._store.rows
        size, shape = rows * 8, (rows,)
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists():
            if path.stat().st_size != size:
                raise StoreError(
                    f"{path} is {path.stat().st_size:,} bytes long, not {size:,}. "
                    'mode="resume-unclean" makes it anew from the rows as they are'
                )
            return np.memmap(path, np.uint64, "r+", shape=shape)
        aside = path.with_suffix(".sums.new")
        try:
            with open(aside, "wb") as file:
                reserve(file.fileno(), size, path.parent)
            values = np.memmap(aside, np.uint64, "r+", shape=shape)
            if not fresh:
                for start in range(0, rows, _ROWS):
                    self._hash(np.arange(start, min(rows, start + _ROWS)), values)
            os.replace(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        return values

    def refresh(self, rows: NDArray[np.int64]) -> None:
        """Bring the checksums of the sorted ``rows`` up to date."""
        self._ask(rows)
        self._hash(rows, self.values)

    def _ask(self, rows: NDArray[np.int64]) -> None:
        """Ask for the pages of the rows, unless a sample says that they are in memory."""
        from lowmem.kernels import pages

        if not pages.AVAILABLE:
            return
        store, samples = self._store, min(_SAMPLES, rows.size)
        row_bytes = store.layout.row_bytes
        if pages.count_missing(rows, samples, store.address, row_bytes, pages.PAGE):
            store.will_need(rows)

    def _hash(self, rows: NDArray[np.int64], values: NDArray[np.uint64]) -> None:
        from lowmem.kernels import undo

        calls = [(rows, lo, hi, self._words, self.zero, values) for lo, hi in slices(rows.size)]
        run_parallel(undo.hash_rows, calls)

    def find_damaged(self, first: int, last: int) -> NDArray[np.int64]:
        """Those rows of ``first:last`` that do not match their checksums."""
        from lowmem.kernels import undo

        found = np.empty(last - first, np.int64)
        count = undo.find_damaged(first, last, self._words, self.zero, self.values, found)
        return found[:count]

    def as_bytes(self) -> tuple[int, Callable[[int, int], bytes]]:
        """The file's length and a reader of it."""
        flat = self.values.view(np.uint8)
        return flat.size, lambda start, size: flat[start : start + size].tobytes()

    def flush(self) -> None:
        """Return when the checksums are on the disk."""
        if isinstance(self.values, np.memmap):
            self.values.flush()

    def close(self) -> None:
        self._words = np.empty((0, 0), np.uint64)
        self.values = np.empty(0, np.uint64)


def slices(size: int) -> list[tuple[int, int]]:
    """``(first, last)`` of each thread's share of ``size`` rows."""
    parts = min(thread_count(), max(1, size // 256))
    return [(size * n // parts, size * (n + 1) // parts) for n in range(parts)]
