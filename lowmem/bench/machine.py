"""The machine as a benchmark sees it: facts for the record, and its memory bandwidth.

The bandwidth is measured in the same run as the contenders, with the same threads, so
that "share of the memory's bandwidth" compares like with like.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np

from lowmem import env
from lowmem.kernels.threads import run_parallel, thread_count


@numba.njit(
    nogil=True,
    cache=True,
    error_model="numpy",
    fastmath={"reassoc", "nsz", "contract"},
)
def _read(a: np.ndarray) -> np.float32:
    total = np.float32(0)
    for i in range(a.size):
        total += a[i]
    return total


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _write(a: np.ndarray, value: np.float32) -> None:
    for i in range(a.size):
        a[i] = value


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _update(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    for i in range(a.size):
        a[i] += b[i] * c[i]


def last_cache_bytes() -> int | None:
    """Size of the largest cache level of CPU 0 in bytes, or ``None`` where nobody says."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes, default=None)


def memory_bandwidth(bytes_per_array: int | None = None, repeats: int = 5) -> dict[str, float]:
    """Bytes per second between memory and the cores, with the kernels' own threads.

    Three patterns: ``read`` (a sum), ``write`` (a fill; the traffic that reads a line before
    it is written is not counted), ``update`` (``a += b * c``: three reads and a write, the
    mix of an optimizer step). The best of ``repeats`` passes each, as a limit should be.

    Args:
        bytes_per_array: Size of each of the three arrays. Default: twice the last cache, but
            at least 256 MiB and never over an eighth of the free memory.
    """
    if bytes_per_array is None:
        bytes_per_array = max(256 << 20, 2 * (last_cache_bytes() or 0))
        free = env.available_memory_bytes()
        if free is not None:
            bytes_per_array = min(bytes_per_array, free // 8)
    size = max(1, bytes_per_array // 4)
    arrays = [np.ones(size, np.float32) for _ in range(3)]
    threads = thread_count()
    edges = [size * number // threads for number in range(threads + 1)]
    parts = [[array[low:high] for array in arrays] for low, high in pairwise(edges)]
    result = {}
    for name, function, calls, traffic in (
        ("read", _read, [(a,) for a, _, _ in parts], 4 * size),
        ("write", _write, [(a, np.float32(1)) for a, _, _ in parts], 4 * size),
        ("update", _update, [tuple(part) for part in parts], 16 * size),
    ):
        best = float("inf")
        for _ in range(repeats + 1):
            began = time.perf_counter()
            run_parallel(function, calls)
            best = min(best, time.perf_counter() - began)
        result[f"{name}_bytes_per_s"] = traffic / best
    result["bandwidth_array_bytes"] = float(4 * size)
    return result


def file_system(directory: str | os.PathLike[str]) -> str | None:
    """Type of the file system that holds ``directory`` (``ext4``, ``tmpfs`` …), if anyone says."""
    path = os.path.realpath(directory)
    best, kind = "", None
    try:
        with open("/proc/self/mountinfo") as file:
            for line in file:
                fields = line.split()
                mount = fields[4].replace("\\040", " ")
                inside = path == mount or path.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= len(best):
                    best, kind = mount, fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        return None
    return kind


def describe(
    directory: str | os.PathLike[str] | None = None, *, bandwidth: bool = True, quick: bool = False
) -> dict[str, Any]:
    """Everything that belongs beside a figure: ``env.report()``, cache, file system, bandwidth.

    Args:
        directory: Where the benchmark keeps its files; its file system's type is recorded,
            never its name. ``None`` for a benchmark without files.
        bandwidth: Measure the memory bandwidth now (about two seconds; less with ``quick``).
    """
    facts: dict[str, Any] = dict(env.report())
    facts["kernel_threads"] = thread_count()
    facts["last_cache_bytes"] = last_cache_bytes()
    facts["file_system"] = file_system(directory) if directory is not None else None
    if bandwidth:
        facts |= memory_bandwidth(128 << 20 if quick else None, repeats=3 if quick else 5)
    return facts
