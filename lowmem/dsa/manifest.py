"""The manifest of an export: its files, their sizes, and a checksum of every block.

It may come from a stranger: names in it stay inside the folder, sizes fit the files, and
nothing is believed before it was looked at.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem.dsa.commits import write_json
from lowmem.dsa.header import HEADER_BYTES, StoreError

MANIFEST, PART = "MANIFEST.json", "MANIFEST.part"
BLOCK_BYTES = 4 << 20
_LARGEST = 256 << 20  # bytes of a manifest; enough for 20 TB of rows
_NAME = re.compile(r"table-[0-9]{3,9}\.(rows|sums)")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Manifest:
    """What an export holds.

    Attributes:
        stores: ``{file name: store identity}``.
        files: ``{file name: (bytes, checksums of its blocks)}``.
    """

    stores: dict[str, str]
    files: dict[str, tuple[int, list[str]]]

    def to_json(self) -> dict[str, Any]:
        files = {name: [size, blocks] for name, (size, blocks) in self.files.items()}
        return {"format": 1, "block_bytes": BLOCK_BYTES, "stores": self.stores, "files": files}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an export. Names in it stay inside the folder, sizes fit the files.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it is damaged, or lies.
    """
    path = directory / MANIFEST
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        broken_off = (directory / PART).exists()
        reason = "the copy was broken off; export or import again" if broken_off else "no export"
        raise FileNotFoundError(errno.ENOENT, f"no {MANIFEST}: {reason}", str(directory)) from None
    try:
        return _parse(json.loads(data[:_LARGEST]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None


def _parse(fields: Any) -> Manifest:
    if not isinstance(fields, dict) or fields.get("format") != 1:
        raise ValueError("it has no format this lowmem knows")
    claimed = fields.pop("digest", None)
    if claimed != digest(json.dumps(fields, sort_keys=True).encode()):
        raise ValueError("its checksum does not match")
    if fields["block_bytes"] != BLOCK_BYTES:
        raise ValueError(
            f"its blocks are {fields['block_bytes']!r:.40} bytes long, not {BLOCK_BYTES:,}"
        )
    stores, files = fields["stores"], fields["files"]
    if not isinstance(stores, dict) or not isinstance(files, dict):
        raise ValueError("its stores or files are missing")
    for name, identity in stores.items():
        if name not in files or not name.endswith(".rows") or not isinstance(identity, str):
            raise ValueError(f"{name!r:.60} is no store of it")
    read: dict[str, tuple[int, list[str]]] = {}
    for name, entry in files.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r:.60} is no name of a store's file")
        size, blocks = entry
        if type(size) is not int or not 0 < size < 1 << 60 or not isinstance(blocks, list):
            raise ValueError(f"{name} has no size and checksums")
        if len(blocks) != -(-size // BLOCK_BYTES):
            raise ValueError(f"{name} has {len(blocks):,} checksums for {size:,} bytes")
        if not all(isinstance(block, str) and _DIGEST.fullmatch(block) for block in blocks):
            raise ValueError(f"{name} has a checksum that is none")
        if name.endswith(".rows") and (name not in stores or size <= HEADER_BYTES):
            raise ValueError(f"{name} is no store of it")
        read[name] = size, blocks
    return Manifest(dict(stores), read)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    body = manifest.to_json()
    seal = digest(json.dumps(body, sort_keys=True).encode())
    write_json(directory / MANIFEST, {**body, "digest": seal}, sync=True)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
