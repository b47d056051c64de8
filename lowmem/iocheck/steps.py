"""The DSA-shaped test: real ``DSA`` steps on a small store, hot and cold, and SparseAdam's.

The optimizer that people will use is the one that is timed, so its sorting, its asking
for pages and its threads are in the figure.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lowmem.dsa.store import _HUGE_SHARE

from .patterns import PAGE, Access, draw_ids
from .predict import StepCost

HOT_BYTES = 512 << 20  # large beside any processor cache, small beside most memories
MAX_IDS = 1 << 17
_BATCHES = 4


class SampleStore:
    """A DSA optimizer with one table, whose file serves as the disk test's file as well."""

    def __init__(self, folder: Path, rows: int, dim: int) -> None:
        from lowmem.dsa.optimizer import DSA

        self.rows, self.dim, self.row_bytes = rows, dim, 8 * dim
        self.usable_rows = rows  # those that hold real data, see limit()
        self._weights = torch.nn.Parameter(torch.empty(rows, dim).fill_(0.01))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of RAM-backed folders; the report says it itself
            self._optimizer = DSA([self._weights], directory=folder)
        self._optimizer.step_rows(self._weights, torch.tensor([0]), torch.zeros(1, dim))
        estate = self._optimizer._estate
        assert estate is not None
        self._store = estate.tables[self._weights].store
        self._residency = estate.tables[self._weights].residency
        self.path = str(self._store.path)

    @property
    def data_bytes(self) -> int:
        """Bytes of the rows, in whole pages, from byte 4,096 of the file on."""
        return self.rows * self.row_bytes // PAGE * PAGE

    def limit(self, data_bytes: int) -> None:
        """Only the first ``data_bytes`` of the rows hold data: touch no others."""
        self.usable_rows = max(1, min(self.rows, data_bytes // self.row_bytes))

    def step(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        self._optimizer.step_rows(self._weights, ids, grads)

    def use_single_pages(self) -> None:
        """What DSA does by itself for a store that is large beside the memory."""
        self._store.advise_random()

    @staticmethod
    def is_large(store_bytes: int, memory_bytes: int) -> bool:
        """Whether DSA reads a store of this size page by page, by its own rule."""
        return store_bytes > _HUGE_SHARE * memory_bytes

    def write_back(self) -> None:
        self._store.flush()

    def evict(self) -> None:
        self._store.evict()

    def close(self) -> None:
        self._optimizer.close()

    def _preload(self, rows: int, seconds: float) -> int:
        """Read the first ``rows`` rows into the page cache; how many that time allowed."""
        begin, done = time.perf_counter(), 0
        with open(self.path, "rb", buffering=0) as file:
            while done < PAGE + rows * self.row_bytes and time.perf_counter() - begin < seconds:
                done += len(file.read(4 << 20)) or (1 << 62)
        return max(1, min(rows, (done - PAGE) // self.row_bytes))

    def compile(self) -> None:
        """Have every kernel compiled (and kept on disk by numba) before anything is timed."""
        self._residency.asking = True
        self.step(torch.tensor([0]), torch.zeros(1, self.dim))
        self._residency.asking = False

    # -- timed steps -------------------------------------------------------------------

    def time_hot(
        self,
        table_rows: int,
        batch: int,
        access: Access,
        seconds: float,
        rng: np.random.Generator,
        should_stop: Callable[[], bool],
    ) -> StepCost | None:
        """Steps of the person's batch on rows that have all been touched before."""
        window = min(self.usable_rows, table_rows, max(1, HOT_BYTES // self.row_bytes))
        grads = random_grads(min(batch, MAX_IDS), self.dim)
        begin = time.perf_counter()
        window = self._preload(window, seconds / 3)
        batches, distinct = make_batches(table_rows, window, batch, access, rng)
        chunk = max(1, min(window, MAX_IDS, len(grads)))
        for start in range(0, window, chunk):
            ids = torch.arange(start, min(window, start + chunk))
            self.step(ids, grads[: len(ids)])
            if should_stop() or time.perf_counter() - begin > seconds / 2:
                # Too slow to warm it all: the steps below stay where it is warm.
                window = start + len(ids)
                batches, distinct = make_batches(table_rows, window, batch, access, rng)
                break
        for ids in batches[:2]:
            self.step(ids, grads[: len(ids)])
        left = seconds - (time.perf_counter() - begin)
        times = time_steps(lambda n: self.step(batches[n % _BATCHES], grads), left, should_stop)
        if not times:
            return None
        count = len(batches[0])
        pages = count_pages(batches[0], self.row_bytes)
        return StepCost(count, statistics.median(times), distinct, pages, len(times))

    def time_cold(
        self,
        distinct: int,
        density: float,
        large: bool,
        page_s: float,
        byte_s: float,
        seconds: float,
        rng: np.random.Generator,
        should_stop: Callable[[], bool],
    ) -> StepCost | None:
        """Steps on random rows of which no page is in memory, and their write-back.

        Args:
            distinct: different rows of a step of the person's own.
            density: share of its pages that such a step touches in the person's own table;
                the sample's steps are as dense, since neighbours are cheaper.
            large: the person's store is one that DSA reads page by page. Of others it
                reads long stretches, so the sample is cut to what time allows.
            page_s: seconds to read and write back one page of many.
            byte_s: seconds to read and write back one byte of a long stretch.
            seconds: how long this may take.
        """
        rows = self.usable_rows
        if large:
            self.use_single_pages()
            density = max(density, 0.05)
            affordable = seconds / 3 / page_s
        else:
            rows = max(1, min(rows, int(seconds / 3 / byte_s) // self.row_bytes))
            affordable = float(MAX_IDS)
        pages_per_row = max(1.0, self.row_bytes / PAGE)
        limit = max(64.0, density * rows * self.row_bytes / PAGE)
        count = max(1, int(min(distinct, rows, MAX_IDS, limit, affordable) / pages_per_row))
        grads = random_grads(count, self.dim)
        times, flushes, pages = [], [], 0
        begin = time.perf_counter()
        cycle = 0.0
        self.evict()
        # The first step is DSA's chance to notice that pages are missing; it does not count.
        for number in range(1000):
            if should_stop() or (number > 1 and time.perf_counter() - begin + cycle > seconds):
                break
            ids = torch.from_numpy(rng.choice(rows, count, replace=False))
            start = time.perf_counter()
            self.step(ids, grads)
            stepped = time.perf_counter()
            self.write_back()
            written = time.perf_counter()
            self.evict()
            cycle = time.perf_counter() - start
            if number:
                times.append(stepped - start)
                flushes.append(written - stepped)
                pages = count_pages(ids, self.row_bytes)
        if not times:
            return None
        return StepCost(
            count,
            statistics.median(times),
            count,
            pages,
            len(times),
            statistics.median(flushes),
        )


def time_sparse_adam(
    table_rows: int,
    dim: int,
    batch: int,
    access: Access,
    seconds: float,
    memory_bytes: int,
    rng: np.random.Generator,
    should_stop: Callable[[], bool],
) -> StepCost | None:
    """The same steps with ``torch.optim.SparseAdam``, weights and moments in RAM."""
    begin = time.perf_counter()
    window = min(table_rows, max(1, min(HOT_BYTES, memory_bytes) // (12 * dim)))
    batches, _ = make_batches(table_rows, window, batch, access, rng)
    grads = random_grads(len(batches[0]), dim)
    weights = torch.nn.Parameter(torch.empty(window, dim).fill_(0.01))
    optimizer = torch.optim.SparseAdam([weights])
    count = 1

    def step(number: int) -> None:
        # A gradient as autograd leaves it: not coalesced.
        ids = batches[number % _BATCHES][:count]
        weights.grad = torch.sparse_coo_tensor(
            ids[None], grads[:count], weights.shape, check_invariants=False
        )
        optimizer.step()

    step(0)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weights][name].fill_(0.01)
    # A slow machine gets smaller batches: the time per id hardly depends on their number.
    count = min(len(batches[0]), 8192)
    step(0)
    start = time.perf_counter()
    step(1)
    one = max(1e-6, time.perf_counter() - start)
    left = seconds - (time.perf_counter() - begin)
    count = min(len(batches[0]), max(count, int(count * left / 4 / one)))
    times = time_steps(step, left, should_stop)
    if not times:
        return None
    distinct = len(np.unique(batches[0][:count].numpy()))
    return StepCost(count, statistics.median(times), distinct, 0, len(times))


def make_batches(
    table_rows: int, window: int, batch: int, access: Access, rng: np.random.Generator
) -> tuple[list[torch.Tensor], int]:
    """Batches with the person's duplicates, laid on the first ``window`` rows; and how many
    different rows the first one has."""
    count = min(batch, MAX_IDS)
    if access == "zipf":
        # The frequent ids must be the same rows in every batch, scattered over the window.
        place = rng.permutation(window)
        drawn = [place[draw_ids(table_rows, count, access, rng) % window] for _ in range(_BATCHES)]
    else:
        drawn = [rng.integers(0, window, count, dtype=np.int64) for _ in range(_BATCHES)]
    distinct = len(np.unique(drawn[0]))
    return [torch.from_numpy(np.ascontiguousarray(ids, np.int64)) for ids in drawn], distinct


def random_grads(count: int, dim: int) -> torch.Tensor:
    return torch.rand(count, dim).sub_(0.5)


def count_pages(ids: torch.Tensor, row_bytes: int) -> int:
    """How many pages of a store different rows lie on."""
    rows: NDArray[np.int64] = np.unique(ids.numpy())
    first, last = rows * row_bytes // PAGE, (rows * row_bytes + row_bytes - 1) // PAGE
    # Sorted rows: a page is new unless it is the last page of the row before.
    shared = int(np.count_nonzero(first[1:] == last[:-1]))
    return int((last - first + 1).sum()) - shared


def time_steps(
    step: Callable[[int], object], seconds: float, should_stop: Callable[[], bool]
) -> list[float]:
    """Seconds of each step: at least one, and three unless they are slow."""
    times: list[float] = []
    begin = time.perf_counter()
    for number in range(100_000):
        spent = time.perf_counter() - begin
        late = spent > seconds * (1.0 if number >= 3 else 1.5)
        if number and (late or should_stop()):
            break
        start = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - start)
    return times
