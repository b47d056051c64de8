"""Export and import: an independent copy of the stores in a folder elsewhere, checked.

An export is a folder of ``table-NNN.rows`` and ``table-NNN.sums``, as a clean close leaves
them, and a manifest with a checksum of every 4 MiB. It opens with ``mode="resume"``. The
manifest is written last, and a store's header last of its file, so a copy that was broken
off is neither imported nor resumed by mistake; the next call goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from lowmem.dsa.checks import require_folder
from lowmem.dsa.commits import write_json
from lowmem.dsa.folder import acquire_lock, release_lock, spoil
from lowmem.dsa.header import HEADER_BYTES, StoreError, read_header
from lowmem.dsa.journal import Journal
from lowmem.dsa.manifest import (
    BLOCK_BYTES,
    MANIFEST,
    PART,
    Manifest,
    digest,
    read_manifest,
    write_manifest,
)
from lowmem.dsa.store import RowStore
from lowmem.dsa.undofile import write_all


@dataclass(frozen=True)
class Source:
    """A file to copy: its name there, its length, and ``read(offset, size)``."""

    name: str
    size: int
    read: Callable[[int, int], bytes]

    @property
    def head(self) -> int:
        """Bytes at the start that are written last, so that half a file is no store."""
        return HEADER_BYTES if self.name.endswith(".rows") else 0


def export(tables: Sequence[tuple[RowStore, Journal | None, int]], directory: Path) -> None:
    """Copy stores, each at its step, into ``directory``; blocks that are there are skipped.

    Raises:
        FileExistsError: the folder holds other stores.
        OSError: the disk is full; call again once there is space.
    """
    sources: list[Source] = []
    identities: dict[str, str] = {}
    for store, journal, step in tables:
        sources.append(_rows_source(store, step))
        identities[store.path.name] = store.header.identity
        if journal is not None:
            sources.append(Source(store.path.with_suffix(".sums").name, *journal.sums_as_bytes()))
    require_folder(directory, "an export")
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        _require_own(directory, identities, "export")
        _copy(sources, identities, directory, "export", keep_manifest=True)


def import_(directory: Path, to: Path | None) -> Path:
    """Check an export, and copy it to ``to`` if given; the folder to resume from.

    Raises:
        FileNotFoundError: there is no manifest: no export, or one that was broken off.
        StoreError: a file does not match the manifest; the rows are named.
        FileExistsError: ``to`` holds stores.
    """
    require_folder(directory, "an export")
    manifest = read_manifest(directory)
    if to is None:
        with _locked(directory):
            verify(directory, manifest)
        return directory
    require_folder(to, "to=")
    to.mkdir(parents=True, exist_ok=True)
    with _locked(to), contextlib.ExitStack() as stack:
        _require_own(to, manifest.stores, "import")
        sources = [
            Source(name, size, stack.enter_context(_checked(directory, name, size, blocks)))
            for name, (size, blocks) in manifest.files.items()
        ]
        _copy(sources, manifest.stores, to, "import", keep_manifest=False)
        _require_identities(to, manifest)
    return to


def verify(directory: Path, manifest: Manifest) -> None:
    """Raise ``StoreError`` where a file does not match the manifest."""
    total = sum(size for size, _ in manifest.files.values())
    with tqdm(total=total, desc="verify", unit="B", unit_scale=True, delay=2) as bar:
        for name, (size, blocks) in manifest.files.items():
            with _checked(directory, name, size, blocks) as read:
                for start in range(0, size, BLOCK_BYTES):
                    bar.update(len(read(start, min(BLOCK_BYTES, size - start))))
    _require_identities(directory, manifest)


# -- copying ---------------------------------------------------------------------------


def _copy(
    sources: Sequence[Source],
    identities: dict[str, str],
    directory: Path,
    verb: str,
    *,
    keep_manifest: bool,
) -> None:
    _require_room(sources, directory)
    target = _Target(directory, identities)
    files: dict[str, tuple[int, list[str]]] = {}
    total = sum(source.size for source in sources)
    with (
        tqdm(total=total, desc=verb, unit="B", unit_scale=True, delay=2) as bar,
        contextlib.ExitStack() as stack,
    ):
        heads = []
        for source in sources:
            file = stack.enter_context(target.open(source.name))
            blocks = []
            for start in range(0, source.size, BLOCK_BYTES):
                data = source.read(start, min(BLOCK_BYTES, source.size - start))
                blocks.append(digest(data))
                head = source.head if start == 0 else 0
                if head:
                    heads.append((file, data[:head]))
                target.put(file, data[head:], start + head)
                bar.update(len(data))
            target.cut(file, source.size)
            files[source.name] = source.size, blocks
        if any(not target.has(file, head_data, 0) for file, head_data in heads):
            target.invalidate()  # before the first of them, not between two
        for file, head_data in heads:
            target.put(file, head_data, 0)
        if target.changed:
            target.sync()
    if keep_manifest:
        write_manifest(directory, Manifest(identities, files))
    (directory / PART).unlink(missing_ok=True)


class _Target:
    """The files of a copy; before the first change it stops being one that may be used."""

    def __init__(self, directory: Path, identities: dict[str, str]) -> None:
        self._directory = directory
        self._identities = identities
        self._open: dict[str, int] = {}
        self.changed = False

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[int]:
        path = self._directory / name
        if not path.exists():
            self.invalidate()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        file = os.open(path, flags, 0o666)
        self._open[name] = file
        try:
            yield file
        finally:
            os.close(file)

    def has(self, file: int, data: bytes, at: int) -> bool:
        return os.pread(file, len(data), at) == data

    def put(self, file: int, data: bytes, at: int) -> None:
        """Write what is not there already."""
        if not self.has(file, data, at):
            self.invalidate()
            write_all(file, memoryview(data), at)

    def cut(self, file: int, size: int) -> None:
        if os.fstat(file).st_size > size:
            self.invalidate()
            os.ftruncate(file, size)

    def sync(self) -> None:
        for file in self._open.values():
            os.fsync(file)

    def invalidate(self) -> None:
        """Nobody may take what is there for a whole copy any more."""
        if self.changed:
            return
        self.changed = True
        write_json(self._directory / PART, {"format": 1, "stores": self._identities}, sync=True)
        (self._directory / MANIFEST).unlink(missing_ok=True)
        spoil(self._directory.glob("table-*.rows"))


def _rows_source(store: RowStore, step: int) -> Source:
    """A store's file as a clean close at ``step`` would leave it, read past the map."""
    clean = replace(
        store.header,
        step=step,
        committed_step=step,
        clean=True,
        journaled=False,
        boot="",
        history=store.history.at(step),
    )
    head = clean.to_bytes(1).ljust(HEADER_BYTES, b"\0")

    def read(start: int, size: int) -> bytes:
        if start >= HEADER_BYTES:
            return store.read_bytes(start, size)
        return head[start:] + store.read_bytes(HEADER_BYTES, size - HEADER_BYTES + start)

    return Source(store.path.name, store.file_bytes, read)


