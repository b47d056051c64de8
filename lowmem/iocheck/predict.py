"""From what was measured on a small store to a step of the person's own table.

A step costs what it costs when every page is in memory, plus a read for every page that
is missing. A page that is missing had to make room before, and it was dirty, as every row
that Adam touches is: so it costs a write, too, which shares the device with the reads.
And no step is faster than the system writes the pages back that it changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .patterns import PAGE, Access, StepPages, TableAccess
from .timing import StepCost
from .writeback import write_back_period_s

# A consumer drive's rated endurance, in bytes that may be written per byte of capacity:
# 600 TB for a drive of 1 TB is what the usual TLC drives are sold with.
ENDURANCE_BYTES = 600e12
ENDURANCE_WORDS = "600 TB written over the life of a 1 TB consumer SSD"
DAY_S = 86_400.0
IN_MEMORY = 0.995  # a hit share above it is as good as all


@dataclass(frozen=True)
class Prediction:
    """What to expect of the person's own table, batch and access pattern.

    ``rows_per_s`` counts the different rows of a batch: duplicates are summed, not updated.
    The cold figures count reads only; a long run writes evicted pages back as well, and
    ``seconds_per_step`` has that. What depends on missing pages is ``None`` where their
    cost was not measured. ``write_back_bound``: a long run is as fast as the system writes
    pages back, although they stay in memory.
    """

    seconds_per_step: float | None
    seconds_per_step_hot: float
    seconds_per_step_cold: float | None
    rows_per_s: float | None
    rows_per_s_hot: float
    rows_per_s_cold: float | None
    hit_share: float
    missing_pages_per_step: float
    written_bytes_per_day: float | None
    endurance_share_per_day: float | None
    cache_bytes: int
    store_bytes: int
    write_back_bound: bool = False


def predict(
    rows: int,
    row_bytes: int,
    batch: int,
    access: Access,
    cache_bytes: int,
    hot: StepCost,
    cold: StepCost | None,
    write_page_s: float,
    written_back: StepCost | None = None,
) -> Prediction:
    """Predict a step.

    Args:
        rows, row_bytes, batch, access: the person's table.
        cache_bytes: page cache that the store can have.
        hot: steps of (nearly) this batch with every page in memory.
        cold: steps with no page in memory; ``None`` where the cache cannot be dropped.
        write_page_s: seconds a page takes to write at the device's random-write rate,
            for when ``cold`` has none.
        written_back: steps with the writing that the person's table causes in a long run;
            ``None`` where all of it may wait to be written.
    """
    table = TableAccess(rows, row_bytes, access)
    pages = table.step(batch, cache_bytes)
    hot_s = hot.seconds * batch / hot.ids
    read_page = write_page = 0.0
    if cold is not None:
        base = hot.seconds * cold.ids / hot.ids
        read_page = max(0.0, cold.seconds - base) / max(1, cold.pages)
        write_page = cold.write_back_s / max(1, cold.pages) or write_page_s
    cold_s = hot_s + pages.touched_pages * read_page if cold is not None else None
    step_s = written = None
    bound = False
    if cold is not None or pages.hit_share > IN_MEMORY:
        step_s = hot_s + pages.missing_pages * (read_page + write_page)
        if written_back is not None:
            long_s = written_back.seconds * batch / written_back.ids
            bound = long_s > max(step_s, 2 * hot_s)
            step_s = max(step_s, long_s)
        written = _written_per_day(rows, row_bytes, batch, access, pages, step_s, write_page)
    return Prediction(
        seconds_per_step=step_s,
        seconds_per_step_hot=hot_s,
        seconds_per_step_cold=cold_s,
        rows_per_s=pages.distinct_rows / step_s if step_s else None,
        rows_per_s_hot=pages.distinct_rows / hot_s,
        rows_per_s_cold=pages.distinct_rows / cold_s if cold_s else None,
        hit_share=pages.hit_share,
        missing_pages_per_step=pages.missing_pages,
        written_bytes_per_day=written,
        endurance_share_per_day=None if written is None else written / ENDURANCE_BYTES,
        cache_bytes=cache_bytes,
        store_bytes=PAGE + rows * row_bytes,
        write_back_bound=bound,
    )


def _written_per_day(
    rows: int,
    row_bytes: int,
    batch: int,
    access: Access,
    pages: StepPages,
    step_s: float,
    write_page_s: float,
) -> float:
    """Bytes that reach the device in a day of nothing but steps.

    Every page that is evicted is written, and every page that stays is written about once
    in half a minute when it was touched in that time.
    """
    steps = DAY_S / step_s
    evicted = pages.missing_pages * steps
    table = TableAccess(rows, row_bytes, access)
    period = write_back_period_s()
    touched = table.pages * (1.0 - table.untouched_pages(batch * period / step_s))
    kept = touched * pages.hit_share * DAY_S / period
    written = evicted + kept
    if write_page_s > 0:
        written = min(written, DAY_S / write_page_s)
    return written * PAGE
