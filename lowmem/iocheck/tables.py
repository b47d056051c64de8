"""A report as tables: text for a terminal, HTML for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from lowmem.units import short_bytes

from .fio import one_command
from .predict import DAY_S, ENDURANCE_WORDS

if TYPE_CHECKING:
    from .report import IOReport
    from .timing import StepCost


def measured(report: IOReport) -> list[tuple[str, str, str]]:
    """What was measured: name, rate or time, and latency or another remark.

    Steps are shown as times. Their rates stand in ``expected`` alone, for the person's own
    batch, so that nobody has to tell two counts of rows apart.
    """
    table = []
    for name, rate in report.rates.items():
        pattern, kind, _ = name.split("_")
        label = f"{pattern} {kind}, {_block(rate.block_bytes)}, queue depth {rate.depth}"
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
        ("DSA step, all in memory", report.dsa_hot),
        ("DSA step, while pages are written", report.dsa_written),
        ("DSA step, nothing in memory", report.dsa_cold),
        ("SparseAdam step in RAM", report.sparse_adam),
    ):
        if cost:
            few = "" if cost.ids == report.batch else f" (time allows no {report.batch:,})"
            steps = f"median of {cost.steps} steps" if cost.steps > 1 else "one step"
            few_or_unlike = "too few" if cost.few else "too unlike"
            spread = "" if cost.sure else f": {few_or_unlike} to rely on"
            table.append(
                (
                    label,
                    f"{1e3 * cost.seconds:,.1f} ms",
                    f"{cost.ids:,} ids{few}, {steps}{spread}",
                )
            )
    return table


def expected(report: IOReport) -> list[tuple[str, str]]:
    """What to expect of the person's own table: name and figure."""
    future = report.prediction
    if future is None:
        return []
    unknown = "not measured" if report.interrupted else "not measurable here"

    def shown(value: float | None, form: str) -> str:
        return unknown if value is None else format(value, form)

    table = [
        ("store on disk", short_bytes(future.store_bytes)),
        ("page cache for it", short_bytes(future.cache_bytes)),
        ("touched pages in memory", f"{100 * future.hit_share:.0f} %"),
        ("rows per second, each once a step", shown(future.rows_per_s, ",.0f")),
        ("seconds per step", shown(future.seconds_per_step, ".4f")),
        ("… with everything in memory", f"{future.seconds_per_step_hot:.4f}"),
        (
            "… with nothing in memory, reads only",
            shown(future.seconds_per_step_cold, ".4f") + _doubt(report.dsa_cold),
        ),
    ]
    ram = report.sparse_adam
    if ram:
        step = f"{ram.seconds * report.batch / ram.ids:.4f}"
        table.append(("… SparseAdam in RAM", step + _doubt(ram)))
    in_ram = report.file_system.kind == "ram"  # where nothing wears out
    if (
        future.written_bytes_per_day is not None
        and future.endurance_share_per_day is not None
        and not in_ram
    ):
        speed = future.written_bytes_per_day / DAY_S / 1e6
        share = 100 * future.endurance_share_per_day
        table += [
            (
                "written in a day of training",
                f"{short_bytes(future.written_bytes_per_day)} ({speed:,.1f} MB/s)"
                + _doubt(report.dsa_written if future.write_back_bound else report.dsa_hot),
            ),
            ("of a consumer SSD's endurance", f"{share:.2f} % a day (of {ENDURANCE_WORDS})"),
        ]
    return table


def _doubt(cost: StepCost | None) -> str:
    if cost is None or cost.sure:
        return ""
    return f" (unsure: {'too few steps' if cost.few else 'the machine was busy'})"


def headline(report: IOReport) -> str:
    """Where, and for what, in one line."""
    system = report.file_system
    return (
        f"I/O check of {report.directory} ({system.type} on {system.source or '?'}, "
        f"{short_bytes(system.free_bytes)} free) for {report.rows:,} × {report.dim}, "
        f"batches of {report.batch:,}, {report.access} access"
    )


def how(report: IOReport) -> str:
    """How honest the rates are."""
    return (
        f"test file {short_bytes(report.test_file_bytes)}; reads: {report.method} "
        f"({report.method_reason}); engine {report.engine}; {report.elapsed_s:.1f} s"
    )


def text(report: IOReport) -> str:
    """The whole report for a terminal: what a doubter needs first, the advice last."""
    lines = [headline(report), how(report)]
    check = one_command(report)
    if check:
        lines += ["", "The same rates by fio, to check these:", *(f"  {line}" for line in check)]
    table = measured(report)
    if table:
        widths = [max(len(row[i]) for row in table) for i in (0, 1)]
        lines += ["", "Measured"]
        lines += [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in table]
    rows = expected(report)
    if rows:
        width = max(len(name) for name, _ in rows)
        lines += ["", "Expected for your table"]
        lines += [f"  {name:<{width}}  {figure}" for name, figure in rows]
    lines += ["", *(f"Note: {warning}." for warning in report.warnings), report.advice]
    return "\n".join(lines)


def html(report: IOReport) -> str:
    """The same for a notebook, the advice first."""
    parts = [f"<p><b>{escape(report.advice)}</b></p>", f"<p>{escape(headline(report))}</p>"]
    rows = expected(report)
    if rows:
        parts.append(_table(("Expected for your table", "Figure"), rows))
    table = measured(report)
    if table:
        parts.append(_table(("Measured", "Rate or time", "Latency, or steps timed"), table))
    parts += [f"<p>Note: {escape(warning)}.</p>" for warning in report.warnings]
    parts.append(f"<p><small>{escape(how(report))}</small></p>")
    return "<div>" + "".join(parts) + "</div>"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    left = 'style="text-align:left"'
    cells = "".join(f'<th scope="col" {left}>{escape(name)}</th>' for name in head)
    body = ""
    for name, *others in rows:
        data = "".join(f"<td {left}>{escape(cell)}</td>" for cell in others)
        body += f'<tr><th scope="row" {left}>{escape(name)}</th>{data}</tr>'
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _block(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
