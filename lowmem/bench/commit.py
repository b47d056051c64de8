"""What a commit costs, and coming back after a crash, by the number of rows touched.

A child process trains, commits, trains on and kills itself, so that nothing is closed; the
parent resumes. Files are in the page cache then, as they are when a process dies and its
machine lives on.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

SHARES = (0.001, 0.01, 0.1)
_BATCH = 1 << 16


def commit(
    folder: Path, *, rows: int, dim: int, repeats: int, shares: Sequence[float] = SHARES
) -> Iterator[dict[str, Any]]:
    """Figures for each share of the table that is touched between two commits."""
    label = f"commit and resume: {rows / 1e6:g}M × {dim}, {8e-9 * rows * dim:.3g} GB of moments"
    with tqdm(total=len(shares) + 1, desc="commit", unit="share", leave=False) as bar:
        # A small one first: compiled code is loaded at its first use, which is not a commit's.
        small = _train_and_die(folder / "small", 100, dim, 10, 1)
        _resume(folder / "small", 100, dim, small["committed_step"])
        bar.update()
        for share in shares:
            touched = max(1, round(rows * share))
            found = _train_and_die(folder / "store", rows, dim, touched, repeats)
            resume_s = _resume(folder / "store", rows, dim, found["committed_step"])
            commit_s = statistics.median(found["commits_s"])
            yield {
                "regime": "commit",
                "workload": label,
                "contender": f"DSA, {100 * share:g} % touched",
                "touched_rows": touched,
                "commit_s": commit_s,
                "commits_s": found["commits_s"],
                "commit_row_s": commit_s / touched,
                "journal_bytes": found["journal_bytes"],
                "resume_s": resume_s,
                "resume_row_s": resume_s / touched,
            }
            bar.update()


def _train_and_die(store: Path, rows: int, dim: int, touched: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=store.parent) as aside:
        out = Path(aside, "out.json")
        arguments = [str(word) for word in (store, out, rows, dim, touched, repeats)]
        status = subprocess.run(
            [sys.executable, "-m", "lowmem.bench.commit", *arguments]
        ).returncode
        if status != -signal.SIGKILL or not out.exists():
            raise OSError(f"the child that trains failed, see above (status {status})")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _resume(store: Path, rows: int, dim: int, committed_step: int) -> float:
    from lowmem.dsa.optimizer import DSA

    param = nn.Parameter(torch.zeros(rows, dim))
    began = time.perf_counter()
    opt = DSA([param], directory=store, mode="resume")
    seconds = time.perf_counter() - began
    with opt:
        step = opt.state_dict()["state"][0]["step"]
        if step != committed_step:
            raise RuntimeError(f"resumed at step {step}; the last commit was {committed_step}")
    return seconds


def _child(directory: Path, out: Path, rows: int, dim: int, touched: int, repeats: int) -> None:
    from lowmem.dsa.optimizer import DSA

    param = nn.Parameter(torch.zeros(rows, dim))
    opt = DSA([param], directory=directory, mode="resume" if directory.exists() else "create")
    rng = np.random.default_rng(touched)
    grads = torch.full((min(_BATCH, touched), dim), 1e-2)

    def touch() -> None:
        ids = torch.from_numpy(rng.choice(rows, touched, replace=False, shuffle=False))
        for part in ids.split(_BATCH):
            opt.step_rows(param, part, grads[: len(part)])

    commits = []
    for _ in range(repeats + 1):  # the first one begins the journal
        touch()
        began = time.perf_counter()
        opt.commit()
        commits.append(time.perf_counter() - began)
    step = opt.state_dict()["state"][0]["step"]
    touch()
    report = {
        "commits_s": commits[1:],
        "committed_step": step,
        "journal_bytes": sum(path.stat().st_size for path in directory.glob("*.undo")),
    }
    out.write_text(json.dumps(report))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _child(Path(sys.argv[1]), Path(sys.argv[2]), *(int(word) for word in sys.argv[3:]))
