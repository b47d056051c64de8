"""The folder of an optimizer's stores: who holds it, and what kind of disk it is on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from lowmem.dsa.checks import require_folder
from lowmem.dsa.header import HEADER_BYTES, StoreError

log = logging.getLogger(__name__)

Mode = Literal["create", "resume", "overwrite", "resume-unclean"]
SCRATCH_PREFIX = "lowmem-scratch-"
_RAM_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_PATIENCE = 5.0  # seconds for what a dead process left running to end
_held: dict[tuple[int, int], int] = {}  # {(device, inode) of a lock file: descriptor}
_opened: set[int] = set()  # these descriptors, and those that wait for their lock


class StoreFolder:
    """An existing folder, locked for this process, in which ``table-NNN.rows`` files live.

    Args:
        directory: kept after close; ``None`` makes a scratch folder in the working
            directory, which close removes.
        mode: ``"create"`` refuses a folder that already holds a store, ``"resume"`` one
            that holds none.

    Raises:
        FileExistsError, FileNotFoundError: the folder's state does not suit ``mode``.
        NotADirectoryError: ``directory`` is a file, or lies in one.
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
            require_folder(self.path, "directory=")
            if mode.startswith("resume") and not self.path.is_dir():
                raise FileNotFoundError(
                    errno.ENOENT, f'mode="{mode}" found no folder of stores', str(self.path)
                )
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = None
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
                unnamed = "; give directory=, the folder of the run before" if self.scratch else ""
                raise FileNotFoundError(
                    errno.ENOENT,
                    f'mode="{mode}" found no store in the folder{unnamed}',
                    str(self.path),
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
        """Remove every store and the commit record.

        Whoever ends it half way leaves no store that could be taken for a whole one.
        """
        spoil(self.stores().values())
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


def spoil(stores: Iterable[Path]) -> None:
    """Blank the headers of stores that are about to be removed or written anew."""
    for path in stores:
        with contextlib.suppress(FileNotFoundError):
            try:
                file = os.open(path, os.O_WRONLY | _NO_LINK)
            except OSError as error:
                if error.errno == errno.ELOOP:  # what a link leads to is not ours
                    continue
                raise
            try:
                os.pwrite(file, bytes(HEADER_BYTES), 0)
            finally:
                os.close(file)


def acquire_lock(path: Path, *, patience: float = _PATIENCE, certain: bool = False) -> int:
    """Lock the file, made if need be, for this process; the descriptor that holds the lock.

    The system frees it when the process dies, however that comes.

    Args:
        path: the lock file. It names its holder by process id.
        patience: seconds to wait where the holder named there is dead.
        certain: refuse a disk that cannot lock, which otherwise is a warning.

    Raises:
        StoreError: another optimizer or process holds it, or ``certain`` cannot be.
    """
    if path.exists() and _key(os.stat(path)) in _held:
        raise StoreError(
            f"{path.parent} is held by another optimizer of this process; close() it first"
        )
    lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    _opened.add(lock)
    try:
        _wait_for(lock, path, patience, certain)
    except BaseException:
        _close(lock)
        raise
    if not path.exists() or _key(os.stat(path)) != _key(os.fstat(lock)):
        # Its last holder removed it between our opening and our locking it.
        _close(lock)
        return acquire_lock(path, patience=patience, certain=certain)
    _held[_key(os.fstat(lock))] = lock
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def release_lock(lock: int, path: Path) -> None:
    """Give up what :func:`acquire_lock` gave, and remove the file."""
    if lock not in _held.values():
        return  # a fork gave its copy up when it began
    del _held[_key(os.fstat(lock))]
    with contextlib.suppress(OSError):
        os.unlink(path)
    _close(lock)


def _close(lock: int) -> None:
    _opened.discard(lock)
    os.close(lock)


def _wait_for(lock: int, path: Path, patience: float, certain: bool) -> None:
    end = time.monotonic() + patience
    waiting = False
    while not _try_lock(lock, path, certain):
        holder = _holder(lock)
        dead = _is_dead(holder)
        if not dead or time.monotonic() >= end:
            left = ", which has ended: a fork of it may still run" if dead else ""
            raise StoreError(
                f"{path.parent} is held by another process (pid {holder}){left}; stop it, or "
                "choose another directory="
            )
        if not waiting:
            log.warning(
                "%s is held for process %s, which has ended; waiting up to %g s for what it "
                "left running",
                path.parent,
                holder,
                patience,
            )
            waiting = True
        time.sleep(0.05)


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _holder(lock: int) -> str:
    return os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"


def _is_dead(holder: str) -> bool:
    """Whether no process has this id; false where that cannot be told."""
    if sys.platform == "win32" or not (holder.isascii() and holder.isdigit() and int(holder)):
        return False  # on Windows os.kill would end the process
    try:
        os.kill(int(holder), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _try_lock(lock: int, path: Path, certain: bool) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(lock, 1 << 20, os.SEEK_SET)  # a byte nobody reads: the pid stays readable
            msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            # Of the open file. A POSIX lock is the process's, which loses it as soon as
            # anything in it closes the file, such as a copy of the folder.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        if certain:
            raise StoreError(f"{path} cannot be locked ({error})") from error
        log.warning("%s cannot be locked (%s); a second process would go unnoticed", path, error)
    return True


def _let_go() -> None:
    """A fork has its parent's open files, and would keep the locks when the parent is gone."""
    for lock in _opened:
        with contextlib.suppress(OSError):
            os.close(lock)  # the parent's own descriptor keeps the lock
    _opened.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def _sweep_scratch(folder: Path) -> None:
    """Remove scratch folders whose process died without removing them.

    Only where both the lock and the process id say so: on a disk that cannot lock, or
    another machine's, either alone may be wrong.
    """
    for path in folder.glob(f"{SCRATCH_PREFIX}*"):
        lock_path = path / "LOCK"
        with contextlib.suppress(OSError):
            holder = lock_path.read_text(errors="replace").strip()
            # A container may give a new process the id of the one that died.
            if sys.platform != "win32" and holder != str(os.getpid()) and not _is_dead(holder):
                continue
            lock = acquire_lock(lock_path, patience=0.0, certain=True)
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
