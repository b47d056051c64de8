"""Who may change rows now: one thread at a time, and nobody after the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowmem.dsa.estate import Estate

CLOSED = "this DSA is closed; make a new one with mode='resume' to go on"


class ClosedError(RuntimeError):
    """What was asked for came after the end."""


class Changing:
    """While rows and weights change. A class, not a generator: this runs at every step."""

    __slots__ = ("_estate",)

    def __init__(self, estate: Estate) -> None:
        self._estate = estate

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._estate.half_done = True


class Busy:
    """A lock that the thread which holds it cannot take again, and nobody once it is ``over``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self.over = False
        self.at_end: Callable[[], None] | None = None

    def inside(self) -> bool:
        """Whether this thread, in code that a signal interrupted, is in the block already."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        if self.inside():
            raise RuntimeError(
                "this DSA is in the middle of a step or a commit, which a signal handler "
                "interrupted. Set a flag in the handler, and commit when the step is done"
            )
        self._lock.acquire()
        if self.over:
            self._lock.release()
            raise ClosedError(CLOSED)
        self._owner = threading.get_ident()

    def __exit__(self, *exception: object) -> None:
        self._owner = 0
        self._lock.release()
        if self.at_end is not None:
            action, self.at_end = self.at_end, None
            action()
