"""One piece of work behind a Run and a Stop button: progress, stop, result or error.

No widgets in here. On Colab the work runs in the button's callback, because a thread's
updates do not show there; elsewhere it runs in a thread, because that leaves the kernel
free to hear Stop.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from lowmem import env
from lowmem.ui.pump import pump

logger = logging.getLogger(__name__)

OnProgress = Callable[[float, str], None]
ShouldStop = Callable[[], bool]
Work = Callable[[OnProgress, ShouldStop], Any]

# A click that waited in the queue arrives the moment that the work ends.
_DEAF_SECONDS = 0.4
_UPDATE_SECONDS = 0.1


class Task:
    """Runs ``work`` once at a time.

    Args:
        on_progress: called with a fraction and a message, at most ten times a second.
        on_result: called with what the work returned, also after a stop.
        on_error: called with one sentence.
        on_running: called with True at the start and False at the end.
        threaded: in a thread of its own, or in the caller's; by default what the host needs.
    """

    def __init__(
        self,
        on_progress: OnProgress,
        on_result: Callable[[Any], None],
        on_error: Callable[[str], None],
        on_running: Callable[[bool], None],
        threaded: bool | None = None,
    ) -> None:
        self._on_progress = on_progress
        self._on_result = on_result
        self._on_error = on_error
        self._on_running = on_running
        self._threaded = env.host() != "colab" if threaded is None else threaded
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = -_DEAF_SECONDS
        self._updated = 0.0

    @property
    def running(self) -> bool:
        return self._lock.locked()

    def start(self, work: Work) -> bool:
        """Run ``work(on_progress, should_stop)``; False where one runs already."""
        if not self._lock.acquire(blocking=False):
            return False
        if time.monotonic() - self._ended < _DEAF_SECONDS:
            self._lock.release()
            return False
        self._stop.clear()
        self._updated = 0.0
        try:
            self._on_running(True)
            if self._threaded:
                self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
                self._thread.start()
                return True
        except BaseException:
            self._lock.release()
            raise
        self._run(work)
        return True

    def stop(self) -> None:
        """Ask the work to end; it keeps what it has."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> None:
        """Until the work in a thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, work: Work) -> None:
        try:
            self._on_result(work(self._progress, self._should_stop))
        except KeyboardInterrupt:
            self._on_error("Stopped before anything was measured.")
        except Exception as error:
            logger.debug("work failed", exc_info=True)
            self._on_error(sentence(error))
        finally:
            self._ended = time.monotonic()
            with contextlib.suppress(Exception):
                self._on_running(False)
            self._lock.release()

    def _progress(self, fraction: float, message: str) -> None:
        now = time.monotonic()
        if now - self._updated >= _UPDATE_SECONDS or fraction >= 1:
            self._updated = now
            self._on_progress(min(1.0, max(0.0, fraction)), message)

    def _should_stop(self) -> bool:
        if not self._threaded:
            pump()
        return self._stop.is_set()


def sentence(error: BaseException) -> str:
    """An error as one sentence for a person, without a traceback."""
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename is not None else "")
    elif isinstance(error, (ValueError, TypeError, OSError)) and str(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
