"""Everything that reads a file which may come from a stranger, fed with bytes.

The tests feed it with hypothesis. For hours instead of seconds, with coverage to steer:

    python -m pip install atheris
    python tests/fuzz_readers.py [header|journal|commit|manifest|checkpoint|csv|rules] \
        -max_total_time=3600

A reader may raise ``ValueError`` or ``OSError`` and nothing else, and runs no code.
"""

import contextlib
import json
import struct
import sys
import tempfile
import warnings
import zlib
from pathlib import Path

import numpy as np

from lowmem.dsa import checkpoint, commits, transfer
from lowmem.dsa.commits import Commit
from lowmem.dsa.journal import Journal
from lowmem.dsa.layout import RowLayout
from lowmem.dsa.manifest import digest, read_manifest
from lowmem.dsa.store import RowStore
from lowmem.slim.records import read_records
from lowmem.slim.rulesfile import read_rules

ALLOWED = (ValueError, OSError)


def _sealed_json(data, key, seal):
    """The JSON in ``data`` with the checksum that it needs to be looked at further."""
    try:
        body = json.loads(data)
        body.pop(key, None)
        return json.dumps({**body, key: seal(body)}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


def header(data, folder):
    """A store's header page; sealed with a right checksum when the first byte is odd."""
    path = folder / "table-000.rows"
    page = data[1:]
    if data[:1] and data[0] & 1:
        body = page[: 2048 - 28]
        crc = zlib.crc32(struct.pack("<Q", 1) + body)
        page = struct.pack("<8sIIIQ", b"LMROWST\0", 1, len(body), crc, 1) + body
    path.write_bytes(page.ljust(4096, b"\0") + bytes(240))
    RowStore.open(path, recover=True).close()


def journal(data, folder):
    """An undo journal beside a sound store: header, counts and records."""
    path = folder / "table-000.rows"
    path.unlink(missing_ok=True)
    store = RowStore.create(path, 10, RowLayout.adam(1), name="x")
    try:
        new = Journal(store, sync=False, fresh=True)
        new.attach(0)
        new.begin(1)
        new.protect(np.arange(5))
        new.close()
        undo = bytearray((folder / "table-000.undo").read_bytes())
        # Edits of a right journal get further than bytes out of nowhere.
        for at in range(0, len(data) - 2, 3):
            undo[struct.unpack_from("<H", data, at)[0] % len(undo)] ^= data[at + 2]
        if len(data) % 3 == 1:
            del undo[data[-1] :]
        elif len(data) % 3 == 2:
            undo += data
        (folder / "table-000.undo").write_bytes(undo)
        again = Journal(store, sync=False)
        try:
            again.attach(1)
            again.roll_back()
            again.damaged_rows()
        finally:
            again.close()
        assert not store.raw.any(), "a roll back brought bytes that were never there"
    finally:
        store.close()


def commit(data, folder):
    """COMMIT.json, and COMMIT.next with whatever target it names."""
    for sealed in (data, _sealed_json(data, "crc32", commits._crc)):
        for name in ("COMMIT.json", "COMMIT.next"):
            (folder / "COMMIT.json").unlink(missing_ok=True)
            (folder / name).write_bytes(sealed)
            try:
                commits.settle(folder, sync=False)
                found = commits.read_commit(folder)
                assert found is None or Commit.from_json(found.to_json()) == found
            except ALLOWED:
                pass


def manifest(data, folder):
    """The manifest of an export."""

    def seal(body):
        return digest(json.dumps(body, sort_keys=True).encode())

    for sealed in (data, _sealed_json(data, "digest", seal)):
        (folder / "MANIFEST.json").write_bytes(sealed)
        try:
            found = read_manifest(folder)
        except ALLOWED:
            continue
        for name in found.files:
            assert (folder / name).resolve().parent == folder.resolve()
        transfer.verify(folder, found)


def checkpoint_file(data, folder):
    path = folder / "c.pt"
    path.write_bytes(data)
    checkpoint.read(path)


def csv(data, folder):
    path = folder / "snr.csv"
    path.write_bytes(data)
    read_records(path)


def rules(data, folder):
    path = folder / "rules.json"
    path.write_bytes(data)
    read_rules(path)


READERS = {
    "header": header,
    "journal": journal,
    "commit": commit,
    "manifest": manifest,
    "checkpoint": checkpoint_file,
    "csv": csv,
    "rules": rules,
}


def feed(name, data, folder):
    """One input to one reader; anything but an allowed error gets through."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ALLOWED):
            READERS[name](data, folder)


def seeds(folder):
    """Sound files for the fuzzer to start from, each with its reader's number in front."""
    import torch
    from torch import nn

    from lowmem import DSA

    net = nn.Embedding(6, 1, sparse=True)
    with DSA(net.parameters(), directory=folder / "m") as opt:
        net(torch.tensor([1, 2])).sum().backward()
        opt.step()
        opt.save_checkpoint(folder / "c.pt", net)
        opt.export(folder / "x")
    sound = {
        "header": b"\0" + (folder / "m" / "table-000.rows").read_bytes()[:4096],
        "journal": b"\x45\0\1\x80\0\xff",
        "commit": (folder / "m" / "COMMIT.json").read_bytes(),
        "manifest": (folder / "x" / "MANIFEST.json").read_bytes(),
        "checkpoint": (folder / "c.pt").read_bytes(),
        "csv": b"step,key,shape,compress_dims,snr,mean_sqr,var\n"
        b'1,a.weight,"(4, 3)","(0,)",1.5,1e-4,2e-5\n',
        "rules": b'{"a.weight": [0], "b.weight": null, "c": {"dim": 0, "parts": [[1], null]}}',
    }
    (folder / "seeds").mkdir()
    for number, name in enumerate(READERS):
        (folder / "seeds" / name).write_bytes(bytes([number]) + sound[name])
    return folder / "seeds"


def _instrument(module, name):
    """Let the fuzzer see which branches of a module's functions and methods are taken."""
    import atheris

    def watched(thing):
        kind = type(thing) if isinstance(thing, (classmethod, staticmethod)) else None
        function = thing.__func__ if kind else thing
        return kind(atheris.instrument_func(function)) if kind else atheris.instrument_func(thing)

    for holder in [module, *(c for c in vars(module).values() if isinstance(c, type))]:
        for key, thing in list(vars(holder).items()):
            function = getattr(thing, "__func__", thing)
            if type(function).__name__ == "function" and function.__module__ == name:
                setattr(holder, key, watched(thing))


def main():
    import logging

    import atheris

    logging.disable(logging.CRITICAL)
    names = [word for word in sys.argv[1:] if word in READERS] or list(READERS)
    options = [word for word in sys.argv if word not in READERS]
    folder = Path(tempfile.mkdtemp())

    def one(data):
        if data:
            feed(names[data[0] % len(names)], data[1:], folder)

    if names == list(READERS):
        options.append(str(seeds(Path(tempfile.mkdtemp()))))
    atheris.Setup(options, one)
    atheris.Fuzz()


if __name__ == "__main__":
    try:
        import atheris  # noqa: F401
    except ImportError:
        sys.exit("this needs atheris: python -m pip install atheris")
    for module in (
        "json",
        "lowmem.dsa.store",
        "lowmem.dsa.layout",
        "lowmem.dsa.journal",
        "lowmem.dsa.undofile",
        "lowmem.dsa.sums",
        "lowmem.dsa.commits",
        "lowmem.dsa.transfer",
        "lowmem.dsa.manifest",
        "lowmem.dsa.checkpoint",
        "lowmem.slim.records",
        "lowmem.slim.rulesfile",
    ):
        _instrument(sys.modules[module], module)
    main()
