"""The step when the state does not fit in memory: a child process under a memory limit.

``python -m lowmem.bench.cold SPEC.json`` is that child. It allocates and touches the
weights, and only then enters the limited group: so the limit holds the page cache and what
a batch needs, for every contender alike, and the weights, which no contender can do
without, stay outside.

All contenders keep their state in one file, one after the other. Each turn starts from
the page cache that the contender's own past would have left: the file is dropped, then
the pages of a long trace of ids are read in again, the way the contender lays them out,
until the limit is nearly reached; then come some untimed steps of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowmem import env
from lowmem.bench.contenders import NAMES, Way

PAGE = 4096
_FILL = 0.9  # of the limit: what the trace may bring in
_TRACE = 1 << 40  # steps from here on are the trace; the timed ones are never among them


def under_limit(
    folder: Path,
    *,
    limit: int | None,
    rows: int,
    dim: int,
    ids: Sequence[str],
    batches: Sequence[int],
    names: Sequence[str],
    seconds: float,
    disk_seconds: float,
    visits: tuple[int, int],
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Rows of the result from a child with ``limit`` bytes of memory; all there is, if None.

    The disk's limits are added to ``limits``. Stopped by Ctrl-C, it gives what the child had
    measured by then and raises ``KeyboardInterrupt`` after that.

    Raises:
        OSError: no control group can be made, or the child failed.
    """
    from lowmem.bench.cgroup import limited_group

    spec, out = folder / "cold.json", folder / "cold-result.json"
    room = limit or (env.available_memory_bytes() or 0) - 4 * rows * dim
    with limited_group(limit) if limit else contextlib.nullcontext() as group:
        spec.write_text(
            json.dumps(
                {
                    "folder": str(folder),
                    "out": str(out),
                    "group": group and str(group),
                    "limit": room,
                    "rows": rows,
                    "dim": dim,
                    "ids": list(ids),
                    "batches": list(batches),
                    "names": list(names),
                    "seconds": seconds,
                    "disk_seconds": disk_seconds,
                    "visits": visits,
                    "memory_limits": limits,
                }
            )
        )
        child = subprocess.Popen([sys.executable, "-m", "lowmem.bench.cold", str(spec)])
        stopped = False
        try:
            child.wait()
        except KeyboardInterrupt:
            stopped = True
        finally:
            if child.poll() is None:
                child.terminate()
            status = child.wait()
    if out.exists():
        result = json.loads(out.read_text())
        limits.update(result["limits"])
        yield from result["rows"]
    if stopped:
        raise KeyboardInterrupt
    if status != 0:
        word = "was killed; the limit may be too small" if status < 0 else "failed; see above"
        raise OSError(f"the child under the memory limit {word} (status {status})")


