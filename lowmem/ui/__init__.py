"""Widgets and live pictures, thin: everything they show is a result tested without them.

    from lowmem.ui import Live, Lines, HeatMap, io_check, planner

Nothing loads before it is used; ``io_check`` and ``planner`` need ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem.ui.live import HeatMap, Lines, Live, Recorder
    from lowmem.ui.memory import memory_now
    from lowmem.ui.pictures import Picture, bars, curves
    from lowmem.ui.second_moment import second_moment_explorer, second_moment_picture
    from lowmem.ui.widgets import io_check, planner

__all__ = [
    "HeatMap",
    "Lines",
    "Live",
    "Picture",
    "Recorder",
    "bars",
    "curves",
    "io_check",
    "memory_now",
    "planner",
    "second_moment_explorer",
    "second_moment_picture",
]

_HOMES = {
    "HeatMap": "lowmem.ui.live",
    "Lines": "lowmem.ui.live",
    "Live": "lowmem.ui.live",
    "Recorder": "lowmem.ui.live",
    "Picture": "lowmem.ui.pictures",
    "bars": "lowmem.ui.pictures",
    "curves": "lowmem.ui.pictures",
    "memory_now": "lowmem.ui.memory",
    "io_check": "lowmem.ui.widgets",
    "planner": "lowmem.ui.widgets",
    "second_moment_explorer": "lowmem.ui.second_moment",
    "second_moment_picture": "lowmem.ui.second_moment",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowmem.ui' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
