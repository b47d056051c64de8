"""The folder's commit record: which step each store comes back to, changed in one rename.

A commit that belongs to a checkpoint file has two names to change, the checkpoint's and
the record's, and a crash may come between. So the next record is written aside first,
with the fingerprint of the finished checkpoint. Whoever opens the folder later finds out
from the checkpoint's own name whether the commit happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lowmem.dsa.header import StoreError

_NUMBER = re.compile("[0-9]{1,9}")
_RECORD, _NEXT = "COMMIT.json", "COMMIT.next"
_ENDS = 1 << 16
_LARGEST = 1 << 20  # bytes; a record has a line a table


class Point(NamedTuple):
    """What one table comes back to: a store, its step, and the training it is a step of."""

    identity: str
    step: int
    history: str


@dataclass(frozen=True)
class Commit:
    """A step to come back to.

    Attributes:
        epoch: counts the commits of a folder, from 1.
        tables: by their number.
    """

    epoch: int
    tables: dict[int, Point] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        tables = {str(number): list(point) for number, point in self.tables.items()}
        return {"format": 1, "epoch": self.epoch, "tables": tables}

    @classmethod
    def from_json(cls, fields: Any) -> Commit:
        if not isinstance(fields, dict) or fields.get("format") != 1:
            raise ValueError("it has no format this lowmem knows")
        epoch, tables = fields.get("epoch"), fields.get("tables")
        if type(epoch) is not int or not 1 <= epoch < 1 << 48 or not isinstance(tables, dict):
            raise ValueError("its epoch or its tables are missing")
        read: dict[int, Point] = {}
        for number, entry in tables.items():
            if not _NUMBER.fullmatch(number) or not isinstance(entry, list) or len(entry) != 3:
                raise ValueError(f"table {number!r:.40} is no table")
            identity, step, history = entry
            if not isinstance(identity, str) or not isinstance(history, str):
                raise ValueError(f"table {number} has no identity and history")
            if type(step) is not int or not 0 <= step < 1 << 48:
                raise ValueError(f"table {number} has no step")
            read[int(number)] = Point(identity, step, history)
        return cls(epoch, read)


def read_commit(folder: Path) -> Commit | None:
    """The last commit of a folder, or ``None`` before the first.

    Raises:
        StoreError: the record is damaged.
    """
    record = _read(folder / _RECORD)
    return None if record is None else _commit(record, folder / _RECORD)


def write_commit(folder: Path, commit: Commit, *, sync: bool) -> None:
    """Make ``commit`` the folder's last one; the rename is the moment it happens."""
    _write(folder / _RECORD, commit.to_json(), sync)


def prepare_commit(folder: Path, commit: Commit, finished: Path, target: Path, sync: bool) -> None:
    """Write aside what becomes the commit when ``finished`` is renamed to ``target``."""
    extra = {"target": os.path.abspath(target), "fingerprint": _fingerprint(finished)}
    _write(folder / _NEXT, {**commit.to_json(), **extra}, sync)


def settle(folder: Path, *, sync: bool) -> None:
    """Finish or forget a prepared commit, by whether its checkpoint got its name.

    Finishing is a rename and needs no space: a disk that is full by now cannot keep a
    checkpoint and its commit apart.
    """
    path = folder / _NEXT
    record = _read(path)
    if record is None:
        return
    commit, last = _commit(record, path), read_commit(folder)
    target, fingerprint = record.get("target"), record.get("fingerprint")
    happened = False
    if isinstance(target, str) and (last is None or commit.epoch > last.epoch):
        with contextlib.suppress(OSError, ValueError):
            happened = _fingerprint(Path(target)) == fingerprint
    if happened:
        os.replace(path, folder / _RECORD)
        if sync:
            sync_folder(folder)
    else:
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _fingerprint(path: Path) -> list[int]:
    """What stays the same when a file gets another name, and for no other checkpoint.

    A checkpoint has a random token near its start. Inode and time would not do: network and
    user-space file systems change them.
    """
    with open(path, "rb", opener=_open_regular) as file:
        size = os.fstat(file.fileno()).st_size
        first = zlib.crc32(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        return [size, first, zlib.crc32(file.read(_ENDS))]


def _open_regular(path: str, flags: int) -> int:
    """Open without waiting for whoever writes into a pipe, and refuse anything but a file."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ValueError(f"{path} is no file")
    return file


def _commit(record: dict[str, Any], path: Path) -> Commit:
    try:
        return Commit.from_json(record)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return None
    try:
        record = json.loads(data[:_LARGEST])
        body = {key: value for key, value in record.items() if key != "crc32"}
        if record["crc32"] != _crc(body):
            raise ValueError("its checksum does not match")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    return body


def write_json(path: Path, body: dict[str, Any], *, sync: bool) -> None:
    """Write a JSON file whole or not at all; with ``sync``, its bytes are on the disk first."""
    aside = path.with_name(path.name + ".new")
    try:
        with open(aside, "w") as file:
            json.dump(body, file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def _write(path: Path, body: dict[str, Any], sync: bool) -> None:
    write_json(path, {**body, "crc32": _crc(body)}, sync=sync)
    if sync:
        sync_folder(path.parent)


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
