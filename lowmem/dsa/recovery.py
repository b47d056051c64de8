"""Bring a folder of stores back to its last commit, all tables or none.

A crash may come while the tables are marked one after the other, so one table that was not
closed cleanly takes all of them back: tables of different steps must not meet.
"""

from __future__ import annotations

import contextlib
import logging
import sys

from lowmem.dsa import commits
from lowmem.dsa.commits import Commit
from lowmem.dsa.folder import StoreFolder
from lowmem.dsa.header import Header, StoreError, read_header, unclean
from lowmem.dsa.journal import Journal
from lowmem.dsa.store import RowStore

log = logging.getLogger(__name__)


def recover(folder: StoreFolder, *, sync: bool, after_restart: bool = False) -> Commit | None:
    """Roll back what was not closed cleanly; the folder's last commit, if there is one.

    May be interrupted anywhere and done again.

    Args:
        folder: held by this process.
        sync: wait for the disk.
        after_restart: go back although the machine was started anew since.

    Raises:
        StoreError: there is no commit to go back to, or the way back is damaged; no row has
            changed.
    """
    commits.settle(folder.path, sync=sync)
    commit = commits.read_commit(folder.path)
    headers = {number: read_header(path)[0] for number, path in folder.stores().items()}
    if commit is not None:
        _require_same(folder, commit, headers)
    dirty = [number for number, header in headers.items() if not header.clean]
    if not dirty:
        return commit
    if commit is None:
        raise unclean(folder.table_path(dirty[0]))
    for number in commit.tables:
        _require_way_back(folder, number, headers[number], after_restart)
    for number in sorted(headers.keys() - commit.tables.keys()):
        log.warning("removed %s: it was made after the last commit", folder.table_path(number))
        folder.remove(number)
    with contextlib.ExitStack() as stack:
        opened = []
        for number, point in commit.tables.items():
            store = RowStore.open(folder.table_path(number), recover=True)
            stack.callback(store.close)
            journal = Journal(store, sync=sync)
            stack.callback(journal.close)
            journal.attach(commit.epoch)
            opened.append((store, journal, point))
        for store, journal, point in opened:
            store.mark(clean=False)  # a table that was clean must not pass for it half way
            rows = journal.roll_back()
            if sync:
                journal.flush()
                store.flush()
            log.warning(
                "%s: rolled %s rows back to the commit at step %s. Weights do not come back by "
                "themselves: load the checkpoint of that step",
                store.header.name or store.path,
                f"{rows:,}",
                f"{point.step:,}",
            )
        for store, _, (_, step, history) in opened:
            store.mark(step=step, committed_step=step, history=history, clean=True)
            if sync:
                store.flush()
    return commit


def this_boot() -> str:
    """What names this start of the machine, or ``""`` where the system does not say."""
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as first:
            name = first.read(64).strip()
        with open("/proc/sys/kernel/random/boot_id") as second:
            return name if second.read(64).strip() == name else ""
    except OSError:
        return ""


def _require_same(folder: StoreFolder, commit: Commit, headers: dict[int, Header]) -> None:
    for number, (identity, _, _) in commit.tables.items():
        path = folder.table_path(number)
        if number not in headers:
            raise StoreError(f"{path} is missing; the folder's last commit names it")
        if headers[number].identity != identity:
            raise StoreError(
                f"{path} is store {headers[number].identity}; the folder's last commit has "
                f"{identity}. Parts of two folders were mixed"
            )


def _require_way_back(
    folder: StoreFolder, number: int, header: Header, after_restart: bool
) -> None:
    path = folder.table_path(number)
    if not header.clean and not header.journaled:
        raise unclean(path)
    if header.clean or not header.boot or after_restart or header.boot == this_boot():
        return
    raise StoreError(
        f"{path} was not closed cleanly and the machine was started anew since, which "
        'durability="process" does not cover: what the disk has may be of any moment. If the '
        "machine was shut down in order, `lowmem store repair` goes back to the last commit "
        "and checks every row"
    )
