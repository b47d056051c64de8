"""End to end: forward, backward and step of an embedding model, samples per second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem.bench.contenders import Way
from lowmem.bench.turns import Run, meet


class Training(Way):
    """A whole training step with one contender: pairs of rows, logistic loss of their product."""

    def __init__(self, way: Way) -> None:
        super().__init__(way.param)
        self.name, self.takes_dense, self.held_bytes = way.name, way.takes_dense, way.held_bytes
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

    def places(self) -> list[tuple[int, int]]:
        return self.way.places()


@dataclass
class TrainingRun(Run):
    """A run whose gradients the model makes itself: they are part of the step's memory."""

    gradient_bytes = 0

    def load(self) -> None:
        assert isinstance(self.way, Training)
        self.way.ids = torch.from_numpy(self.grads.ids_at(self.number))
        self.number += 1


def end_to_end(
    ways: Sequence[Way],
    folder: Path,
    *,
    ids: Sequence[str],
    batch: int,
    seconds: float,
    limits: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Rows of the result: the same contenders as in ``hot``, in a training loop."""
    ways[0].param.data.uniform_(-0.1, 0.1)
    for row in meet(
        [Training(way) for way in ways],
        folder,
        "end to end (forward, backward, step; pairs of ids)",
        regime="end-to-end",
        ids=ids,
        batches=[batch],
        seconds=seconds,
        limits=limits,
        against={"to_sparse": "sparse-adam"},
        kind=TrainingRun,
    ):
        row["samples_per_s"] = batch // 2 / row["step_s"]
        del row["rows_per_s"]
        row.pop("limit_share", None)
        yield row
