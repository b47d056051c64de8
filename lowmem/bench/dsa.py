"""DSA against SparseAdam, dense Adam and plain memmap: hot, fresh and cold, in one run.

  first-step    imports, the first step of a process, numba's compilation (not with --quick)
  hot           every row touched before, everything in memory
  fresh         from the first step of a new state on, in stretches
  end-to-end    forward, backward and step of an embedding model, hot
  flat          the same hot rows in taller and taller tables, and the memory of a step
  durability    the undo journal: first touches after a commit, and steady state
  commit        a commit, and coming back after a crash, by the rows touched
  cold-dropped  the state dropped from the page cache before each step
  cold-limit    10 GB of state, 4 GiB of memory for the page cache (needs root and Linux)

Gradients are as autograd leaves them, not coalesced and with duplicates; the whole
`opt.step()` is timed. Contenders take turns; figures are medians over their turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowmem.bench.columns import COLUMNS
from lowmem.bench.options import Settings, configure
from lowmem.bench.report import Result

__all__ = ["configure", "run"]


def run(args: argparse.Namespace) -> Result:
    """Measure what ``args`` asks for; see ``configure``.

    Raises:
        ValueError: an option that is not there.
        OSError: too little space in ``--directory``, with both figures.
    """
    settings = Settings.of(args)
    from lowmem.bench import machine, regimes
    from lowmem.bench.contenders import NAMES
    from lowmem.bench.harness import unsteady
    from lowmem.bench.space import scratch
    from lowmem.bench.summary import summary

    facts = machine.describe(args.directory or Path.cwd(), quick=bool(args.quick))
    limits = {key: value for key, value in facts.items() if key.endswith("_per_s")}
    with scratch(args.directory) as folder:
        settings.names, said = regimes.equal(settings.names, folder, settings.dims[0])
        settings.notes += said
        found: list[dict[str, Any]] = []
        stopped = False
        # What was imported is no garbage: looking through it takes a fifth of a second, often.
        gc.collect()
        gc.freeze()
        try:
            for row in _measure(settings, folder, limits):
                found.append(row)
        except KeyboardInterrupt:
            if not found:
                raise
            stopped = True
            settings.notes.append("Stopped before the end: what had been measured is here.")
        finally:
            gc.unfreeze()
    facts |= {key: value for key, value in limits.items() if "iops" in key}
    # The memmap ways wait for the disk at most steps, and are uneven on a quiet machine, too.
    ours = [row for row in found if row.get("contender") in (NAMES["sparse-adam"], NAMES["dsa"])]
    notes = [*summary(found), *unsteady(ours), *settings.notes]
    return Result(
        "dsa", args.command_line, facts, found, COLUMNS, main="rows_per_s", notes=notes,
        stopped=stopped,
    )  # fmt: skip


def _measure(
    settings: Settings, folder: Path, limits: dict[str, float]
) -> Iterator[dict[str, Any]]:
    for count in settings.rows:
        for dim in settings.dims:
            yield from _one_table(settings, folder, count, dim, limits)
    if "flat" in settings.regimes:
        yield from _flat(settings, folder, limits)
    if "cold-limit" in settings.regimes:
        yield from _cold(settings, folder, limits)


def _one_table(
    settings: Settings, folder: Path, rows: int, dim: int, limits: dict[str, float]
) -> Iterator[dict[str, Any]]:
    from lowmem.bench import regimes
    from lowmem.bench.commit import commit
    from lowmem.bench.durability import durability
    from lowmem.bench.first import first_step
    from lowmem.bench.space import part, that_fit
    from lowmem.bench.training import end_to_end
    from lowmem.bench.turns import hot_ways

    names, said = that_fit(settings.names, rows, dim)
    settings.notes += said
    if not names:
        return
    common: dict[str, Any] = {"rows": rows, "dim": dim, "limits": limits}
    state = 8 * rows * dim
    usual = settings.fresh_batches[0]
    if "first-step" in settings.regimes:
        with part(folder, 2 * state) as home:
            yield from first_step(names, home, batch=usual, **common)
    on_disk = state * sum(name not in ("adam", "sparse-adam") for name in names)
    if {"hot", "end-to-end"} & set(settings.regimes):
        with part(folder, on_disk) as home, contextlib.ExitStack() as stack:
            ways = hot_ways(names, home, stack, rows=rows, dim=dim)
            shared: dict[str, Any] = {"seconds": settings.seconds, "limits": limits}
            if "hot" in settings.regimes:
                yield from regimes.hot(
                    ways, home, ids=settings.ids, batches=settings.batches, **shared
                )
            if "end-to-end" in settings.regimes:
                yield from end_to_end(ways, home, ids=settings.few_ids, batch=usual, **shared)
            del ways
    if "fresh" in settings.regimes:
        for ids in settings.few_ids:
            for batch in settings.fresh_batches:
                with part(folder, state) as home:
                    yield from regimes.fresh(
                        [name for name in names if name in settings.fresh_names],
                        home,
                        ids=ids,
                        batch=batch,
                        repeats=settings.repeats,
                        passes=settings.passes,
                        **common,
                    )
    if "durability" in settings.regimes and "dsa" in names:
        with part(folder, 6 * state) as home:  # three stores, and their journals at worst
            yield from durability(
                home,
                ids=settings.ids[:1],
                batch=usual,
                steps=settings.cycle,
                repeats=settings.cycles,
                **common,
            )
    if "commit" in settings.regimes and "dsa" in names:
        with part(folder, 2 * state) as home:
            yield from commit(home, rows=rows, dim=dim, repeats=settings.cycles)
    if "cold-dropped" in settings.regimes and "dsa" in names:
        with part(folder, state) as home:
            yield from regimes.dropped(
                names,
                home,
                ids=settings.few_ids,
                batches=settings.cold_batches,
                seconds=settings.seconds,
                disk_seconds=settings.disk_seconds,
                **common,
            )


def _flat(settings: Settings, folder: Path, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    import shutil

    from lowmem import env
    from lowmem.bench.flat import flat
    from lowmem.bench.space import part

    dim, rows = settings.flat_dim, list(settings.flat_rows)
    disk, memory = shutil.disk_usage(folder).free, env.total_memory_bytes() or float("inf")
    # Only the hot rows of the weights take memory, but the system must promise all of it.
    while len(rows) > 1 and (8 * dim * sum(rows) * 1.1 > disk or 4 * dim * rows[-1] > memory):
        settings.notes.append(
            f"flat: {rows[-1]:,} rows are left out; the files of all tables would take "
            f"{8 * dim * sum(rows) / 1e9:.0f} GB and the weights {4 * dim * rows[-1] / 1e9:.0f} GB"
        )
        rows.pop()
    with part(folder, 8 * dim * sum(rows)) as home:
        yield from flat(
            home,
            rows=rows,
            dim=dim,
            batch=8192,
            memory_batches=[1024, 8192, 65536],
            seconds=settings.seconds,
            limits=limits,
        )


def _cold(settings: Settings, folder: Path, limits: dict[str, float]) -> Iterator[dict[str, Any]]:
    from lowmem import env
    from lowmem.bench.cgroup import unavailable
    from lowmem.bench.cold import under_limit
    from lowmem.bench.space import part

    reason, wanted = unavailable(), settings.cold_rows
    limit: int | None = settings.limit
    if reason:
        # Nobody can be held to less memory than there is: the state must be larger than that.
        memory = env.available_memory_bytes() or 0
        limit = None
        wanted = [rows for rows in wanted if 8 * rows * settings.dims[0] > memory]
        if not wanted:
            least = memory // (8 * settings.dims[0]) * 2
            settings.notes.append(
                f"cold by memory limit: not available, {reason}. A state larger than the "
                f"memory shows it, too: --cold-rows {least:,} or so"
            )
    for rows in wanted:
        with part(folder, 8 * rows * settings.dims[0]) as home:
            yield from under_limit(
                home,
                limit=limit,
                rows=rows,
                dim=settings.dims[0],
                ids=settings.few_ids,
                batches=settings.cold_batches,
                names=settings.names,
                seconds=3 * settings.seconds,
                disk_seconds=settings.disk_seconds,
                visits=settings.visits,
                limits=limits,
            )
