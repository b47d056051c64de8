"""What a person could use for a large embedding instead of DSA, and DSA, with one face.

Every contender reads ``param.grad`` as autograd left it and changes ``param`` in place.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowmem.bench.counters import holding
from lowmem.dsa.header import HEADER_BYTES
from lowmem.dsa.layout import RowLayout
from lowmem.dsa.optimizer import DSA, Durability

NAMES = {
    "adam": "dense Adam, RAM",
    "sparse-adam": "SparseAdam, RAM",
    "memmap": "memmap",
    "memmap-random": "memmap, MADV_RANDOM",
    "dsa": "DSA",
}
LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")


class Way:
    """One contender on one table.

    Attributes:
        held_bytes: memory that it holds between steps, cached file pages apart; measured by
            whoever makes it.
    """

    name: str
    on_disk = True
    takes_dense = False
    held_bytes = 0

    def __init__(self, param: Tensor) -> None:
        self.param = param

    def step(self) -> None:
        """One optimizer step on ``param.grad``; this is what is timed."""
        raise NotImplementedError

    def state_bytes(self) -> dict[str, int]:
        """Bytes of optimizer state: ``{"ram", "vram", "disk"}``."""
        raise NotImplementedError

    def moments(self) -> list[Tensor]:
        """Both moments of all rows, for the comparison; small tables only."""
        raise NotImplementedError

    def touch_all(self) -> None:
        """Give every row of the state a value."""

    def flush(self) -> None:
        """Return when the state is on the disk."""

    def evict(self) -> None:
        """Write the state back and drop it from memory."""

    def places(self) -> list[tuple[int, int]]:
        """``(address of row 0, bytes a row)`` of every region of the file that a row has."""
        return []

    def close(self) -> None:
        """Give everything back."""


class InMemory(Way):
    """``torch.optim.SparseAdam``, or ``torch.optim.Adam`` on a dense gradient."""

    on_disk = False

    def __init__(self, param: Tensor, dense: bool = False) -> None:
        super().__init__(param)
        kind = torch.optim.Adam if dense else torch.optim.SparseAdam
        self.takes_dense = dense
        self.name = NAMES["adam" if dense else "sparse-adam"]
        self._optimizer = kind([param], lr=LR, betas=BETAS, eps=EPS)
        self.step = self._optimizer.step  # type: ignore[method-assign]

    def touch_all(self) -> None:
        for moment in self.moments():
            moment.fill_(1e-3)

    def moments(self) -> list[Tensor]:
        state = self._optimizer.state[self.param]
        return [state[name] for name in MOMENTS]

    def state_bytes(self) -> dict[str, int]:
        state = self._optimizer.state[self.param].values()
        return {"ram": sum(t.nbytes for t in state if torch.is_tensor(t)), "vram": 0, "disk": 0}

    def close(self) -> None:
        self._optimizer.state.clear()


class Memmap(Way):
    """Adam with the moments in two ``np.memmap`` files, as this idea was first described.

    The gradient is made unique and summed, the rows' moments are read by fancy indexing,
    updated, and written back. With ``random`` the file is advised ``MADV_RANDOM``; rows are
    sorted in either case, because that is how unique ids come.

    Args:
        files: the two files, or one file that holds both regions one after the other.
        offset: bytes before the first row in a file.
    """

    def __init__(
        self, param: Tensor, files: list[Path], random: bool = False, offset: int = 0
    ) -> None:
        super().__init__(param)
        self.name = NAMES["memmap-random" if random else "memmap"]
        shape = tuple(param.shape)
        size = param.numel() * 4
        self._maps: list[np.memmap] = []
        for path in dict.fromkeys(files):
            each = len(MOMENTS) if len(set(files)) == 1 else 1
            for region in range(each):
                at = offset + region * size
                self._maps.append(
                    np.memmap(path, np.float32, "r+", offset=at, shape=shape)
                    if path.exists()
                    else np.memmap(path, np.float32, "w+", offset=at, shape=shape)
                )
        self._count = 0
        if random and hasattr(mmap, "MADV_RANDOM"):
            self._advise(mmap.MADV_RANDOM)

    @torch.no_grad()
    def step(self) -> None:
        grad = self.param.grad
        assert grad is not None
        ids, inverse = torch.unique(grad._indices()[0], return_inverse=True)
        summed = torch.zeros(len(ids), grad.shape[1]).index_add_(0, inverse, grad._values())
        rows = ids.numpy()
        exp_avg, exp_avg_sq = self._maps
        m = torch.from_numpy(exp_avg[rows])
        v = torch.from_numpy(exp_avg_sq[rows])
        m.lerp_(summed, 1 - BETAS[0])
        v.mul_(BETAS[1]).addcmul_(summed, summed, value=1 - BETAS[1])
        exp_avg[rows] = m.numpy()
        exp_avg_sq[rows] = v.numpy()
        self._count += 1
        rate = LR * (1 - BETAS[1] ** self._count) ** 0.5 / (1 - BETAS[0] ** self._count)
        self.param.index_add_(0, ids, m.div_(v.sqrt_().add_(EPS)), alpha=-rate)

    def touch_all(self) -> None:
        for moment in self._maps:
            moment[:] = 1e-3

    def moments(self) -> list[Tensor]:
        return [torch.from_numpy(np.array(moment)) for moment in self._maps]

    def state_bytes(self) -> dict[str, int]:
        return {"ram": 0, "vram": 0, "disk": sum(moment.nbytes for moment in self._maps)}

    def flush(self) -> None:
        for moment in self._maps:
            moment.flush()

    def evict(self) -> None:
        self.flush()
        self._advise(getattr(mmap, "MADV_DONTNEED", None))
        for path in {str(moment.filename) for moment in self._maps}:
            drop_cache(path)

    def places(self) -> list[tuple[int, int]]:
        return [(moment.ctypes.data, moment.strides[0]) for moment in self._maps]

    def close(self) -> None:
        self._maps.clear()

    def _advise(self, advice: int | None) -> None:
        for moment in self._maps:
            if advice is not None:
                moment._mmap.madvise(advice)  # type: ignore[attr-defined]


class Disk(Way):
    """DSA on a folder of its own."""

    name = NAMES["dsa"]

    def __init__(self, param: Tensor, directory: Path, durability: Durability = "process") -> None:
        super().__init__(param)
        self._optimizer = DSA(
            [param], lr=LR, betas=BETAS, eps=EPS, directory=directory, durability=durability
        )
        self.step = self._optimizer.step  # type: ignore[method-assign]

    @property
    def store(self):  # type: ignore[no-untyped-def]
        """The table's store, made if no step has been taken yet."""
        table = self._optimizer._table(self.param)
        return table.store

    def commit(self) -> None:
        self._optimizer.commit()

    def touch_all(self) -> None:
        # By steps, not behind the store's back: its checksums must hold at a commit.
        self.touch(np.arange(self.param.shape[0]))

    def touch(self, rows: np.ndarray) -> None:
        """Take steps that update each of the different ``rows`` once."""
        for start in range(0, len(rows), 1 << 16):
            ids = torch.from_numpy(rows[start : start + (1 << 16)])
            grads = torch.full((len(ids), self.param.shape[1]), 1e-2)
            self._optimizer.step_rows(self.param, ids, grads)

    def moments(self) -> list[Tensor]:
        state = self._optimizer.read_state(self.param, torch.arange(self.param.shape[0]))
        return [state[name] for name in MOMENTS]

    def state_bytes(self) -> dict[str, int]:
        return self._optimizer.state_bytes()

    def flush(self) -> None:
        self.store.flush()

    def evict(self) -> None:
        self.store.evict()

    def places(self) -> list[tuple[int, int]]:
        return [(self.store.address, self.store.layout.row_bytes)]

    def close(self) -> None:
        self._optimizer.close()


