"""Numba's cache of compiled kernels, kept in step with their sources.

Numba looks only at the file of the function that it compiles. A kernel that has a function
of another file compiled into it would stay as it was after a ``git pull`` that changes that
other file alone.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


def drop_stale(folder: Path) -> int:
    """Remove the cached kernels of ``folder`` that are older than its newest source.

    Returns:
        how many index files were removed; a folder that cannot be written keeps its own.
    """
    removed = 0
    with contextlib.suppress(OSError):
        newest = max((path.stat().st_mtime_ns for path in folder.glob("*.py")), default=0)
        for index in (folder / "__pycache__").glob("*.nbi"):
            with contextlib.suppress(OSError):
                if index.stat().st_mtime_ns < newest:
                    index.unlink()
                    removed += 1
    return removed
