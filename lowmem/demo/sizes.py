"""How large a table this machine can train, and where."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lowmem import env

ROWS, DIM = 10_000_000, 128

_RAM_ASIDE = 3 << 30  # for torch, the graph, a batch, and the page cache of the store
_VRAM_ASIDE = 1 << 30
_DISK_ASIDE = 1 << 30


@dataclass(frozen=True)
class Size:
    """What to train, where, and why it is not the usual size (empty if it is)."""

    rows: int
    dim: int
    device: str
    why: str

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.dim * 4

    @property
    def state_bytes(self) -> int:
        return self.weight_bytes * 2


def choose_size(
    rows: int | None,
    dim: int | None,
    directory: Path,
    *,
    default_rows: int = ROWS,
    default_dim: int = DIM,
    least_rows: int = 1,
) -> Size:
    """The table to train: as asked for, or the usual one, or the largest that this machine holds.

    Args:
        rows, dim: as asked for; None for the default.
        directory: where the store will be; its nearest parent that exists is measured.
        least_rows: fewer than these are of no use: the entities of the graph.

    Raises:
        ValueError: what was asked for does not fit, or not even ``least_rows`` do; the message
            says by how much.
    """
    import torch  # here, so that a wrong --rows is told at once

    dim = default_dim if dim is None else dim
    wanted = max(default_rows, least_rows) if rows is None else rows
    if wanted < least_rows:
        raise ValueError(
            f"the graph has {least_rows:,} entities but the table only {wanted:,} rows; "
            f"raise --rows to at least {least_rows:,}"
        )
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    limits = [
        ("disk space", shutil.disk_usage(place).free, _DISK_ASIDE, dim * 8, f"free in {place}")
    ]
    device = "cpu"
    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
        if free - _VRAM_ASIDE >= wanted * dim * 4:
            device = "cuda"
    if device == "cpu":
        memory = env.available_memory_bytes() or env.total_memory_bytes()
        if memory is not None:
            limits.append(("memory", memory, _RAM_ASIDE, dim * 4, "available"))

    fit, why = wanted, ""
    for what, have, aside, row_bytes, where in limits:
        need = wanted * row_bytes
        if have - aside >= need:
            continue
        most = max(0, int(have - aside) // row_bytes)
        if most < fit:
            fit = most
            why = (
                f"{wanted:,} rows of {dim} need {need / 1e9:.2f} GB of {what} and "
                f"{aside / 1e9:.1f} GB to spare; {have / 1e9:.2f} GB are {where}"
            )
    if rows is not None and fit < rows:
        raise ValueError(f"{why}; try --rows {max(fit, 1):,} or fewer, or a smaller --dim")
    if fit < least_rows:
        raise ValueError(f"{why}; the graph's {least_rows:,} entities need a smaller --dim")
    if fit < wanted:
        fit = max(least_rows, fit // 100_000 * 100_000)
        why = f"a smaller table, {fit:,} rows: {why}"
    return Size(fit, dim, device, why)
