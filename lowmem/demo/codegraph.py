"""A knowledge graph of the Python code that is installed on this machine.

Real, heavy-tailed and there without a download: who calls, imports, defines, inherits and
raises what, read from the standard library and site-packages. See `extract.py` for names.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import site
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from lowmem.demo.graph import Graph, Names, distinct, load, save
from lowmem.demo.readers import File, Reply, replies_of

_log = logging.getLogger(__name__)

VERSION = 1  # of what is extracted; raise it and old caches are read no more

_BATCH = 24  # files a request: small enough for the time budget, large enough for the pipe


def default_roots() -> list[Path]:
    """The folders of the standard library and of site-packages, each once."""
    paths = sysconfig.get_paths()
    found = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    with contextlib.suppress(AttributeError):  # absent in old virtual environments
        found += site.getsitepackages()
    found += [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    roots = dict.fromkeys(Path(p).resolve() for p in found)
    return [root for root in roots if root.is_dir()]


def find_files(roots: Iterable[Path]) -> tuple[list[File], dict[str, int]]:
    """Every ``.py`` file below the roots, in an order that mixes the packages.

    The order is by a hash of the module's name, the same on every run: a reading that stops
    early has seen a fair sample of everything.

    Returns:
        files, and how many files and folders were left out, by reason.
    """
    roots = [Path(root).resolve() for root in roots]
    elsewhere = {str(root) for root in roots}
    skipped: dict[str, int] = {}

    def refuse(_: OSError) -> None:
        skipped["unreadable folder"] = skipped.get("unreadable folder", 0) + 1

    files: dict[str, File] = {}
    for root in roots:
        for folder, subfolders, names in os.walk(root, onerror=refuse):
            subfolders[:] = [
                name
                for name in subfolders
                if name not in ("__pycache__", "site-packages", "dist-packages")
                and os.path.join(folder, name) not in elsewhere
            ]
            prefix = os.path.relpath(folder, root).replace(os.sep, ".")
            for name in names:
                if not name.endswith(".py"):
                    continue
                stem = name[:-3]
                is_package = stem == "__init__" and prefix != "."
                module = prefix if is_package else stem if prefix == "." else f"{prefix}.{stem}"
                if not module.isprintable() or " " in module:  # undecodable, or no module
                    skipped["odd name"] = skipped.get("odd name", 0) + 1
                    continue
                path = os.path.join(folder, name)
                files.setdefault(module, (path, module, is_package))
    mixed = sorted(files.values(), key=lambda file: hashlib.md5(file[1].encode()).digest())
    return mixed, skipped


def fingerprint(files: Iterable[File]) -> str:
    """Changes when a file is added, removed or edited, or Python or this reader changes."""
    digest = hashlib.sha256(f"{VERSION} {sys.version}".encode())
    for path, module, _ in files:
        try:
            stat = os.stat(path)
            digest.update(f"{module} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        except OSError:
            digest.update(f"{module} ?\n".encode())
    return digest.hexdigest()


def _cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))  # those that this process may use
    except AttributeError:
        return os.cpu_count() or 1


def cache_directory() -> Path:
    """Where this user's caches belong on this system."""
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "lowmem"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "lowmem" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lowmem"
    return Path.home() / ".cache" / "lowmem"


