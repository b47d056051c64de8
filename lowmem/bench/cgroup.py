"""A memory limit for this process and its page cache, by a Linux control group.

A process enters for good: what it has allocated before stays with its old group, what it
touches from then on, pages of files included, counts against the limit. So a benchmark
does this in a child process, and the parent removes the group when the child has ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_PREFIX = "lowmem-bench-"


def unavailable() -> str:
    """Empty where a group can be made, else the reason in words."""
    root = _root()
    if root is None:
        return "this system has no memory control groups"
    if not os.access(root, os.W_OK):
        return f"{root} cannot be written: making a control group takes root"
    return ""


def _root() -> Path | None:
    if (V1 / "memory.limit_in_bytes").exists():
        return V1
    controllers = V2 / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return V2
    return None


@contextlib.contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """A new group with ``limit`` bytes of memory and no swap; removed when the block is left.

    Raises:
        OSError: no group can be made; the message says why.
    """
    reason = unavailable()
    root = _root()
    if reason or root is None:
        raise OSError(reason)
    _sweep(root)
    group = root / f"{_PREFIX}{os.getpid()}"
    group.mkdir()
    try:
        if root == V1:
            (group / "memory.limit_in_bytes").write_text(str(limit))
            with contextlib.suppress(OSError):
                (group / "memory.swappiness").write_text("0")
        else:
            if not (group / "memory.max").exists():
                (root / "cgroup.subtree_control").write_text("+memory")
            (group / "memory.max").write_text(str(limit))
            with contextlib.suppress(OSError):
                (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        _remove(group)


def enter(group: Path) -> None:
    """Put this process and all its threads into the group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _remove(group: Path) -> None:
    for _ in range(50):  # a process that has just ended is still counted for a moment
        try:
            group.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.1)


def _sweep(root: Path) -> None:
    """Remove empty groups that a killed benchmark left behind."""
    for group in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            group.rmdir()
