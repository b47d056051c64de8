"""Disk space: enough of it, and reserved before it is needed."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def require_space(folder: Path, needed: int) -> None:
    """Raise ``OSError`` with both figures when ``folder`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the store needs {needed:,} bytes and {free:,} are free; choose another "
            "directory= or fewer rows",
            str(folder),
        )


def reserve(file: int, size: int, folder: Path) -> None:
    """Give the file ``size`` bytes of the disk, so that writing to its map cannot fail."""
    if not hasattr(os, "posix_fallocate"):
        os.ftruncate(file, size)
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            require_space(folder, size)
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            # Some network file systems cannot reserve. Writing zeros is the honest way.
            zeros = bytes(1 << 20)
            for start in range(0, size, len(zeros)):
                part = zeros[: size - start]
                if os.pwrite(file, part, start) < len(part):
                    require_space(folder, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
            return
        raise OSError(
            error.errno, f"{error.strerror} while reserving {size:,} bytes", str(folder)
        ) from error
