"""The folder and the data of a check: made before anything is timed, removed whatever happens."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("lowmem.iocheck")

MEBIBYTE = 1 << 20
MIN_FREE_BYTES = 64 * MEBIBYTE
_PREFIX = ".lowmem-iocheck-"


def random_pool(seed: int | None = None, mebibytes: int = 16) -> NDArray[np.uint32]:
    """Incompressible words that are also sound moments: every one a float32 from 2**-63 to 2.

    29 of each word's 32 bits are random, and the writer changes every page a little, so
    neither compression nor deduplication finds much.
    """
    words = np.random.default_rng(seed).integers(0, 1 << 32, mebibytes << 18, np.uint32)
    words &= np.uint32(0x3FFFFFFF)
    words |= np.uint32(0x20000000)
    return words


def check_directory(directory: str | os.PathLike[str]) -> Path:
    """The directory as a path; an ``OSError`` that says what to do where it cannot be used."""
    path = Path(directory).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT,
            "there is no such directory: make it or name another",
            str(path),
        )
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "name a directory to check, not a file", str(path))
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        raise OSError(
            errno.ENOSPC,
            f"too little space for a check: {free / 1e6:.0f} MB free, "
            f"at least {MIN_FREE_BYTES / 1e6:.0f} MB are needed",
            str(path),
        )
    return path


@contextlib.contextmanager
def scratch_folder(directory: Path, prefix: str = _PREFIX) -> Iterator[Path]:
    """A folder of this process's own inside ``directory``, gone when the block is left.

    Folders with this ``prefix`` that a killed process left behind are removed, too.
    """
    _remove_left_behind(directory, prefix)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=directory))
    except PermissionError as error:
        raise PermissionError(
            errno.EACCES,
            "no permission to write: name a directory of your own",
            str(directory),
        ) from error
    except OSError as error:
        raise OSError(
            error.errno, f"nothing can be written here ({error.strerror})", str(directory)
        ) from error
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder even if Ctrl-C comes while it goes."""
    for attempt in range(5):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            return
        except KeyboardInterrupt:
            if attempt == 4:
                raise
        except OSError as error:
            _log.warning("could not remove %s: %s", folder, error)
            return


def _remove_left_behind(directory: Path, prefix: str) -> None:
    for folder in directory.glob(prefix + "*"):
        match = re.match(re.escape(prefix) + r"(\d+)-", folder.name)
        if match and folder.is_dir() and not _alive(int(match.group(1))):
            _log.info("removing %s, left by a process that was killed", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
