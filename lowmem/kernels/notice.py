"""While numba compiles our kernels: one line that says so, and no lost Ctrl-C.

Compiling takes seconds to a minute. The line comes once for a machine and a version:
afterwards the kernels are in numba's cache. Whether they are is asked of numba, which knows,
and not of the cache's files, which may be of another numba, another processor or an older
source.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from numba.core import event

from lowmem import interrupts

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


class _Shield(event.Listener):
    """Holds Ctrl-C back while numba compiles one of our kernels, and raises it then.

    LLVM calls back into Python, from where no exception comes out: it would be printed and
    forgotten, and the kernel that was to be noted there be missing.
    """

    def __init__(self) -> None:
        # One entry a compilation, since one kernel calls another; numba ends what it started.
        self._held: list[tuple[Any, interrupts.whole]] = []

    def on_start(self, started: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # where no Ctrl-C arrives
        if started.data["dispatcher"].py_func.__module__.startswith("lowmem."):
            held = interrupts.whole()
            self._held.append((started.data, held))
            held.__enter__()

    def on_end(self, ended: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._held and self._held[-1][0] is ended.data:
            self._held.pop()[1].__exit__()


_listener = _Listener()
event.register("numba:compile", _listener)
event.register("numba:compile", _Shield())


def announce(module: str, optimizer: str) -> None:
    """Say so in one line when kernels of ``module`` are compiled, once for each optimizer.

    To be called before they are defined. For those that every step needs: others are few and
    take a moment.
    """
    _listener.optimizers[module] = optimizer


def compiled() -> bool:
    """Whether a kernel that every step needs was compiled in this process, not loaded."""
    return bool(_listener.told)
