"""Hold back Ctrl-C while something must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# Python's own wrappers of these two turn numbers into enums, which takes longer than the
# calls; this runs at every step.
_get = getattr(signal, "_signal", signal).getsignal
_set = getattr(signal, "_signal", signal).signal
_SIGINT = int(signal.SIGINT)
_MAIN = threading.main_thread


class whole:
    """Ctrl-C that comes inside the block is raised at its end."""

    __slots__ = ("_before", "_pending")

    def __enter__(self) -> None:
        self._pending: list[FrameType | None] = []
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        # Python raises KeyboardInterrupt in the main thread only.
        if threading.get_ident() == _MAIN().ident:
            before = _get(_SIGINT)
            if before is not None:  # None: a handler that was not installed from Python
                _set(_SIGINT, self._note)
                self._before = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(frame)

    def __exit__(self, *exception: object) -> None:
        before = self._before
        if before is None:
            return
        _set(_SIGINT, before)
        if self._pending and callable(before):
            before(_SIGINT, self._pending[-1])
        elif self._pending and before == signal.SIG_DFL:
            signal.raise_signal(_SIGINT)  # the process ends, as it would have ended before