def warm(way: Way, draw: Any, budget: int) -> int:
    """Read in the pages of a long trace of ids, up to ``budget`` bytes; returns the bytes."""
    from lowmem.kernels import pages

    places = way.places()
    rows = draw.rows
    seen = np.zeros(rows, bool)
    span = sum(size for _, size in places)
    pages_of_row = sum(max(1, size // PAGE) for _, size in places)
    bitmaps = [np.zeros(rows * size // PAGE + 2, bool) for _, size in places]
    total, number = 0, 0
    limit = min(budget, rows * span)
    while total < limit * 0.98 and number < 200:
        number += 1
        room = max(1, (limit - total) // (PAGE * pages_of_row))
        fresh = np.unique(draw.at(_TRACE + number, 1 << 19)[: max(256, room)])
        fresh = fresh[~seen[fresh]]
        seen[fresh] = True
        if not fresh.size:
            continue
        for (address, size), bitmap in zip(places, bitmaps, strict=True):
            page = (fresh * size) // PAGE
            total += PAGE * int(np.count_nonzero(~bitmap[np.unique(page)]))
            bitmap[page] = True
            if pages.AVAILABLE:
                pages.advise_rows(
                    fresh, 0, fresh.size, address, size, pages.PAGE, pages.MADV_WILLNEED
                )
    return total


def load_code(names: Sequence[str], folder: Path, dim: int) -> None:
    """A step of everybody on a small table: code is loaded then, and counts as no batch's."""
    from lowmem.bench.contenders import make_shared
    from lowmem.bench.turns import Run, table, turn
    from lowmem.bench.workloads import Gradients, Ids

    with tempfile.TemporaryDirectory(dir=folder) as home:
        for way in make_shared(list(names), table(256, dim), Path(home)):
            turn(Run(way, Gradients(Ids("uniform", 256), 256, dim)), 0, timed=False)
            way.close()


def evict_all(ways: Sequence[Way]) -> None:
    """Drop the shared file from memory: a page goes only when nobody maps it any more."""
    for way in ways:
        way.evict()


def _child(spec: dict[str, Any]) -> None:
    from tqdm.auto import tqdm

    from lowmem.bench.cgroup import enter
    from lowmem.bench.contenders import make_shared
    from lowmem.bench.counters import Device
    from lowmem.bench.figures import add_ratio, figures
    from lowmem.bench.limits import disk_limits, fill_random
    from lowmem.bench.turns import Run, counted, table, turn, warm_up
    from lowmem.bench.workloads import WORKLOADS, Gradients, Ids
    from lowmem.dsa.header import HEADER_BYTES

    parent = os.getppid()
    folder = Path(spec["folder"])
    rows, dim, seconds = spec["rows"], spec["dim"], spec["seconds"]
    param = table(rows, dim)
    param.data.fill_(0.01)  # touched here, so charged here
    sources = [Ids(name, rows) for name in spec["ids"]]
    load_code(spec["names"], folder, dim)
    gc.collect()
    gc.freeze()  # what was imported is no garbage, and takes long to look through
    if spec["group"]:
        enter(Path(spec["group"]))  # before the contenders: they look at how much memory there is
    ways = make_shared(spec["names"], param, folder)
    path = next(way for way in ways if way.name == NAMES["dsa"]).store.path  # type: ignore[attr-defined]
    found: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        for way in ways:
            stack.callback(way.close)
        fill_random(path, HEADER_BYTES, rows * dim * 8, "filling the state")
        evict_all(ways)
        limits = {**spec["memory_limits"], **disk_limits(path, spec["disk_seconds"])}
        device = Device(folder)
        visits, turns = spec["visits"]
        total = len(sources) * len(spec["batches"]) * len(ways) * visits
        bar = stack.enter_context(
            tqdm(total=total, desc="cold, memory limited", unit="visit", leave=False)
        )
        for source in sources:
            for batch in spec["batches"]:
                runs = [Run(way, Gradients(source, batch, dim)) for way in ways]
                group: list[dict[str, Any]] = []
                label = (
                    f"cold, {spec['limit'] / (1 << 30):.3g} GiB for {rows * dim * 8 / 1e9:.3g} GB "
                    f"of state: {WORKLOADS[source.name]}, batch {batch:,}"
                )
                for visit in range(visits):
                    for run in runs if visit % 2 == 0 else runs[::-1]:
                        if os.getppid() != parent:
                            raise SystemExit("the benchmark that started this has ended")
                        bar.set_postfix_str(f"{source.name} {batch:,}: {run.way.name}")
                        evict_all(ways)
                        warm(run.way, source, int(_FILL * spec["limit"]))
                        warm_up(run, seconds)
                        with counted(run, device):
                            for _ in range(turns):
                                turn(run, seconds)
                        bar.update()
                        group = [
                            figures(run, limits, regime="cold-limit", workload=label)
                            for run in runs
                            if run.timing.repeats
                        ]
                        add_ratio(group, "to_memmap", NAMES["memmap"])
                        add_ratio(group, "to_random", NAMES["memmap-random"])
                        _write(Path(spec["out"]), [*found, *group], limits)
                found += group


def _write(path: Path, rows: list[dict[str, Any]], limits: dict[str, float]) -> None:
    """What has been measured so far, whole or not at all."""
    aside = path.with_name(path.name + ".part")
    disk = {key: value for key, value in limits.items() if "iops" in key}
    aside.write_text(json.dumps({"rows": rows, "limits": disk}))
    os.replace(aside, path)


if __name__ == "__main__":
    _child(json.loads(Path(sys.argv[1]).read_text()))
