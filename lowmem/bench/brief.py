"""A long DSA result in few lines: one a workload, with every contender's rate beside DSA's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowmem.bench.contenders import NAMES
from lowmem.bench.units import format_value

if TYPE_CHECKING:
    from lowmem.bench.report import Result

_PEERS = ("adam", "sparse-adam", "memmap", "memmap-random")


def brief(result: Result) -> str:
    """Markdown: rows a second of all contenders, and DSA against the two that people use."""
    duels: list[tuple[str, dict[str, dict[str, Any]]]] = []
    flat: list[dict[str, Any]] = []
    for workload, rows in result.by_workload().items():
        by_name = {str(row.get("contender")): row for row in rows}
        if NAMES["dsa"] in by_name and len(by_name) > 1:
            duels.append((workload, by_name))
        flat += [row for row in rows if "to_smallest" in row]
    lines = [*_duels(duels), *_heights(flat)]
    return "\n".join([*lines, f"{result.caption()}. Command: `{result.command}`"])


def _duels(duels: list[tuple[str, dict[str, dict[str, Any]]]]) -> list[str]:
    if not duels:
        return []
    names = [NAMES[key] for key in _PEERS if any(NAMES[key] in rows for _, rows in duels)]
    against = [NAMES[key] for key in ("sparse-adam", "memmap-random") if NAMES[key] in names]
    stretch = any("worst_stretch" in rows[NAMES["dsa"]] for _, rows in duels)
    titles = [
        "rows (end to end: samples) a second",
        *names,
        NAMES["dsa"],
        *(f"DSA × {name}" for name in against),
    ]
    titles += ["in its worst stretch"] * stretch
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    for workload, rows in duels:
        ours = rows[NAMES["dsa"]]
        cells = [workload]
        for name in (*names, NAMES["dsa"]):
            cells.append(_rate(rows.get(name, {})))
        for name in against:
            theirs = rows.get(name)
            ratio = theirs["step_s"] / ours["step_s"] if theirs else None
            cells.append(f"**{ratio:.1f}**" if ratio is not None else "–")
        if stretch:
            cells.append(format_value(ours.get("worst_stretch"), "number"))
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _heights(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    lines = [
        f"**{rows[0]['workload']}**",
        "",
        "| | rows/s | cost of a step, × lowest |",
        "|---|---:|---:|",
    ]
    for row in rows:
        cost = format_value(row["to_smallest"], "number")
        lines.append(f"| {row['contender']} | {_rate(row)} | {cost} |")
    return [*lines, ""]


def _rate(row: dict[str, Any]) -> str:
    return format_value(row.get("rows_per_s", row.get("samples_per_s")), "rows/s")
