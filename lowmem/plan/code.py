"""The lines of code for a plan's recommended choice. They run when pasted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowmem.plan.result import Choice, Plan

_TABLE = """\
import torch
{import_line}
{rows_line}
table = torch.nn.Embedding(
    rows, {dim}, {sparse}dtype=torch.{dtype}, device="{device}"
)
opt = {optimizer}

for step in range(3):  # your loop
    ids = torch.randint(rows, ({batch},), device="{device}")  # your batch
    loss = table(ids).float().square().mean()  # your loss
    loss.backward()
    opt.step()
    opt.zero_grad()
{end}"""

_TABLE_OPTIMIZERS = {
    "Adam": "torch.optim.Adam(table.parameters(), lr=1e-3, fused=True)",
    "SparseAdam": "torch.optim.SparseAdam(table.parameters(), lr=1e-3)",
    "DSA": ("DSA(table.parameters(), lr=1e-3)  # directory=PATH keeps the store"),
}

_DENSE = """\
import torch
{import_line}
model = torch.nn.Sequential(  # your model
    torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
).to("{device}", torch.{dtype})
opt = {optimizer}

for step in range(3):  # your loop
    batch = torch.randn(32, 64, device="{device}", dtype=torch.{dtype})  # your batch
    loss = model(batch).float().square().mean()  # your loss
    loss.backward()
    opt.step()
    opt.zero_grad()
"""

_DENSE_OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
    "SlimAdamW": 'SlimAdamW(model.parameters(), lr=1e-3, model=model, rules="table1")',
}


def _warning(plan: Plan, furthest: Choice) -> str:
    asked, most = (
        f"{plan.rows:,} rows",
        f"THIS CODE IS FOR {furthest.most:,} ROWS, the most that fit.",
    )
    if plan.dim is None:
        asked, most = f"{plan.rows:,} parameters", f"The most that fit: {furthest.most:,}."
    return (
        f"# {asked} do not fit on {plan.machine.label}, not even with {furthest.name}:\n"
        f"# {furthest.verdict.removeprefix('no: ')}.\n"
        f"# {most}\n"
    )


def plan_code(plan: Plan) -> str:
    """Code for the recommended choice; where nothing fits, for the largest that would.

    That code begins with a comment which says that it is not what was asked for.
    Where even that is nothing, one comment line says so.
    """
    choice = plan.recommended
    rows = plan.rows
    warning = ""
    if choice is None:
        choice = plan.furthest
        rows = choice.most
        if rows == 0:
            return f"# {plan.sentence}\n"
        warning = _warning(plan, choice)
    ours = choice.name in ("DSA", "SlimAdamW")
    import_line = f"from lowmem import {choice.name}\n" if ours else ""
    if plan.dim is None:
        return warning + _DENSE.format(
            import_line=import_line,
            device=plan.weights,
            dtype=plan.dtype,
            optimizer=_DENSE_OPTIMIZERS[choice.name],
        )
    rows_line = f"rows = {rows:_}"
    if rows != plan.rows:
        rows_line += f"  # NOT {plan.rows:_}, which do not fit"
    return warning + _TABLE.format(
        import_line=import_line,
        rows_line=rows_line,
        dim=plan.dim,
        sparse="" if choice.name == "Adam" else "sparse=True, ",
        dtype=plan.dtype,
        device=plan.weights,
        batch=plan.batch,
        optimizer=_TABLE_OPTIMIZERS[choice.name],
        end="opt.close()\n" if choice.name == "DSA" else "",
    )
