"""IOReport: everything that a check found, as text, table, picture and plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from .advice import advice
from .cache import Method
from .engines import Engine, Rate
from .filesystem import FileSystem
from .patterns import Access
from .predict import DAY_S, ENDURANCE_WORDS, Prediction
from .timing import StepCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLOCK = 1 << 20


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
                f"the store needs {gigabytes(self.store_bytes)} and "
                f"{gigabytes(self.file_system.free_bytes)} are free"
            )
        if self.interrupted:
            found.append("the check was stopped before its end; what is missing was not measured")
        return found + self.notes

    def fio_commands(self) -> list[str]:
        """The same measurements with ``fio``, for those who doubt these."""
        size = max(self.test_file_bytes, _BLOCK)
        commands = []
        for name, rate in self.rates.items():
            pattern, kind = name.split("_")[:2]
            job = ("rand" if pattern == "random" else "") + kind
            commands.append(
                f"fio --name={name} --filename=lowmem-fio.tmp --size={size} "
                f"--rw={job} --bs={rate.block_bytes} --iodepth={rate.depth} --ioengine=libaio "
                f"--direct={int(self.method == 'direct')} "
                "--time_based --runtime=5"
            )
        return commands

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
            sparse_adam_rows_per_s=ram.rows_per_s if ram else None,
            sparse_adam_seconds_per_step=ram.seconds * self.batch / ram.ids if ram else None,
            predicted_rows_per_s=future.rows_per_s if future else None,
            predicted_seconds_per_step=future.seconds_per_step if future else None,
            predicted_cache_hit_share=future.hit_share if future else None,
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
        """What was measured: name, rate, and latency or another remark."""
        table = []
        for name, rate in self.rates.items():
            pattern, kind, _ = name.split("_")
            label = f"{pattern} {kind}, {short_block(rate.block_bytes)}, queue depth {rate.depth}"
            if pattern == "sequential":
                figure = f"{rate.bytes_per_s / 1e6:,.0f} MB/s"
            else:
                figure = f"{rate.iops:,.0f} IOPS"
            table.append(
                (
                    label,
                    figure,
                    f"p50 {rate.latency_p50_us:,.0f}, p95 {rate.latency_p95_us:,.0f}, "
                    f"p99 {rate.latency_p99_us:,.0f} µs",
                )
            )
        for label, cost in (
            ("DSA steps, all in memory", self.dsa_hot),
            ("DSA steps, nothing in memory", self.dsa_cold),
            ("SparseAdam steps in RAM", self.sparse_adam),
        ):
            if cost:
                table.append(
                    (
                        label,
                        f"{cost.rows_per_s:,.0f} rows/s",
                        f"{cost.ids:,} ids ({cost.distinct_rows:,} rows) a step, "
                        f"{1e3 * cost.seconds:,.1f} ms, median of {cost.steps}",
                    )
                )
        return table

    def rows_of_prediction(self) -> list[tuple[str, str]]:
        """What to expect of the person's own table: name and figure."""
        future = self.prediction
        if future is None:
            return []
        unknown = "not measured" if self.interrupted else "not measurable here"

        def shown(value: float | None, form: str) -> str:
            return unknown if value is None else format(value, form)

        table = [
            ("store on disk", gigabytes(future.store_bytes)),
            ("page cache for it", gigabytes(future.cache_bytes)),
            ("touched pages in memory", f"{100 * future.hit_share:.0f} %"),
            ("different rows per second", shown(future.rows_per_s, ",.0f")),
            ("seconds per step", shown(future.seconds_per_step, ".4f")),
            ("… with everything in memory", f"{future.seconds_per_step_hot:.4f}"),
            ("… with nothing in memory, reads only", shown(future.seconds_per_step_cold, ".4f")),
        ]
        if self.sparse_adam:
            seconds = self.sparse_adam.seconds * self.batch / self.sparse_adam.ids
            table.append(("… SparseAdam in RAM", f"{seconds:.4f}"))
        if future.written_bytes_per_day is not None and future.endurance_share_per_day is not None:
            speed = future.written_bytes_per_day / DAY_S / 1e6
            share = 100 * future.endurance_share_per_day
            table += [
                (
                    "written in a day of training",
                    f"{gigabytes(future.written_bytes_per_day)} ({speed:,.1f} MB/s)",
                ),
                (
                    "of a consumer SSD's endurance",
                    f"{share:.2f} % a day (of {ENDURANCE_WORDS})",
                ),
            ]
        return table

    def headline(self) -> str:
        """Where, for what, and how it was measured, in one line."""
        system = self.file_system
        return (
            f"I/O check of {self.directory} ({system.type} on {system.source or '?'}, "
            f"{gigabytes(system.free_bytes)} free) for {self.rows:,} × {self.dim}, "
            f"batches of {self.batch:,}, {self.access} access"
        )

    def how(self) -> str:
        """How honest the rates are."""
        return (
            f"test file {self.test_file_bytes / 1e6:,.0f} MB; reads: {self.method} "
            f"({self.method_reason}); engine {self.engine}; {self.elapsed_s:.1f} s"
        )

    def text(self) -> str:
        """The whole report for a terminal."""
        lines = [self.headline(), self.how(), ""]
        table = self.rows_of_table()
        widths = [max((len(row[i]) for row in table), default=0) for i in (0, 1)]
        lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in table]
        expected = self.rows_of_prediction()
        if expected:
            width = max(len(name) for name, _ in expected)
            lines += ["", "Expected for your table"]
            lines += [f"  {name:<{width}}  {figure}" for name, figure in expected]
        lines += ["", *(f"Note: {warning}." for warning in self.warnings), self.advice]
        return "\n".join(lines)

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
        parts = [f"<p><b>{escape(self.advice)}</b></p>", f"<p>{escape(self.headline())}</p>"]
        expected = self.rows_of_prediction()
        if expected:
            parts.append(_html_table(("Expected for your table", "Figure"), expected))
        measured = self.rows_of_table()
        if measured:
            parts.append(_html_table(("Measured", "Rate", "Latency, or steps timed"), measured))
        parts += [f"<p>Note: {escape(warning)}.</p>" for warning in self.warnings]
        parts.append(f"<p><small>{escape(self.how())}</small></p>")
        return "<div>" + "".join(parts) + "</div>"

    def figure(self) -> Figure:
        """Disk rates, and rows per second hot, expected, cold and in RAM, as a picture."""
        from .picture import draw

        return draw(self)


def _html_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    left = 'style="text-align:left"'
    cells = "".join(f'<th scope="col" {left}>{escape(name)}</th>' for name in head)
    body = ""
    for name, *others in rows:
        data = "".join(f"<td {left}>{escape(cell)}</td>" for cell in others)
        body += f'<tr><th scope="row" {left}>{escape(name)}</th>{data}</tr>'
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def gigabytes(size: float) -> str:
    """Bytes as people read them."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size / 1e3:,.1f} kB"


def short_block(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
