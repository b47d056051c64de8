"""What this process holds right now, for a live panel."""

from __future__ import annotations

import sys
from typing import Any


def memory_now(optimizer: Any = None) -> dict[str, float]:
    """Bytes by kind, measured: ``RAM``, ``page cache``, ``VRAM`` and ``disk`` where known.

    RAM is what the process cannot be robbed of (anonymous memory); the page cache is what
    it maps from files, which the system takes back when it needs it. ``disk`` is what
    ``optimizer.state_bytes()`` says.
    """
    out: dict[str, float] = {}
    try:
        with open("/proc/self/status") as file:
            fields = dict(line.split(":", 1) for line in file)
        out["RAM"] = int(fields["RssAnon"].split()[0]) * 1024
        out["page cache"] = int(fields["RssFile"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        out["VRAM"] = float(torch.cuda.memory_allocated())
    if optimizer is not None:
        out["disk"] = float(optimizer.state_bytes()["disk"])
    return out