@contextlib.contextmanager
def _checked(
    directory: Path, name: str, size: int, blocks: Sequence[str]
) -> Iterator[Callable[[int, int], bytes]]:
    """Blocks of a file of an export, each held to its checksum."""
    path = directory / name
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise StoreError(
                f"{path} is {status.st_size:,} bytes long; the manifest says {size:,}. "
                "It was truncated or copied in part"
            )

        def read(start: int, count: int) -> bytes:
            data = os.pread(file, count, start)
            if len(data) != count or digest(data) != blocks[start // BLOCK_BYTES]:
                raise StoreError(
                    f"{path} is damaged: bytes {start:,} to {start + count:,}"
                    f"{_rows_of(path, start, count)} do not match the manifest"
                )
            return data

        yield read
    finally:
        os.close(file)


def _rows_of(path: Path, start: int, count: int) -> str:
    if path.suffix != ".rows":
        return ""
    try:
        row_bytes = read_header(path)[0].layout.row_bytes
    except OSError:
        return ""
    first = max(0, start - HEADER_BYTES) // row_bytes
    return f" (rows {first:,} to {(start + count - HEADER_BYTES - 1) // row_bytes:,})"


# -- the folders -----------------------------------------------------------------------


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = acquire_lock(directory / "LOCK")
    try:
        yield
    finally:
        release_lock(lock, directory / "LOCK")


def _require_own(directory: Path, identities: dict[str, str], verb: str) -> None:
    """Refuse to write over stores that no earlier copy of these put there."""
    there = sorted(path.name for path in directory.glob("table-*.rows"))
    if not there:
        return
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        if verb == "export" and (directory / MANIFEST).exists():
            known = read_manifest(directory).stores
        else:
            with open(directory / PART, "rb") as file:
                known = json.loads(file.read(1 << 20)).get("stores") or {}
    for name in there:
        if known.get(name, "") != identities.get(name):
            raise FileExistsError(
                errno.EEXIST,
                f"{name} is there and is no earlier copy of this {verb}; choose another folder, "
                "or empty this one",
                str(directory),
            )


def _require_identities(directory: Path, manifest: Manifest) -> None:
    for name, identity in manifest.stores.items():
        header, _ = read_header(directory / name)
        if header.identity != identity or not header.clean:
            raise StoreError(f"{directory / name} is not the store that the manifest names")


def _require_room(sources: Sequence[Source], directory: Path) -> None:
    needed = 0
    for source in sources:
        there = 0
        with contextlib.suppress(OSError):
            status = os.stat(directory / source.name)
            there = min(status.st_size, getattr(status, "st_blocks", 1 << 60) * 512)
        needed += max(0, source.size - there)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the copy needs {needed:,} more bytes and {free:,} are free",
            str(directory),
        )
