"""Room for a benchmark: its folder, its disk space, and who fits in memory."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from lowmem import env
from lowmem.iocheck.scratch import scratch_folder

_PREFIX = "lowmem-bench-"
# Bytes a weight, in memory, while everything is hot: moments, and a dense gradient.
_HOT_BYTES = {"dsa": 8, "sparse-adam": 8, "memmap": 8, "memmap-random": 8, "adam": 12}
_NEEDED_FIRST = ("dsa", "sparse-adam", "memmap", "memmap-random", "adam")


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """A folder of this run's own, gone when the block is left, also by Ctrl-C or SIGTERM.

    Folders of runs that were killed are removed, too.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        with scratch_folder(Path(directory or Path.cwd()), _PREFIX) as folder:
            yield folder
    finally:
        if main:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def part(folder: Path, needed: int) -> Iterator[Path]:
    """A subfolder for one regime, after a look at the space; its files go with it."""
    free = shutil.disk_usage(folder).free
    if needed * 1.02 > free:
        raise OSError(
            f"{folder.parent}: this takes {needed / 1e9:.1f} GB of files and {free / 1e9:.1f} GB "
            "are free; choose another --directory, fewer --rows or other --regimes"
        )
    home = Path(tempfile.mkdtemp(dir=folder))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def that_fit(names: Sequence[str], rows: int, dim: int) -> tuple[list[str], list[str]]:
    """The contenders that can all be hot at once, and a sentence for each one that cannot."""
    available = env.available_memory_bytes()
    if available is None:
        return list(names), []
    room = 0.9 * available - 4 * rows * dim  # the weights
    kept, said = set(), []
    for name in _NEEDED_FIRST:
        needed = _HOT_BYTES[name] * rows * dim
        if name not in names:
            continue
        if needed <= room:
            kept.add(name)
            room -= needed
        else:
            said.append(
                f"{rows:,} × {dim}: {name} is left out, it needs {needed / 1e9:.1f} GB of memory "
                f"and {max(0.0, room) / 1e9:.1f} GB are left beside weights and the others"
            )
    return [name for name in names if name in kept], said
