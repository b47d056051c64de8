"""Where am I: Colab, Kaggle, Jupyter or plain Python; smoke runs; a report for bug reports."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from datetime import UTC, datetime
from typing import Literal

Host = Literal["colab", "kaggle", "jupyter", "plain"]


def host() -> Host:
    """The kind of place that this process runs in."""
    if "COLAB_RELEASE_TAG" in os.environ or "google.colab" in sys.modules:
        return "colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "kaggle"
    if "ipykernel" in sys.modules:
        return "jupyter"
    return "plain"


def smoke() -> bool:
    """True when ``LOWMEM_SMOKE`` asks for the smallest run that still touches everything."""
    return os.environ.get("LOWMEM_SMOKE", "0") not in ("", "0")


def total_memory_bytes() -> int | None:
    """RAM that this process may use in bytes: the machine's, or its cgroup's limit if smaller."""
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = _cgroup_value("memory.max", "memory.limit_in_bytes")
    if limit is not None:
        limits.append(limit)
    return min(limits) if limits else None


def available_memory_bytes() -> int | None:
    """RAM in bytes that can still be taken without swapping; ``None`` where nobody says."""
    available = None
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit = _cgroup_value("memory.max", "memory.limit_in_bytes")
    if limit is not None:
        total = total_memory_bytes()
        if total is not None and limit <= total:
            # What the group uses counts its page cache, which it can give back.
            used = _resident_bytes() or 0
            room = max(0, limit - used)
            available = room if available is None else min(available, room)
    return available


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _cgroup_value(v2_name: str, v1_name: str) -> int | None:
    """A limit of this process's own memory cgroup (version 2 or 1), or ``None`` for no limit."""
    try:
        with open("/proc/self/cgroup") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    paths = []
    for _, controllers, path in entries:
        if controllers == "":
            paths += [f"/sys/fs/cgroup{path}/{v2_name}", f"/sys/fs/cgroup/{v2_name}"]
        elif "memory" in controllers.split(","):
            paths += [f"/sys/fs/cgroup/memory{path}/{v1_name}", f"/sys/fs/cgroup/memory/{v1_name}"]
    for candidate in paths:
        try:
            with open(candidate) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


# Where changed data comes to rest between the background threshold and the limit: writers are
# slowed from the middle on, and meet the writing between that and three quarters.
_AT_REST = 0.625


def waiting_bytes() -> int | None:
    """How much changed data waits to be written in a long run; ``None`` where nobody says.

    Linux gives its two thresholds for this moment's memory in ``/proc/vmstat``.
    """
    counts = vmstat()
    low, high = counts.get("nr_dirty_background_threshold"), counts.get("nr_dirty_threshold")
    if not low or not high:
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * waiting_share(low, high))


def waiting_share(background: float = 0.1, limit: float = 0.2) -> float:
    """The same as a share of the memory that pages can have, or in whatever the two are in.

    ``background`` and ``limit`` are Linux's ``vm.dirty_background_ratio`` and
    ``vm.dirty_ratio``, by default as the kernel comes.
    """
    if background >= limit:
        background = limit / 2  # Linux's own rule
    return background + _AT_REST * (limit - background)


def own_waiting_share() -> float:
    """``waiting_share`` by this system's own settings, in so far as it tells them."""
    memory = available_memory_bytes() or 1 << 62

    def setting(name: str, usual: float) -> float:
        try:
            fixed = _setting(f"{name}_bytes")
            return fixed / memory if fixed else _setting(f"{name}_ratio") / 100
        except (OSError, ValueError):
            return usual

    return min(1.0, waiting_share(setting("dirty_background", 0.1), setting("dirty", 0.2)))


def vmstat() -> dict[str, int]:
    """The system's counts of pages, by Linux's names; empty where there are none."""
    try:
        with open("/proc/vmstat") as file:
            return {name: int(value) for name, value in (line.split() for line in file)}
    except (OSError, ValueError):
        return {}


def _setting(name: str) -> int:
    with open(f"/proc/sys/vm/{name}") as file:
        return int(file.read())


def cpu_name() -> str:
    """The processor's own name, as people quote it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def report() -> dict[str, str | int | None]:
    """Machine, versions and date: what belongs beside every measured figure and in a bug report."""
    import torch

    facts: dict[str, str | int | None] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "host": host(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": total_memory_bytes(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }
    for name in ("lowmem", "torch", "numpy", "numba"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = None
    return facts
