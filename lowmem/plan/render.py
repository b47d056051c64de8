"""A plan as text and as HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from lowmem.plan.machine import RESOURCE_NAMES
from lowmem.units import short_bytes, short_count

if TYPE_CHECKING:
    from lowmem.plan.result import Plan


def _rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    unit = "parameters" if plan.dim is None else "rows"
    header = ["", *(RESOURCE_NAMES[r] for r in plan.resources), f"most {unit}", "here"]
    body = []
    for choice in plan.choices:
        mark = "→ " if choice is plan.recommended else ""
        sizes = [short_bytes(choice.total(r)) for r in plan.resources]
        body.append([mark + choice.name, *sizes, short_count(choice.most), choice.verdict])
    limits = [short_bytes(plan.machine.limit(r)) for r in plan.resources]
    body.append([f"{plan.machine.label} has", *limits, "", ""])
    return header, body


def _details(plan: Plan) -> list[str]:
    lines = []
    if plan.page_cache is not None and plan["DSA"].fits:
        uniform, zipf = plan.cached_share["uniform"], plan.cached_share["zipf"]
        lines.append(
            f"DSA leaves {short_bytes(plan.page_cache)} for the page cache: "
            f"{uniform:.0%} of uniform and {zipf:.0%} of Zipf(1.05) row accesses come from memory."
        )
    lines += plan.notes
    if plan.machine.note:
        lines.append(f"{plan.machine.name}: {plan.machine.note}.")
    return lines


def plan_text(plan: Plan) -> str:
    """A table with one line a choice, the advice, and what the figures leave out."""
    header, body = _rows(plan)
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]
    lines = [plan.title, ""]
    for number, row in enumerate([header, *body]):
        first, *middle, last = row
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([*cells, last]).rstrip())
        if number in (0, len(body) - 1):
            lines.append("─" * (sum(widths) + 2 * len(widths) - 2))
    lines += ["", plan.sentence, "", *_details(plan)]
    return "\n".join(lines).rstrip()


# Notebook themes are light or dark: borders and marks carry the meaning, no background does.
_CELL = "padding:4px 10px;border-bottom:1px solid #8888;text-align:"


def plan_html(plan: Plan) -> str:
    """The same as ``plan_text`` as a table for a notebook."""
    header, body = _rows(plan)
    head = "".join(
        f'<th scope="col" style="{_CELL}{_align(i, len(header))}">{escape(cell)}</th>'
        for i, cell in enumerate(header)
    )
    rows = []
    for number, row in enumerate(body):
        chosen = number < len(plan.choices) and plan.choices[number] is plan.recommended
        weight = "bold" if chosen else "normal"
        cells = "".join(
            f'<{"th scope=row" if i == 0 else "td"} style="{_CELL}{_align(i, len(row))};'
            f'font-weight:{weight}">{escape(cell)}</{"th" if i == 0 else "td"}>'
            for i, cell in enumerate(row)
        )
        rows.append(f"<tr>{cells}</tr>")
    details = "".join(f"<li>{escape(line)}</li>" for line in _details(plan))
    return (
        '<div class="lowmem-plan" style="max-width:960px">'
        '<table style="border-collapse:collapse;font-variant-numeric:tabular-nums">'
        f'<caption style="text-align:left;padding:4px 10px">{escape(plan.title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f'<p style="margin:8px 10px"><b>{escape(plan.sentence)}</b></p>'
        f'<ul style="margin:0 10px;font-size:90%">{details}</ul></div>'
    )


def _align(column: int, columns: int) -> str:
    return "left" if column in (0, columns - 1) else "right"
