"""While numba compiles or loads our kernels: one line that says so, and no lost Ctrl-C.

Compiling takes seconds to a minute. The line comes once for a machine and a version:
afterwards the kernels are in numba's cache. Whether they are is asked of numba, which knows,
and not of the cache's files, which may be of another numba, another processor or an older
source.
"""

from __future__ import annotations

import logging
import sys
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
    """Holds Ctrl-C back until a kernel is ready, and raises it then.

    LLVM calls back into Python, from where no exception comes out: it would be printed and
    forgotten, and the kernel that was to be noted there be missing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._held: interrupts.whole | None = None

    def on_start(self, started: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # where no Ctrl-C arrives
        self._depth += 1
        if self._depth == 1 and _for_us():
            self._held = interrupts.whole()
            self._held.__enter__()

    def on_end(self, ended: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0 and self._held is not None:
            held, self._held = self._held, None
            held.__exit__()


def _for_us() -> bool:
    """Whether what numba is about to do was asked for by this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("lowmem.") and name != __name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_listener = _Listener()
event.register("numba:compile", _listener)
event.register("numba:compiler_lock", _Shield())


def announce(module: str, optimizer: str) -> None:
    """Say so in one line when kernels of ``module`` are compiled, once for each optimizer.

    To be called before they are defined. For those that every step needs: others are few and
    take a moment.
    """
    _listener.optimizers[module] = optimizer