def make(name: str, param: Tensor, folder: Path) -> Way:
    """The contender called ``name`` (a key of ``NAMES``) with new files in ``folder``."""
    if name in ("adam", "sparse-adam"):
        return InMemory(param, dense=name == "adam")
    if name == "dsa":
        return Disk(param, folder / "dsa")
    files = [folder / f"{name}-{moment}.bin" for moment in MOMENTS]
    for path in files:
        path.unlink(missing_ok=True)
    return Memmap(param, files, random=name == "memmap-random")


def make_shared(names: list[str], param: Tensor, folder: Path) -> list[Way]:
    """Contenders on disk that all keep their state in DSA's one file.

    A table of 10 GB is then on the disk once and not three times. The contenders read its
    bytes in their own order: DSA row by row, the memmap ones as two halves.
    """
    with holding() as held:
        disk = Disk(param, folder / "dsa")
        path = disk.store.path
    disk.held_bytes = held.bytes
    assert RowLayout.adam(param.shape[1]).row_bytes == 8 * param.shape[1]
    ways: list[Way] = [
        Memmap(param, [path, path], random=name == "memmap-random", offset=HEADER_BYTES)
        for name in names
        if name.startswith("memmap")
    ]
    return [*ways, disk]


def drop_cache(path: str | os.PathLike[str]) -> None:
    """Write a file back and drop its pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
