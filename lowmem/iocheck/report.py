"""IOReport: everything that a check found, as text, table, picture and plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowmem.units import short_bytes

from . import fio, tables
from .advice import advice
from .cache import Method
from .engines import Engine, Rate
from .filesystem import FileSystem
from .patterns import Access
from .predict import ENDURANCE_WORDS, Prediction
from .timing import SURE_STEPS, StepCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class IOReport:
    """What a disk can do and what that means for one table. ``print`` it, or show it.

    Attributes:
        directory: the folder that was checked.
        rows, dim, batch, access: the table that it was checked for.
        seconds: the time budget; ``elapsed_s`` is what was used of it.
        cache_bytes: page cache that the store is taken to have.
        file_system: what the folder lies on.
        machine: hardware and versions.
        method: how the page cache was kept out of the way: ``"direct"``,
            ``"cache-dropped"`` or ``"cached: not a disk speed"``; ``method_reason`` says why.
        engine: what kept the queue deep, ``"linux-aio"`` or ``"threads"``.
        test_file_bytes: size of the test file.
        rates: what each workload reached, by names like ``"random_read_qd32"``.
        dsa_hot, dsa_cold, sparse_adam: measured steps, or ``None`` where not measured.
        dsa_written: steps with the writing of changed pages that a long run has; ``None`` where
            not measured, or where all of the table may wait to be written.
        writing_unknown: the table is so large that a long run waits for writing, and steps
            beside it could not be measured.
        prediction: what to expect of the person's own table, or ``None``.
        interrupted: the check was stopped before its end.
        notes: what else the reader must know.
    """

    directory: str
    rows: int
    dim: int
    batch: int
    access: Access
    seconds: float
    cache_bytes: int
    file_system: FileSystem
    machine: dict[str, Any] = field(default_factory=dict)
    method: Method = "cached: not a disk speed"
    method_reason: str = "not measured yet"
    engine: Engine = "threads"
    test_file_bytes: int = 0
    rates: dict[str, Rate] = field(default_factory=dict)
    dsa_hot: StepCost | None = None
    dsa_cold: StepCost | None = None
    sparse_adam: StepCost | None = None
    dsa_written: StepCost | None = None
    writing_unknown: bool = False
    prediction: Prediction | None = None
    elapsed_s: float = 0.0
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)

    # -- sentences ---------------------------------------------------------------------

    @property
    def store_bytes(self) -> int:
        """What the store of the person's table takes on disk."""
        return 4096 + 8 * self.rows * self.dim

    @property
    def advice(self) -> str:
        """One sentence: what to do."""
        return advice(self)

    @property
    def warnings(self) -> list[str]:
        """What makes the figures less than they seem, one sentence each."""
        found = []
        if self.file_system.warning:
            found.append(f"{self.file_system.type}: {self.file_system.warning}")
        if self.method == "cached: not a disk speed" and self.rates:
            found.append(f"the rates are those of memory, not of a disk ({self.method_reason})")
        if self.store_bytes > self.file_system.free_bytes:
            found.append(
                f"the store needs {short_bytes(self.store_bytes)} and "
                f"{short_bytes(self.file_system.free_bytes)} are free"
            )
        if self.interrupted:
            found.append("the check was stopped before its end; what is missing was not measured")
        steps = {
            "DSA": self.dsa_hot,
            "DSA beside writing": self.dsa_written,
            "SparseAdam": self.sparse_adam,
        }
        few = [name for name, cost in steps.items() if cost and cost.few]
        unlike = [name for name, cost in steps.items() if cost and cost.unlike and not cost.few]
        if few:
            found.append(
                f"fewer than {SURE_STEPS} steps of {' and '.join(few)} were timed: the machine is "
                "too slow, or was too busy, for the time given, so run it again with more seconds "
                "for figures to rely on"
            )
        if unlike:
            found.append(
                "the machine was busy with something else while steps of "
                f"{' and '.join(unlike)} were timed: their times lie far apart, so run it again "
                "for figures to rely on"
            )
        return found + self.notes

    @property
    def comparable(self) -> bool:
        """Whether both optimizers' steps were enough, and alike enough, to be compared."""
        return all(cost is not None and cost.sure for cost in (self.dsa_hot, self.sparse_adam))

    def fio_commands(self) -> list[str]:
        """The same measurements with ``fio``, one command each, for those who doubt these."""
        return fio.commands(self)

    # -- plain numbers -----------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by plain names; ``None`` for what was not measured."""
        figures: dict[str, Any] = {
            "directory": self.directory,
            "rows": self.rows,
            "dim": self.dim,
            "batch": self.batch,
            "access": self.access,
            "seconds_asked": self.seconds,
            "seconds_used": self.elapsed_s,
            "interrupted": self.interrupted,
            "file_system": self.file_system.type,
            "file_system_kind": self.file_system.kind,
            "free_bytes": self.file_system.free_bytes,
            "method": self.method,
            "method_reason": self.method_reason,
            "engine": self.engine,
            "test_file_bytes": self.test_file_bytes,
            "store_bytes": self.store_bytes,
            "cache_bytes": self.cache_bytes,
        }
        for pattern in ("sequential", "random"):
            for kind in ("read", "write"):
                for depth in (1, 32):
                    figures.update(self._rate_figures(pattern, kind, depth))
        for kind in ("read", "write"):
            deep = self.rates.get(f"sequential_{kind}_qd32")
            figures[f"sequential_{kind}_bytes_per_s"] = deep.bytes_per_s if deep else None
        hot, cold, ram, future = self.dsa_hot, self.dsa_cold, self.sparse_adam, self.prediction
        written = self.dsa_written
        figures.update(
            dsa_rows_per_s_hot=future.rows_per_s_hot if future else None,
            dsa_rows_per_s_cold=future.rows_per_s_cold if future else None,
            dsa_seconds_per_step_hot=future.seconds_per_step_hot if future else None,
            dsa_seconds_per_step_cold=future.seconds_per_step_cold if future else None,
            measured_dsa_rows_per_s_hot=hot.rows_per_s if hot else None,
            measured_dsa_rows_per_s_cold=cold.rows_per_s if cold else None,
            measured_dsa_cold_batch=cold.ids if cold else None,
            measured_dsa_write_back_pages_per_s=(
                cold.pages / cold.write_back_s if cold and cold.write_back_s else None
            ),
            measured_dsa_written_seconds_per_step=written.seconds if written else None,
            measured_dsa_written_batch=written.ids if written else None,
            measured_dsa_written_pages_per_s=(written.pages / written.seconds if written else None),
            measured_dsa_spread_hot=hot.spread if hot else None,
            measured_dsa_spread_cold=cold.spread if cold else None,
            sparse_adam_spread=ram.spread if ram else None,
            sparse_adam_rows_per_s=ram.rows_per_s if ram else None,
            sparse_adam_seconds_per_step=ram.seconds * self.batch / ram.ids if ram else None,
            predicted_rows_per_s=future.rows_per_s if future else None,
            predicted_seconds_per_step=future.seconds_per_step if future else None,
            predicted_cache_hit_share=future.hit_share if future else None,
            predicted_write_back_bound=future.write_back_bound if future else None,
            predicted_missing_pages_per_step=future.missing_pages_per_step if future else None,
            written_bytes_per_day=future.written_bytes_per_day if future else None,
            ssd_endurance_share_per_day=future.endurance_share_per_day if future else None,
            ssd_endurance_assumed=ENDURANCE_WORDS,
            advice=self.advice,
            warnings=self.warnings,
            fio=self.fio_commands(),
            machine=self.machine,
        )
        return figures

    def _rate_figures(self, pattern: str, kind: str, depth: int) -> dict[str, Any]:
        rate = self.rates.get(f"{pattern}_{kind}_qd{depth}")
        unit = "bytes_per_s" if pattern == "sequential" else "iops"
        name, tail = f"{pattern}_{kind}", f"qd{depth}"
        figures: dict[str, Any] = {f"{name}_{unit}_{tail}": getattr(rate, unit) if rate else None}
        for percent in (50, 95, 99):
            value = getattr(rate, f"latency_p{percent}_us") if rate else None
            figures[f"{name}_latency_p{percent}_us_{tail}"] = value
        return figures

    # -- text, table, picture ----------------------------------------------------------

    def rows_of_table(self) -> list[tuple[str, str, str]]:
        """What was measured: name, rate or time, and latency or another remark."""
        return tables.measured(self)

    def rows_of_prediction(self) -> list[tuple[str, str]]:
        """What to expect of the person's own table: name and figure."""
        return tables.expected(self)

    def text(self) -> str:
        """The whole report for a terminal; the advice comes last."""
        return tables.text(self)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        future = self.prediction
        speed = "no prediction"
        if future and future.rows_per_s is not None:
            speed = f"{future.rows_per_s:,.0f} rows/s expected"
        state = ", interrupted" if self.interrupted else ""
        return (
            f"IOReport({self.directory!r}, {self.rows:,} × {self.dim}, batch {self.batch:,}: "
            f"{self.method}, {speed}{state})"
        )

    def _repr_html_(self) -> str:
        return tables.html(self)

    def figure(self) -> Figure:
        """Disk rates, and rows per second hot, expected, cold and in RAM, as a picture."""
        from .picture import draw

        return draw(self)
