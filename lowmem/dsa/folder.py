"""The folder of an optimizer's stores: who holds it, and what kind of disk it is on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import IO, Literal

from lowmem.dsa.store import StoreError

log = logging.getLogger(__name__)

Mode = Literal["create", "resume", "overwrite", "resume-unclean"]
SCRATCH_PREFIX = "lowmem-scratch-"
_RAM_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
_held: set[tuple[int, int, int]] = set()  # (process, device, inode) of lock files held


class StoreFolder:
    """An existing folder, locked for this process, in which ``table-NNN.rows`` files live.

    Args:
        directory: kept after close; ``None`` makes a scratch folder in the working
            directory, which close removes.
        mode: ``"create"`` refuses a folder that already holds a store, ``"resume"`` one
            that holds none.

    Raises:
        FileExistsError, FileNotFoundError: the folder's state does not suit ``mode``.
        StoreError: another optimizer or process holds the folder.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, mode: Mode) -> None:
        self.scratch = directory is None
        if directory is None:
            _sweep_scratch(Path.cwd())
            self.path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=Path.cwd()))
        else:
            self.path = Path(directory).expanduser().absolute()
            if mode.startswith("resume") and not self.path.is_dir():
                raise FileNotFoundError(
                    errno.ENOENT, f'mode="{mode}" found no folder of stores', str(self.path)
                )
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = None
        self._lock = acquire_lock(self.path / "LOCK")
        try:
            stores = self.stores()
            if mode == "create" and stores:
                raise FileExistsError(
                    errno.EEXIST,
                    f'the folder holds {len(stores)} store(s) already; use mode="resume" to go on '
                    'with them or mode="overwrite" to start anew',
                    str(self.path),
                )
            if mode.startswith("resume") and not stores and not self._has_record():
                raise FileNotFoundError(
                    errno.ENOENT, f'mode="{mode}" found no store in the folder', str(self.path)
                )
            kind = file_system(self.path)
            if kind in _RAM_FILE_SYSTEMS:
                warnings.warn(
                    f"{self.path} is on a RAM-backed file system ({kind}): the moments will take "
                    "memory there, not disk. Choose a directory= on a disk",
                    stacklevel=3,
                )
        except BaseException:
            self.release()
            raise

    def table_path(self, number: int) -> Path:
        return self.path / f"table-{number:03d}.rows"

    def stores(self) -> dict[int, Path]:
        """The stores in the folder by their number."""
        found = {}
        for path in sorted(self.path.glob("table-*.rows")):
            number = path.name[len("table-") : -len(".rows")]
            if number.isascii() and number.isdigit() and len(number) < 10:
                found[int(number)] = path
        return found

    def _has_record(self) -> bool:
        """Whether a commit was made here, be it before the first store was."""
        return any((self.path / name).exists() for name in ("COMMIT.json", "COMMIT.next"))

    def number(self, path: Path) -> int:
        """The number in a store's name."""
        return int(path.name[len("table-") : -len(".rows")])

    def remove(self, number: int) -> None:
        """Remove a store and what belongs to it."""
        for suffix in (".rows", ".undo", ".sums", ".rows.new", ".undo.new", ".sums.new"):
            self.table_path(number).with_suffix(suffix).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every store and the commit record. The record goes last but for the rows."""
        self.drop_journals()
        for number in self.stores():
            self.remove(number)

    def drop_journals(self) -> None:
        """Forget the last commit: what is there can no longer come back to it."""
        for name in ("COMMIT.json", "COMMIT.next"):
            (self.path / name).unlink(missing_ok=True)
        for pattern in ("table-*.undo", "table-*.sums"):
            for path in self.path.glob(pattern):
                path.unlink()

    def forget_manifest(self) -> None:
        """The rows of an export are about to change: its manifest no longer fits them."""
        (self.path / "MANIFEST.json").unlink(missing_ok=True)

    def release(self) -> None:
        """Give up the lock, and remove a scratch folder."""
        if self._lock is None:
            return
        if self.scratch:
            # While the lock is still held, so that nobody sweeps or takes it in between.
            shutil.rmtree(self.path, ignore_errors=True)
        release_lock(self._lock, self.path / "LOCK")
        self._lock = None


def acquire_lock(path: Path) -> IO[str]:
    # Looked up before the file is opened: closing any handle of a file gives up this
    # process's POSIX lock on it.
    if path.exists() and (os.getpid(), *_key(os.stat(path))) in _held:
        raise StoreError(
            f"{path.parent} is held by another optimizer of this process; close() it first"
        )
    lock = open(path, "a+")  # noqa: SIM115 - held open as long as the folder is
    try:
        holder = _holder(lock)
        if not _try_lock(lock):
            raise StoreError(
                f"{path.parent} is held by another process (pid {holder}); stop it, or choose "
                "another directory="
            )
    except BaseException:
        lock.close()
        raise
    if not path.exists() or _key(os.stat(path)) != _key(os.fstat(lock.fileno())):
        # Its last holder removed it between our opening and our locking it.
        lock.close()
        return acquire_lock(path)
    _held.add((os.getpid(), *_key(os.fstat(lock.fileno()))))
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock


def release_lock(lock: IO[str], path: Path) -> None:
    _held.discard((os.getpid(), *_key(os.fstat(lock.fileno()))))
    with contextlib.suppress(OSError):
        os.unlink(path)
    lock.close()


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _holder(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read(32).strip() or "unknown"


def _try_lock(lock: IO[str]) -> bool:
    """Lock the file for this process. The system frees it when the process dies, however."""
    try:
        if sys.platform == "win32":
            import msvcrt

            lock.seek(1 << 20)  # a byte that nobody reads, so that the pid stays readable
            msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        log.warning(
            "%s cannot be locked (%s); a second process would go unnoticed", lock.name, error
        )
    return True


def _sweep_scratch(folder: Path) -> None:
    """Remove scratch folders whose process died without removing them."""
    for path in folder.glob(f"{SCRATCH_PREFIX}*"):
        lock_path = path / "LOCK"
        if not lock_path.exists():
            continue
        with contextlib.suppress(OSError):
            lock = acquire_lock(lock_path)
            shutil.rmtree(path, ignore_errors=True)
            release_lock(lock, lock_path)
            log.info("removed %s, left behind by a process that died", path)


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path`` (``"ext4"``, ``"tmpfs"``, …), or ``""``."""
    best, kind = -1, ""
    try:
        target = str(path.resolve())
        with open("/proc/self/mountinfo") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                mount = left.split()[4].encode().decode("unicode_escape")
                inside = target == mount or target.startswith(mount.rstrip("/") + "/")
                if inside and len(mount) >= best:
                    best, kind = len(mount), right.split()[0]
    except (OSError, IndexError, ValueError):
        return ""
    return kind
