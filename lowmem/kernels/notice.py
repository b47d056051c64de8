"""One line before numba compiles the kernels of a step, which takes seconds to a minute.

It comes once for a machine and a version: afterwards they are in numba's cache. Whether they
are is asked of numba, which knows, and not of the cache's files, which may be of another
numba, another processor or an older source.
"""

from __future__ import annotations

import logging
from typing import Any

from numba.core import event

log = logging.getLogger(__name__)


class _Listener(event.Listener):
    """Hears of every function that numba compiles because its cache does not have it."""

    def __init__(self) -> None:
        self.optimizers: dict[str, str] = {}  # of a module whose kernels are worth a line
        self.told: set[str] = set()

    def on_start(self, started: Any) -> None:
        module = started.data["dispatcher"].py_func.__module__
        optimizer = self.optimizers.get(module)
        if optimizer is None or optimizer in self.told:
            return
        self.told.add(optimizer)
        log.warning(
            "lowmem compiles its kernels for %s, once per machine and version; this takes up to "
            "a minute",
            optimizer,
        )

    def on_end(self, ended: Any) -> None:
        pass


_listener = _Listener()
event.register("numba:compile", _listener)


def announce(module: str, optimizer: str) -> None:
    """Say so in one line when kernels of ``module`` are compiled, once for each optimizer.

    To be called before they are defined. For those that every step needs: others are few and
    take a moment.
    """
    _listener.optimizers[module] = optimizer
