"""The header page of a row store: what a store says of itself, and whether that is sound.

The page holds two copies of the header, each with a sequence number and a checksum of its
own, written in turn: a torn write leaves the other one. Nothing in it is executed, and
every size is checked before memory is reserved.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lowmem.dsa.layout import RowLayout

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
FORMAT_VERSION = 1
SLOT_BYTES = 2048  # of one copy of the header
_MAGIC = b"LMROWST\0"
_PREFIX = struct.Struct("<8sIIIQ")  # magic, version, payload bytes, crc32 of what follows, sequence
_NAME_BYTES = 200  # of a name in the header; six times as many where JSON must escape them
_OTHER_TABLE = (
    "Pass the table that it was made for, choose another directory=, or start anew with "
    'mode="overwrite"'
)
_UNNAMED = re.compile("parameter [0-9]+")


class StoreError(OSError):
    """A row store that is not what it should be: the message says what, and the way out."""


@dataclass(frozen=True)
class Header:
    """What a store says of itself.

    ``step`` is right while ``clean``; ``journaled`` says that every change of a row since the
    folder's commit has its old bytes in the undo journal, and ``boot`` names the start of the
    machine that must not have ended since for that to hold (empty: it may have). ``history``
    names the training that the rows at ``step`` come from.
    """

    identity: str
    rows: int
    layout: RowLayout
    step: int = 0
    committed_step: int = 0
    clean: bool = False
    journaled: bool = False
    name: str = ""
    boot: str = ""
    history: str = ""

    def to_bytes(self, sequence: int) -> bytes:
        payload = json.dumps(
            {
                "identity": self.identity,
                "rows": self.rows,
                "layout": self.layout.to_json(),
                "step": self.step,
                "committed_step": self.committed_step,
                "clean": self.clean,
                "journaled": self.journaled,
                "name": short_name(self.name),
                "boot": self.boot,
                "history": self.history,
            }
        ).encode()
        if len(payload) > SLOT_BYTES - _PREFIX.size:
            raise ValueError(f"{self.layout} is too long for a store's header")
        checksum = zlib.crc32(struct.pack("<Q", sequence) + payload)
        prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(payload), checksum, sequence)
        return (prefix + payload).ljust(SLOT_BYTES, b"\0")

    @classmethod
    def from_json(cls, fields: Any) -> Header:
        if not isinstance(fields, Mapping):
            raise ValueError("the header is not a table of fields")
        layout = RowLayout.from_json(fields.get("layout"))
        numbers = [fields.get(key) for key in ("rows", "step", "committed_step")]
        if any(type(n) is not int or not 0 <= n < 1 << 48 for n in numbers) or numbers[0] == 0:
            raise ValueError(f"rows, step and committed_step are {numbers}")
        identity, name = fields.get("identity"), fields.get("name")
        boot, history = fields.get("boot", ""), fields.get("history", "")
        clean, journaled = fields.get("clean"), fields.get("journaled")
        if not isinstance(identity, str) or not isinstance(name, str):
            raise ValueError("identity or name is no text")
        if not isinstance(boot, str) or not isinstance(history, str):
            raise ValueError("boot or history is no text")
        if not identity.isascii() or not 0 < len(identity) <= 32:
            raise ValueError(f"identity {identity!r:.40} is not up to 32 plain letters")
        if not history.isascii() or len(history) > 32:
            raise ValueError(f"history {history!r:.40} is not up to 32 plain letters")
        if type(clean) is not bool or type(journaled) is not bool:
            raise ValueError("a flag is neither true nor false")
        rows, step, committed = (int(n) for n in numbers if n is not None)
        return cls(identity, rows, layout, step, committed, clean, journaled, name, boot, history)


def short_name(name: str) -> str:
    """``name`` as a header keeps it: cut, and marked with …, where it is long."""
    if len(name.encode("utf-8", "replace")) <= _NAME_BYTES:
        return name
    cut = name.encode("utf-8", "replace")[: _NAME_BYTES - len("…".encode())]
    return cut.decode("utf-8", "ignore") + "…"


def require_name(path: Path, header: Header, label: str) -> None:
    """Raise ``StoreError`` when the store was made for a parameter of another name.

    Parameters without names, which are called by their number, fit any. What wrappers of a
    model put into its names (``module.``, ``_orig_mod.``) makes no other name.
    """
    if not header.name or _UNNAMED.fullmatch(header.name) or _UNNAMED.fullmatch(label):
        return
    ours, theirs = _unwrapped(label), _unwrapped(header.name)
    if short_name(ours) == theirs or short_name(label) == short_name(header.name):
        return
    # A cut name that lost a wrapper has room for more of itself.
    if theirs.endswith("…") and ours.startswith(theirs[:-1]):
        return
    raise StoreError(
        f"{path} was made for {header.name}; the parameter here is {label}. Pass the same "
        "parameters in the same order; where they have new names only, pass them without names"
    )


def _unwrapped(name: str) -> str:
    parts = [part for part in name.split(".") if part not in ("module", "_orig_mod")]
    return ".".join(parts)


def read_header(path: str | os.PathLike[str]) -> tuple[Header, int]:
    """The header of the file at ``path`` and its sequence number.

    Where one of the two copies is damaged, the other one may be a write behind: such a store
    counts as not closed cleanly.

    Raises:
        FileNotFoundError: there is no such file.
        StoreError: not a row store, of a newer format version, or damaged.
    """
    with open(path, "rb") as file:
        page = file.read(HEADER_BYTES)
    found: list[tuple[int, Header]] = []
    faults: list[str] = []
    for start in (0, SLOT_BYTES):
        slot = page[start : start + SLOT_BYTES]
        if len(slot) < SLOT_BYTES or not slot.strip(b"\0"):
            continue
        magic, version, size, checksum, sequence = _PREFIX.unpack_from(slot)
        if magic != _MAGIC:
            faults.append("it does not start like one")
            continue
        if version != FORMAT_VERSION:
            raise StoreError(
                f"{path} has store format version {version}; this lowmem reads version "
                f"{FORMAT_VERSION}. Update lowmem to read it"
            )
        payload = slot[_PREFIX.size : _PREFIX.size + size]
        if len(payload) != size or zlib.crc32(struct.pack("<Q", sequence) + payload) != checksum:
            faults.append("the checksum of its header does not match")
            continue
        try:
            found.append((sequence, Header.from_json(json.loads(payload))))
        except (ValueError, RecursionError) as error:
            faults.append(str(error))
    if not found:
        raise StoreError(
            f"{path} is not a sound row store: {'; '.join(faults) or 'it has no header'}"
        )
    sequence, header = max(found, key=lambda pair: pair[0])
    if [number for number, _ in sorted(found, key=lambda pair: pair[0])] != (
        [1] if sequence == 1 else [sequence - 1, sequence]
    ):
        log.warning("%s: one of the two copies of its header is damaged", path)
        header = replace(header, clean=False)
    return header, sequence


def require_fit(path: Path, header: Header, rows: int | None, layout: RowLayout | None) -> None:
    """Raise ``StoreError`` unless the file is whole and holds ``rows`` rows of ``layout``."""
    if rows is not None and header.rows != rows:
        raise StoreError(
            f"{path} holds {header.rows:,} rows; the parameter has {rows:,}. {_OTHER_TABLE}"
        )
    if layout is not None and header.layout != layout:
        raise StoreError(
            f"{path} has rows of {header.layout}; the parameter needs {layout}. {_OTHER_TABLE}"
        )
    expected = HEADER_BYTES + header.rows * header.layout.row_bytes
    actual = path.stat().st_size
    if actual != expected:
        raise StoreError(
            f"{path} is {actual:,} bytes long; its header says {expected:,}. "
            "It was truncated or copied in part"
        )


def unclean(path: Path) -> StoreError:
    return StoreError(
        f"{path} was not closed cleanly, and there is no commit to go back to. Start anew "
        'with mode="overwrite", or take it as it is with mode="resume-unclean"'
    )
