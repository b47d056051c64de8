"""The DSA-shaped test: real ``DSA`` steps on a small store, hot and cold.

The optimizer that people will use is the one that is timed, so its sorting, its asking
for pages and its threads are in the figure.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lowmem.dsa.store import HUGE_SHARE

from .batches import Batches, count_pages, most_ids, random_grads
from .patterns import PAGE, Access, TableAccess
from .timing import StepCost, time_steps, typical
from .writeback import Writer, dirtied_pages

HOT_BYTES = 1 << 30  # large beside processor caches, small beside most memories
_MIN_DENSITY = 0.05
_WRITTEN_IDS = 8192  # of a step beside which pages are written
_LEAST_WRITTEN_S = 1.0  # that such a step may take, whatever the time budget


class SampleStore:
    """A DSA optimizer with one table, whose file serves as the disk test's file as well."""

    def __init__(self, folder: Path, rows: int, dim: int) -> None:
        from lowmem.dsa.optimizer import DSA

        self.rows, self.dim, self.row_bytes = rows, dim, 8 * dim
        self.usable_rows = rows  # those that hold real data, see limit()
        self._weights = torch.nn.Parameter(torch.empty(rows, dim).fill_(0.01))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of RAM-backed folders; the report says it itself
            # Nothing to come back to: closing must not read it all for a commit.
            self._optimizer = DSA([self._weights], directory=folder, durability="none")
        self._optimizer.step_rows(self._weights, torch.tensor([0]), torch.zeros(1, dim))
        estate = self._optimizer._estate
        assert estate is not None
        self._store = estate.tables[self._weights].store
        self._residency = estate.tables[self._weights].residency
        self.path = str(self._store.path)
        self._batches: Batches | None = None  # of the last hot steps
        self._window = 0  # and how many rows they were taken on

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
        return store_bytes > HUGE_SHARE * memory_bytes

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
        begin = time.perf_counter()
        window = min(self.usable_rows, table_rows, max(1, HOT_BYTES // self.row_bytes))
        window = self._preload(window, 0.45 * seconds)
        grads = random_grads(most_ids(batch, self.dim), self.dim)
        chunk = max(1, min(window, len(grads)))
        warm = 0
        while warm < window:
            ids = torch.arange(warm, min(window, warm + chunk))
            self.step(ids, grads[: len(ids)])
            warm += len(ids)
            if should_stop() or time.perf_counter() - begin > 0.65 * seconds:
                break  # too slow to warm it all: the steps below stay where it is warm
        batches = Batches(table_rows, warm, batch, self.dim, access, rng, grads)

        def step(number: int) -> None:
            self.step(batches.ids(number), batches.grads(number))

        for number in range(2):
            step(number)
        self._batches, self._window = batches, warm
        left = seconds - (time.perf_counter() - begin)
        times = time_steps(step, left, should_stop)
        middle, spread = typical(times)
        pages = count_pages(batches.ids(0), self.row_bytes)
        return StepCost(len(batches), middle, batches.distinct, pages, len(times), spread=spread)

    def time_written_back(
        self,
        table: TableAccess,
        waiting_bytes: int,
        seconds: float,
        should_stop: Callable[[], bool],
    ) -> StepCost | None:
        """The steps of :meth:`time_hot` with the writing that they cause in a long run.

        Beside each step the system writes as many pages as a step of the person's ``table``
        changes while ``waiting_bytes`` of it wait to be written.

        ``None`` where there would be none, or where the system cannot be asked for it.
        """
        batches = self._batches
        if batches is None or should_stop():
            return None
        count = min(len(batches), _WRITTEN_IDS)
        dirtied = dirtied_pages(table, count, waiting_bytes)
        if not dirtied:
            return None
        clean = dirtied / table.step(count, 0).touched_pages
        size = self._window * self.row_bytes
        begin = time.perf_counter()
        most = max(2.0 * seconds, _LEAST_WRITTEN_S)  # one step at least

        def late(limit: float = most) -> bool:
            return should_stop() or time.perf_counter() - begin > limit

        times: list[float] = []
        with open(self.path, "rb+") as file, Writer(file.fileno(), PAGE + size, 2 * most) as writer:
            writer.grant(clean * size / PAGE)  # so much is clean in a long run, too
            writer.wait(lambda: late(0.5 * seconds))
            for number in range(1000):
                start = time.perf_counter()
                writer.grant(dirtied)
                self.step(batches.ids(number)[:count], batches.grads(number)[:count])
                writer.wait(late)
                if late() or not writer.able:
                    break
                times.append(time.perf_counter() - start)
                if late(seconds):
                    break
            if not writer.able:
                return None
        if not times:
            return None
        middle, spread = typical(times)
        distinct = batches.distinct_of(count)
        return StepCost(count, middle, distinct, round(dirtied), len(times), spread=spread)

    def time_cold(
        self,
        distinct: int,
        density: float,
        page_s: float,
        seconds: float,
        rng: np.random.Generator,
        should_stop: Callable[[], bool],
    ) -> StepCost | None:
        """Steps on random rows of which no page is in memory, and their write-back.

        Pages are read one by one, as DSA reads them from a large store, and from a small one
        once pages of it that were read had gone again.

        Args:
            distinct: different rows of a step of the person's own.
            density: share of its pages that such a step touches in the person's own table;
                the sample's steps are as dense, since neighbours are cheaper.
            page_s: seconds to read and write back one page of many.
            seconds: how long this may take.
        """
        self.use_single_pages()
        rows = self.usable_rows
        pages_per_row = max(1.0, self.row_bytes / PAGE)
        most = max(64.0, max(density, _MIN_DENSITY) * rows * self.row_bytes / PAGE)
        affordable = seconds / 3 / page_s
        count = max(1, int(min(distinct, rows, most, affordable) / pages_per_row))
        count = most_ids(count, self.dim)
        grads = random_grads(count, self.dim)
        times: list[float] = []
        flushes: list[float] = []
        pages = 0
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
        middle, spread = typical(times)
        return StepCost(count, middle, count, pages, len(times), typical(flushes)[0], spread)
