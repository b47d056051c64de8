"""Results: one object, one JSON form, and the tables and pictures made from it.

The README's tables are never typed. ``python -m lowmem.bench.report benchmarks README.md``
reads every ``benchmarks/NAME.json``, draws ``benchmarks/NAME.png`` and writes the table
between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem.bench.units import Column, format_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
_WIDTH = 110  # of a terminal's table
_MANY = 3  # tables that a page still takes in full


@dataclass
class Result:
    """What a benchmark found.

    Attributes:
        benchmark: ``"dsa"``, ``"slim"`` or ``"quality"``.
        command: The command that makes this result again.
        machine: From ``machine.describe()``.
        rows: One dict for each contender and workload: ``"contender"``, ``"workload"``, and
            figures in plain units (seconds, bytes, bytes per second).
        columns: Which of the figures a table shows, in order; the rest is in the JSON only.
        main: Key of the figure that the picture shows.
        notes: Sentences: who was left out and why, what was not available.
        plot_png: A picture that the benchmark drew itself, instead of the bars; not stored.
        stopped: Ctrl-C ended it, and these are the figures until then; not stored.
    """

    benchmark: str
    command: str
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    columns: list[Column]
    main: str = "step_s"
    notes: list[str] = field(default_factory=list)
    plot_png: bytes | None = field(default=None, repr=False)
    stopped: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "benchmark": self.benchmark,
            "command": self.command,
            "machine": self.machine,
            "main": self.main,
            "columns": [[c.key, c.title, c.unit, c.regimes] for c in self.columns],
            "notes": self.notes,
            "rows": self.rows,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form, whole or not at all."""
        path = Path(path)
        aside = path.with_name(path.name + ".part")
        aside.write_text(json.dumps(_plain(self.to_dict()), indent=1, allow_nan=False) + "\n")
        os.replace(aside, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read a result again; a file of another kind is a ``ValueError`` that names it."""
        try:
            data = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path} is no JSON: {error.msg} in line {error.lineno}; "
                "make it again with `lowmem bench … --json`"
            ) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{path} is no benchmark result of format {FORMAT} (it says {found})")
        try:
            return cls(
                benchmark=data["benchmark"],
                command=data["command"],
                machine=data["machine"],
                rows=data["rows"],
                columns=[
                    Column(key, title, unit, tuple(*regimes))
                    for key, title, unit, *regimes in data["columns"]
                ],
                main=data["main"],
                notes=data["notes"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a whole benchmark result: {error!r}") from None

    def caption(self) -> str:
        """One line: processor, threads, memory, versions, file system, date."""
        facts = self.machine
        parts = [
            f"{facts.get('cpu')}, {facts.get('kernel_threads', facts.get('cpu_count'))} threads"
        ]
        if facts.get("memory_bytes"):
            parts.append(f"{format_value(facts['memory_bytes'], 'bytes')} RAM")
        if facts.get("gpu"):
            parts.append(str(facts["gpu"]))
        if facts.get("update_bytes_per_s"):
            bandwidth = format_value(facts["update_bytes_per_s"], "bytes/s")
            parts.append(f"memory {bandwidth}")
        if facts.get("file_system"):
            parts.append(str(facts["file_system"]))
        parts += [f"{name} {facts[name]}" for name in ("torch", "numba") if facts.get(name)]
        parts += [f"Python {facts.get('python')}", str(facts.get("date"))]
        return ", ".join(parts)

    def table(self) -> str:
        """The table as aligned text, for a terminal."""
        lines = []
        for workload, rows in self.by_workload().items():
            columns = self.shown_columns(rows)
            titles = [column.title.split("\n") for column in columns]
            high = max(map(len, titles), default=0)
            titles = [[""] * (high - len(title)) + title for title in titles]
            cells = [list(line) for line in zip(*titles, strict=True)]
            cells += [[format_value(row.get(c.key), c.unit) for c in columns] for row in rows]
            widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
            cells.insert(high, ["-" * width for width in widths])
            lines += [workload] if workload else []
            for line in cells:
                aligned = [
                    cell.ljust(width) if column.unit == "text" else cell.rjust(width)
                    for cell, width, column in zip(line, widths, columns, strict=True)
                ]
                lines.append(("  " + "  ".join(aligned)).rstrip())
            lines.append("")
        for text in [*self.notes, self.caption()]:
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
        return "\n".join(lines)

    def markdown(self) -> str:
        """The table, the machine and the command as Markdown."""
        lines = []
        for workload, rows in self.by_workload().items():
            columns = self.shown_columns(rows)
            if workload:
                lines += [f"**{workload}**", ""]
            titles = [column.title.replace("\n", " ") for column in columns]
            lines.append("| " + " | ".join(titles) + " |")
            lines.append(
                "|" + "|".join("---" if c.unit == "text" else "---:" for c in columns) + "|"
            )
            lines += [
                "| " + " | ".join(format_value(row.get(c.key), c.unit) for c in columns) + " |"
                for row in rows
            ]
            lines.append("")
        lines.append(f"{self.caption()}. Command: `{self.command}`")
        return "\n".join(lines)

    def by_workload(self) -> dict[str, list[dict[str, Any]]]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault(str(row.get("workload", "")), []).append(row)
        return groups

    def shown_columns(self, rows: Sequence[dict[str, Any]]) -> list[Column]:
        """The columns that are for these rows and say something of at least one."""
        return [column for column in self.columns if column.shown(rows)]

    def figure(self) -> Figure:
        """Bars of the main figure, one panel a workload, or the benchmark's own picture."""
        from matplotlib.figure import Figure

        if self.rows and all("regime" in row for row in self.rows):
            from lowmem.bench import dsa_plot

            return dsa_plot.figure(self)

        groups = self.by_workload()
        title = next((c for c in self.columns if c.key == self.main), Column(self.main, self.main))
        heights = [0.5 + 0.32 * len(rows) for rows in groups.values()] or [1.0]
        figure = Figure(figsize=(8, 0.8 + sum(heights) + 0.4 * len(heights)), layout="constrained")
        axes = figure.subplots(max(1, len(groups)), 1, squeeze=False, height_ratios=heights)
        for axis, (workload, rows) in zip(axes[:, 0], groups.items(), strict=False):
            shown = [row for row in rows if isinstance(row.get(self.main), int | float)]
            names = [str(row.get("contender", "")) for row in shown]
            values = [float(row[self.main]) for row in shown]
            ours = ["#1f6feb" if re.match("DSA|Slim", name) else "#b0b7c0" for name in names]
            bars = axis.barh(range(len(shown)), values, color=ours)
            axis.bar_label(bars, [" " + format_value(v, title.unit) for v in values], fontsize=9)
            axis.set_yticks(range(len(shown)), names)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_title(workload, loc="left", fontsize=10)
        axes[-1, 0].set_xlabel(f"{title.title}\n{self.caption()}", fontsize=7)
        return figure

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Save the picture as PNG."""
        if self.plot_png is not None:
            Path(path).write_bytes(self.plot_png)
        else:
            self.figure().savefig(path, dpi=120, format="png", metadata={"Software": None})


def _plain(value: Any) -> Any:
    """JSON's own types only: numpy numbers become numbers, NaN and infinities ``null``."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def update_readme(text: str, results: dict[str, Result]) -> str:
    """``text`` with the tables of ``results`` between their markers.

    A marker without a result, a result's marker without an end, or one that is there twice is
    a ``ValueError``; a result without a marker is fine (not every figure is for the README).
    """
    names = re.findall(r"<!-- bench:([\w.-]+) -->", text)
    for name in names:
        if name not in results:
            raise ValueError(f"the README asks for bench:{name}, but there is no {name}.json")
        start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"bench:{name} must start once and end once in the README")
        before, rest = text.split(start)
        if end not in rest:
            raise ValueError(f"bench:{name} ends before it starts in the README")
        after = rest.split(end)[1]
        text = f"{before}{start}\n{_for_readme(results[name])}\n{end}{after}"
    return text


def _for_readme(result: Result) -> str:
    """All tables of a result, or a short one in their place where there are many."""
    if len(result.by_workload()) <= _MANY:
        return result.markdown()
    from lowmem.bench.brief import brief

    return brief(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures and fill in the README from the committed results."""
    parser = argparse.ArgumentParser(prog="python -m lowmem.bench.report", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="folder of the results, benchmarks/")
    parser.add_argument("readme", type=Path, help="README.md")
    parser.add_argument("--no-plots", action="store_true", help="the tables only")
    args = parser.parse_args(argv)
    try:
        results = {path.stem: Result.load(path) for path in sorted(args.directory.glob("*.json"))}
        old = args.readme.read_text()
        new = update_readme(old, results)
        if new != old:
            args.readme.write_text(new)
        for name, result in results.items():
            drawable = any(isinstance(row.get(result.main), int | float) for row in result.rows)
            if not args.no_plots and drawable and result.benchmark != "quality":
                result.plot(args.directory / f"{name}.png")
    except (ValueError, OSError) as error:
        print(f"lowmem.bench.report: {error}", file=sys.stderr)
        return 2
    print(f"{len(results)} results, {args.readme} {'updated' if new != old else 'as it was'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