def code_graph(
    roots: Iterable[Path] | None = None,
    *,
    seconds: float = 60.0,
    limit: int | None = None,
    workers: int | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> Graph:
    """The graph of the installed code, from the cache where nothing has changed since.

    Args:
        roots: folders to read; default `default_roots()`.
        seconds: time to read for; what has been read by then is the graph.
        limit: read at most this many files; default all.
        workers: reading processes; default one a CPU, 8 at most.
        cache: the folder of the cache file; default `cache_directory()`. One file an
            environment; delete it to read anew. A folder that cannot be written is no error.
        progress: show a bar.

    Returns:
        The graph; ``graph.facts`` says ``files``, ``files_read``, ``skipped`` (by reason),
        ``seconds``, ``complete`` and ``cached``.

    Raises:
        ValueError: no file could be read, or an argument is out of range.
    """
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    roots = default_roots() if roots is None else [Path(root) for root in roots]
    files, skipped = find_files(roots)
    files = files[:limit]
    if not files:
        raise ValueError(f"no Python source below {', '.join(map(str, roots))}")
    print_of_files = fingerprint(files)
    key = hashlib.sha256(f"{[str(root) for root in roots]} {limit}".encode()).hexdigest()[:12]
    path = (cache_directory() if cache is None else Path(cache)) / f"codegraph-{key}.npz"
    try:
        graph = load(path)
        facts = graph.facts
        if facts["fingerprint"] == print_of_files and (
            facts["complete"] or facts["budget"] >= seconds
        ):
            graph.facts["cached"] = str(path)
            return graph
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, OSError) as error:
        _log.info("reading the code anew: %s", error)

    graph = _read(files, seconds, workers or min(8, _cpus()), progress)
    for reason, count in skipped.items():
        graph.facts["skipped"][reason] = graph.facts["skipped"].get(reason, 0) + count
    graph.facts |= {"fingerprint": print_of_files, "budget": seconds}
    if not len(graph.triples):
        raise ValueError(
            f"no triple found in {graph.facts['files_read']} files below "
            f"{', '.join(map(str, roots))} (skipped: {graph.facts['skipped']})"
        )
    try:
        save(graph, path)
    except OSError as error:
        _log.warning("the graph is not cached: %s", error)
    return graph


def _read(files: list[File], seconds: float, workers: int, progress: bool) -> Graph:
    start = time.monotonic()
    batches = [files[i : i + _BATCH] for i in range(0, len(files), _BATCH)]
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    parts: list[np.ndarray] = []
    skipped: dict[str, int] = {}
    done = 0
    with (
        contextlib.closing(replies_of(batches, workers, start + seconds)) as replies,
        tqdm(
            total=len(files),
            desc="reading code",
            unit="file",
            mininterval=0.5,
            disable=not progress,
        ) as bar,
    ):
        waiting: dict[int, Reply] = {}
        merged = 0  # batches are merged in their order, so that a full reading is repeatable
        for index, reply in replies:
            waiting[index] = reply
            done += len(batches[index])
            while merged in waiting:
                _merge(waiting.pop(merged), entities, relations, parts, skipped)
                merged += 1
                bar.set_postfix_str(f"{len(entities):,} entities", refresh=False)
            bar.update(len(batches[index]))
        for index in sorted(waiting):  # beyond a gap that the time budget left
            _merge(waiting[index], entities, relations, parts, skipped)
    triples = np.concatenate(parts) if parts else np.empty((0, 3), np.int32)
    return Graph(
        Names.of(entities),
        list(relations),
        distinct(triples, len(entities), len(relations)),
        {
            "files": len(files),
            "files_read": done - sum(skipped.values()),
            "skipped": skipped,
            "seconds": round(time.monotonic() - start, 2),
            "complete": done == len(files),
            "cached": None,
        },
    )


def _merge(
    reply: Reply,
    entities: dict[str, int],
    relations: dict[str, int],
    parts: list[np.ndarray],
    skipped: dict[str, int],
) -> None:
    """Renumber one batch's names and append its triples."""
    names, flat, left_out = reply
    for reason, count in left_out.items():
        skipped[reason] = skipped.get(reason, 0) + count
    if not flat:
        return
    local = np.frombuffer(flat, np.int32).reshape(-1, 3)
    triples = np.empty_like(local)
    is_relation = np.zeros(len(names), bool)
    is_relation[local[:, 1]] = True
    is_entity = np.zeros(len(names), bool)
    is_entity[local[:, (0, 2)]] = True  # a name can be both: Python code may say "calls"
    numbers = np.zeros(len(names), np.int32)
    for table, chosen, columns in ((relations, is_relation, [1]), (entities, is_entity, [0, 2])):
        for i in np.flatnonzero(chosen):
            numbers[i] = table.setdefault(names[i], len(table))
        triples[:, columns] = numbers[local[:, columns]]
    parts.append(triples)
