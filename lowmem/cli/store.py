"""Look at, verify or repair the row stores of a folder.

  lowmem store info PATH     what is there: rows, steps, the last commit
  lowmem store verify PATH   headers, sizes, journals, and every row against its checksum
  lowmem store repair PATH   roll back to the last commit what was not closed cleanly

PATH is a folder that was an optimizer's directory=, or one of its .rows files. A folder
that a process holds is left alone. Exit status: 0 sound, 1 not sound, 2 not possible.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowmem.dsa.commits import Commit
    from lowmem.dsa.folder import StoreFolder
    from lowmem.dsa.header import Header

HELP = "look at, verify or repair a row store"
_NAMED = 20  # damaged rows that are named


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("info", "verify", "repair"))
    parser.add_argument("path", type=Path, metavar="PATH", help="a folder of stores, or a .rows")


def run(args: argparse.Namespace) -> int:
    from lowmem.dsa.folder import StoreFolder

    path: Path = args.path.expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if path.is_file() and path.suffix != ".rows":
        raise ValueError(f"{path} is neither a folder nor a .rows file")
    home = path.parent if path.is_file() else path
    if not list(home.glob("table-*.rows")):
        raise FileNotFoundError(f"there is no store in {home}: no table-000.rows")
    folder = StoreFolder(home, "resume")
    try:
        numbers = sorted(folder.stores())
        if path.is_file():
            numbers = [n for n in numbers if folder.table_path(n).name == path.name]
            if not numbers:
                raise ValueError(f"{path} is not named like a store (table-000.rows)")
        if args.action == "info":
            return _info(folder, numbers)
        if args.action == "repair":
            _repair(folder)
            numbers = [n for n in numbers if folder.table_path(n).exists()]
        return _verify(folder, numbers)
    finally:
        folder.release()


def _info(folder: StoreFolder, numbers: list[int]) -> int:
    from lowmem.dsa.commits import read_commit
    from lowmem.dsa.header import read_header

    commit = read_commit(folder.path)
    if commit is None:
        print(f"{folder.path}: no commit")
    else:
        print(f"{folder.path}: commit {commit.epoch}, {len(commit.tables)} table(s)")
    for number in numbers:
        path = folder.table_path(number)
        header, _ = read_header(path)
        print(f"{path.name}  {header.name!a}")
        print(f"  rows      {header.rows:,} of {header.layout}")
        print(f"  bytes     {path.stat().st_size:,}{_beside(path)}")
        print(f"  identity  {header.identity}")
        print(f"  state     {_state(header, number, commit)}")
    return 0


def _beside(path: Path) -> str:
    text = ""
    for suffix, what in ((".undo", "journal"), (".sums", "checksums")):
        with contextlib.suppress(OSError):
            text += f", {what} {path.with_suffix(suffix).stat().st_size:,}"
    return text


def _state(header: Header, number: int, commit: Commit | None) -> str:
    back = ""
    if commit is not None and number in commit.tables and header.journaled:
        back = f", can go back to the commit at step {commit.tables[number].step:,}"
    if header.clean:
        return f"closed cleanly at step {header.step:,}{back}"
    return f"not closed cleanly{back or ', and there is no commit to go back to'}"


def _repair(folder: StoreFolder) -> None:
    from lowmem.dsa.recovery import recover

    with _said_aloud():
        commit = recover(folder, sync=True, after_restart=True)
    where = "" if commit is None else f" (last commit: {commit.epoch})"
    print(f"{folder.path}: every store is closed cleanly now{where}")


def _verify(folder: StoreFolder, numbers: list[int]) -> int:
    from lowmem.dsa import commits, transfer
    from lowmem.dsa.manifest import MANIFEST, read_manifest

    commits.settle(folder.path, sync=False)
    faults = 0
    try:
        commit = commits.read_commit(folder.path)
    except OSError as error:
        print(f"COMMIT.json: {error}")
        commit, faults = None, 1
    for number in numbers:
        try:
            text = _check(folder, number, commit)
        except OSError as error:
            text = f"not sound: {error}"
        faults += text.startswith("not sound")
        print(f"{folder.table_path(number).name}: {text}")
    if (folder.path / MANIFEST).exists():
        try:
            transfer.verify(folder.path, read_manifest(folder.path))
            print(f"{MANIFEST}: every file matches")
        except OSError as error:
            print(f"{MANIFEST}: not sound: {error}")
            faults += 1
    return 1 if faults else 0


def _check(folder: StoreFolder, number: int, commit: Commit | None) -> str:
    from tqdm.auto import tqdm

    from lowmem.dsa.journal import Journal
    from lowmem.dsa.store import RowStore

    path = folder.table_path(number)
    with contextlib.ExitStack() as stack:
        store = RowStore.open(path, recover=True)
        stack.callback(store.close)
        named = commit is not None and number in commit.tables
        if commit is not None and named and commit.tables[number].identity != store.header.identity:
            return "not sound: the last commit names another store. Parts of two were mixed"
        if not store.header.clean and not (named and store.header.journaled):
            return "not sound: not closed cleanly, and there is no commit to go back to"
        if not path.with_suffix(".sums").exists():
            return "header and size are right; there are no checksums of its rows"
        journal = Journal(store, sync=False)
        stack.callback(journal.close)
        if commit is not None and named:
            journal.attach(commit.epoch)
        bar = stack.enter_context(tqdm(total=store.rows, desc=path.name, unit="row", delay=2))
        count, rows = journal.damaged_rows(_NAMED, bar.update)
        if count:
            more = ", …" if count > len(rows) else ""
            return (
                f"not sound: {count:,} damaged row(s): {', '.join(f'{r:,}' for r in rows)}{more}. "
                'Take a copy back with DSA.import_(), or accept them as they are with mode="'
                'resume-unclean"'
            )
        if not store.header.clean:
            return (
                "not closed cleanly; the journal is sound and `lowmem store repair`, or "
                f'mode="resume", takes {journal.records:,} row(s) back to the last commit'
            )
        return f"sound: {store.rows:,} rows match their checksums"


@contextlib.contextmanager
def _said_aloud() -> Iterator[None]:
    """What the library logs while it goes back is what a person in a terminal wants to read."""

    class Print(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print(record.getMessage())

    log, handler = logging.getLogger("lowmem.dsa.recovery"), Print()
    log.addHandler(handler)
    propagate, log.propagate = log.propagate, False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
