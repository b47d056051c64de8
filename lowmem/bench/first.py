"""The first step of a process: imports, thread pools, and what numba compiles or loads.

``python -m lowmem.bench.first CONTENDER ROWS DIM BATCH FOLDER`` is one such process. Every
contender gets a new one, and DSA two in a row on a cache of compiled code that is empty at
the start: the first run ever on a machine, and every later one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm


def first_step(
    names: Sequence[str],
    folder: Path,
    *,
    rows: int,
    dim: int,
    batch: int,
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Rows of the result: seconds of the import, of the first step and of the second.

    Raises:
        OSError: a process failed.
    """
    from lowmem.bench.contenders import NAMES
    from lowmem.bench.turns import size

    runs = [(name, NAMES[name]) for name in names if name == "sparse-adam"]
    if "dsa" in names:
        runs += [("dsa", "DSA, the first run ever"), ("dsa", "DSA, every later run")]
    compiled = folder / "compiled"
    compiled.mkdir()
    with tqdm(runs, desc="first step", unit="process", leave=False) as bar:
        for number, (name, title) in enumerate(bar):
            bar.set_postfix_str(title)
            home = folder / str(number)
            home.mkdir()
            words = [name, str(rows), str(dim), str(batch), str(home)]
            child = subprocess.run(
                [sys.executable, "-m", "lowmem.bench.first", *words],
                env={**os.environ, "NUMBA_CACHE_DIR": str(compiled)},
                capture_output=True,
                text=True,
                check=False,
            )
            if child.returncode:
                last = (child.stderr.strip().splitlines() or ["no message"])[-1]
                raise OSError(f"the process for the first step of {title} failed: {last}")
            yield {
                "regime": "first-step",
                "workload": f"first step of a process: {size(rows, dim)}, batch {batch:,}",
                "contender": title,
                "rows": rows,
                "dim": dim,
                "batch": batch,
                **json.loads(child.stdout),
            }


def _child(name: str, rows: int, dim: int, batch: int, folder: Path) -> dict[str, float]:
    times = [time.perf_counter()]
    from lowmem.bench.contenders import make
    from lowmem.bench.turns import Run, table
    from lowmem.bench.workloads import Gradients, Ids

    times.append(time.perf_counter())
    param = table(rows, dim)
    param.data.fill_(0.01)
    run = Run(make(name, param, folder), Gradients(Ids("uniform", rows), batch, dim))
    for _ in range(2):
        run.load()
        began = time.perf_counter()
        run.way.step()
        times.append(time.perf_counter() - began)
    run.way.close()
    return {
        "import_s": times[1] - times[0],
        "first_step_s": times[2],
        "second_step_s": times[3],
    }


if __name__ == "__main__":
    kind, height, width, count, place = sys.argv[1:]
    print(json.dumps(_child(kind, int(height), int(width), int(count), Path(place))))
