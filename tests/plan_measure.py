"""Train three steps of one choice and print what the process took. A helper of the tests.

Run as ``python plan_measure.py CHOICE ROWS DIM BATCH DTYPE``; for AdamW and SlimAdamW,
ROWS × DIM is a square layer's side and the number of layers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch


def anonymous_bytes() -> int:
    """RAM that is no page cache: what the process cannot be robbed of."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon here")


class Peak(threading.Thread):
    """The largest ``anonymous_bytes()`` while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.0005):
            self.bytes = max(self.bytes, anonymous_bytes())


def build(choice: str, rows: int, dim: int, dtype: torch.dtype, directory: str) -> tuple[Any, Any]:
    if choice in ("AdamW", "SlimAdamW"):
        layers = [torch.nn.Linear(rows, rows, bias=False, dtype=dtype) for _ in range(dim)]
        model = torch.nn.Sequential(*layers)
        if choice == "AdamW":
            return model, torch.optim.AdamW(model.parameters(), fused=True)
        from lowmem import SlimAdamW

        rules = {name: [1] for name, _ in model.named_parameters()}
        return model, SlimAdamW(model.named_parameters(), rules=rules)
    table = torch.nn.Embedding(rows, dim, sparse=choice != "Adam", dtype=dtype)
    if choice == "Adam":
        return table, torch.optim.Adam(table.parameters(), fused=True)
    if choice == "SparseAdam":
        return table, torch.optim.SparseAdam(table.parameters())
    from lowmem import DSA

    return table, DSA(table.parameters(), directory=directory)


def step(model: Any, opt: Any, batch: int) -> None:
    if isinstance(model, torch.nn.Embedding):
        output = model(torch.randint(model.num_embeddings, (batch,)))
    else:
        weight = next(model.parameters())
        output = model(torch.randn(4, weight.shape[1], dtype=weight.dtype))
    output.float().mean().backward()
    opt.step()
    opt.zero_grad()


def main() -> None:
    choice, rows, dim, batch, dtype_name = sys.argv[1:]
    dtype = getattr(torch, dtype_name)
    # A small one first, so that imports and compilation are not counted as the step's.
    model, opt = build(choice, 8, 2, dtype, "warm")
    for _ in range(3):
        step(model, opt, 4)
    if hasattr(opt, "close"):
        opt.close()
    del model, opt
    runtime = anonymous_bytes()
    peak = Peak()
    peak.start()
    model, opt = build(choice, int(rows), int(dim), dtype, "state")
    for _ in range(3):
        step(model, opt, int(batch))
    time.sleep(0.002)
    peak.done.set()
    peak.join()
    files = [p for p in Path("state").glob("**/*") if p.is_file()] if choice == "DSA" else []
    disk = sum(os.stat(p).st_blocks * 512 for p in files)
    share = None
    if choice == "SlimAdamW":
        second = sum(opt.state[p]["exp_avg_sq"].numel() for p in model.parameters())
        share = second / sum(p.numel() for p in model.parameters())
    print(json.dumps({"runtime": runtime, "ram": peak.bytes, "disk": disk, "share": share}))


if __name__ == "__main__":
    main()
