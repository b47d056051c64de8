"""End to end: forward, backward and step of an embedding model, samples per second."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.bench.contenders import NAMES, Way
from lowmem.bench.counters import Device
from lowmem.bench.turns import Run, add_ratio, figures, hot_ways, table, take_turns
from lowmem.bench.workloads import WORKLOADS, Gradients, Ids


class Training(Way):
    """A whole training step with one contender: pairs of rows, logistic loss of their product."""

    def __init__(self, way: Way) -> None:
        super().__init__(way.param)
        self.name, self.takes_dense = way.name, way.takes_dense
        self.way = way
        self.ids = torch.empty(0, dtype=torch.int64)

    def step(self) -> None:
        vectors = F.embedding(self.ids, self.param, sparse=not self.takes_dense)
        left, right = vectors.view(-1, 2, self.param.shape[1]).unbind(1)
        loss: Tensor = F.softplus(-(left * right).sum(1)).mean()
        loss.backward()
        self.way.step()
        self.param.grad = None

    def state_bytes(self) -> dict[str, int]:
        return self.way.state_bytes()


@dataclass
class TrainingRun(Run):
    """A run whose gradients the model makes itself."""

    def load(self) -> None:
        assert isinstance(self.way, Training)
        self.way.ids = torch.from_numpy(self.grads.ids_at(self.number))
        self.number += 1


def end_to_end(
    names: Sequence[str],
    folder: Path,
    *,
    rows: int,
    dim: int,
    ids: Sequence[str],
    batch: int,
    seconds: float,
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Rows of the result: the same contenders as in ``hot``, in a training loop."""
    param = table(rows, dim)
    with contextlib.ExitStack() as stack:
        ways = [Training(way) for way in hot_ways(names, param, folder, stack)]
        param.data.uniform_(-0.1, 0.1)
        device = Device(folder)
        for source in [Ids(name, rows) for name in ids]:
            label = (
                f"end to end, forward, backward and step: {WORKLOADS[source.name]}, "
                f"{rows / 1e6:g}M × {dim}, {batch // 2:,} pairs a step"
            )
            grads = Gradients(source, batch, dim)
            runs = [TrainingRun(way, grads) for way in ways]
            take_turns(runs, seconds=seconds, device=device, label=label)
            group = [figures(run, limits, regime="end-to-end", workload=label) for run in runs]
            add_ratio(group, "to_sparse", NAMES["sparse-adam"])
            for row in group:
                row["samples_per_s"] = batch // 2 / row["step_s"]
                del row["rows_per_s"]
                row.pop("limit_share", None)
            yield from group
