"""The columns of ``lowmem bench dsa``'s tables, regime by regime.

A table fits a terminal of 110 characters, so it shows what its regime is about; every
figure is in the JSON.
"""

from __future__ import annotations

from lowmem.bench.units import Column

_HOT, _FRESH, _TRAIN, _LOG = ("hot",), ("fresh",), ("end-to-end",), ("durability",)
_COLD = ("cold-dropped", "cold-limit")
_STEPS = (*_HOT, *_FRESH, *_TRAIN, *_LOG, *_COLD, "flat")

COLUMNS = [
    Column("contender", "contender", "text"),
    Column("rows_per_s", "rows/s", "rows/s", (*_HOT, *_FRESH, *_LOG, *_COLD, "flat")),
    Column("samples_per_s", "samples/s", "rows/s", _TRAIN),
    Column("import_s", "import", "s", ("first-step",)),
    Column("first_step_s", "first\nstep", "s", (*_FRESH, "first-step")),
    Column("second_step_s", "second\nstep", "s", ("first-step",)),
    Column("p50_s", "step\np50", "s", _STEPS),
    Column("p95_s", "step\np95", "s", (*_HOT, *_TRAIN, "flat")),
    Column("p99_s", "step\np99", "s", _STEPS),
    Column("spread", "spread", "share", (*_HOT, *_TRAIN, "flat")),
    Column("stall_share", "in\nstalls", "share", (*_FRESH, *_LOG)),
    Column("to_sparse", "× Sparse\nAdam", "number", (*_HOT, *_FRESH, *_TRAIN)),
    Column("worst_stretch", "× in worst\nstretch", "number", _FRESH),
    Column("to_memmap", "×\nmemmap", "number", _COLD),
    Column("to_random", "× MADV_\nRANDOM", "number", _COLD),
    Column("to_smallest", "cost, ×\nlowest", "number", ("flat",)),
    Column("first_touch", "cost after\ncommit", "number", _LOG),
    Column("steady", "cost,\nsteady", "number", _LOG),
    Column("touched_rows", "rows\ntouched", "count", ("commit",)),
    Column("journal_bytes", "journal", "bytes", ("commit",)),
    Column("commit_s", "commit", "s", (*_LOG, "commit")),
    Column("commit_row_s", "commit,\na row", "s", ("commit",)),
    Column("resume_s", "resume", "s", ("commit",)),
    Column("resume_row_s", "resume,\na row", "s", ("commit",)),
    Column("limit_share", "of the\nlimit", "share", (*_HOT, *_COLD, "flat")),
    Column("major_faults", "major\nfaults", "number", _COLD),
    Column("read_bytes", "read", "bytes", _COLD),
    Column("device_written_bytes", "device\nwritten", "bytes", (*_FRESH, *_LOG, *_COLD)),
    Column("rss_bytes", "RSS", "bytes", (*_HOT, *_TRAIN)),
    Column("ram_bytes", "state\nRAM", "bytes", (*_HOT, *_TRAIN)),
    Column("disk_bytes", "state\ndisk", "bytes", (*_HOT, *_TRAIN, *_LOG, "flat")),
    Column("gradient_bytes", "gradient", "bytes", ("memory",)),
    Column("step_bytes", "most memory\nof a step", "bytes", (*_COLD, "memory")),
]
