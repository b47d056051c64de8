"""Let a Stop button work while a callback runs.

A kernel handles one message at a time: while a Run button's callback works, the click on
Stop waits in the queue. ipykernel 6, which Colab has, lets us look into that queue.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

_DELIMITER = b"<IDS|MSG>"


def pump(kernel: Any | None = None) -> int:
    """Handle the widget messages that wait, leave all others in their order.

    Returns:
        How many were handled; 0 where the kernel does not allow it.
    """
    if kernel is None:
        kernel = _kernel()
    queue = getattr(kernel, "msg_queue", None)
    stream = getattr(kernel, "shell_stream", None)
    if queue is None or stream is None:
        return 0
    stream.flush()
    waiting = []
    while True:
        try:
            waiting.append(queue.get_nowait())
        except asyncio.QueueEmpty:
            break
        except Exception:  # another version's queue with another signal for empty
            break
    handled = 0
    for item in waiting:
        args = item[-1]
        if args and message_type(args[0]) == "comm_msg":
            _handle(kernel, stream, args[0])
            handled += 1
        else:
            queue.put_nowait(item)
    return handled


def message_type(frames: Any) -> str:
    """The type of a message in wire form, or an empty string."""
    try:
        raw = [bytes(getattr(frame, "buffer", frame)) for frame in frames]
        header = json.loads(raw[raw.index(_DELIMITER) + 2])
        return str(header["msg_type"])
    except (TypeError, ValueError, KeyError, IndexError):
        return ""


def _handle(kernel: Any, stream: Any, frames: Any) -> None:
    idents, rest = kernel.session.feed_identities(frames, copy=False)
    message = kernel.session.deserialize(rest, content=True, copy=False)
    kernel.shell_handlers["comm_msg"](stream, idents, message)


def _kernel() -> Any | None:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    return getattr(get_ipython(), "kernel", None)
