"""Hold back Ctrl-C while something must not be left half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Ctrl-C that comes inside the block is raised at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python raises KeyboardInterrupt in the main thread only
        return
    pending: list[FrameType | None] = []
    before = signal.getsignal(signal.SIGINT)
    if before is None:  # a handler that was not installed from Python
        yield
        return
    signal.signal(signal.SIGINT, lambda _number, frame: pending.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending and callable(before):
        before(signal.SIGINT, pending[-1])
