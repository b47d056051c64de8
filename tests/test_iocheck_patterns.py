"""The page-cache model against a cache that is simulated page by page."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from lowmem.iocheck.patterns import PAGE, TableAccess, draw_ids


def simulate(
    rows: int, row_bytes: int, batch: int, access: str, cache_bytes: float
) -> tuple[float, float, float]:
    """Distinct rows, touched pages and missing pages of a step: a plain LRU over pages."""
    rng = np.random.default_rng(1)
    place = rng.permutation(rows)
    cache: OrderedDict[int, None] = OrderedDict()
    seen = []
    for step in range(260):
        ids = np.unique(place[draw_ids(rows, batch, access, rng)])
        spans = [
            np.arange(PAGE + i * row_bytes, PAGE + (i + 1) * row_bytes, min(row_bytes, 256))
            for i in (ids[:0] if row_bytes <= PAGE else ids)
        ]
        ends = [PAGE + ids * row_bytes, PAGE + ids * row_bytes + row_bytes - 1]
        pages = np.unique(np.concatenate([*ends, *spans]) // PAGE)
        missing = 0
        for page in pages.tolist():
            if page in cache:
                cache.move_to_end(page)
                continue
            missing += 1
            cache[page] = None
            if len(cache) > cache_bytes // PAGE:
                cache.popitem(last=False)
        if step >= 160:
            seen.append((len(ids), len(pages), missing))
    distinct, touched, missed = np.mean(seen, axis=0)
    return float(distinct), float(touched), float(missed)


@pytest.mark.parametrize(
    ("rows", "row_bytes", "batch", "access", "share"),
    [
        (200_000, 1024, 2048, "uniform", 0.4),
        (200_000, 1024, 2048, "zipf", 0.4),
        (200_000, 800, 2048, "zipf", 0.2),
        (200_000, 512, 2048, "zipf", 0.1),
        (50_000, 8192, 1024, "zipf", 0.1),
        (50_000, 160, 1024, "zipf", 0.1),
        (2_000, 1024, 4096, "zipf", 0.5),
        (20_000, 1024, 2048, "uniform", 2.0),
        (20_000, 24, 512, "uniform", 0.5),
    ],
)
def test_a_step_meets_what_a_simulated_cache_meets(
    rows: int, row_bytes: int, batch: int, access: str, share: float
) -> None:
    cache_bytes = rows * row_bytes * share
    step = TableAccess(rows, row_bytes, access).step(batch, cache_bytes)
    distinct, touched, missing = simulate(rows, row_bytes, batch, access, cache_bytes)
    assert step.distinct_rows == pytest.approx(distinct, rel=0.03)
    assert step.touched_pages == pytest.approx(touched, rel=0.04)
    assert step.missing_pages == pytest.approx(missing, rel=0.09, abs=2)


@pytest.mark.parametrize("access", ["uniform", "zipf"])
def test_no_cache_misses_everything_and_a_whole_one_nothing(access: str) -> None:
    table = TableAccess(1_000_000, 1024, access)
    assert table.step(4096, 0).hit_share == 0.0
    assert table.step(4096, 2e9).hit_share == 1.0
    shares = [table.step(4096, cache).hit_share for cache in (1e7, 1e8, 3e8, 6e8, 9e8)]
    assert shares == sorted(shares)


def test_one_row_and_batches_larger_than_the_table() -> None:
    step = TableAccess(1, 8, "zipf").step(1_000_000, 0)
    assert step.distinct_rows == pytest.approx(1.0)
    assert step.touched_pages == pytest.approx(1.0)


def test_zipf_ids_follow_the_law() -> None:
    ids = draw_ids(1000, 200_000, "zipf", np.random.default_rng(0))
    law = np.arange(1, 1001) ** -1.05
    expected = 200_000 * law / law.sum()
    counts = np.bincount(ids, minlength=1000)
    assert counts.shape == (1000,)
    for rank in (0, 1, 9):
        assert counts[rank] == pytest.approx(expected[rank], rel=0.05)
    assert counts[500:].sum() == pytest.approx(expected[500:].sum(), rel=0.05)
