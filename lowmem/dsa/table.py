"""One parameter and its row store: checking a gradient, and updating the touched rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowmem.dsa.journal import Journal
from lowmem.dsa.layout import RowLayout
from lowmem.dsa.residency import Prefetch, Residency
from lowmem.dsa.store import RowStore
from lowmem.kernels.threads import run_team, thread_count

_BYTES_PER_THREAD = 1 << 20  # of traffic; less is done sooner than a thread is woken
_HALF = {torch.bfloat16, torch.float16}
_WEIGHT_DTYPES = {torch.float32, *_HALF}
_WHOLE_NUMBERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


class AdamScalars(NamedTuple):
    """What one step of Adam needs besides tensors (Kingma and Ba 2015, end of section 2)."""

    sign: float
    one_minus_beta1: float
    one_minus_beta2: float
    step_size: float
    eps: float

    @classmethod
    def at_step(
        cls, step: int, lr: float, betas: tuple[float, float], eps: float, maximize: bool
    ) -> AdamScalars:
        beta1, beta2 = float(betas[0]), float(betas[1])
        step_size = float(lr) * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
        return cls(-1.0 if maximize else 1.0, 1 - beta1, 1 - beta2, step_size, float(eps))


class Touched(NamedTuple):
    """The rows that a gradient touches, checked and sorted; the input of one update.

    Valid until the table's next gradient: the keys and the rows are in the table's buffers.
    """

    grads: Tensor  # float32 (n, dim), contiguous, on the CPU
    rows: np.ndarray  # int64, the different rows, sorted
    fresh: int  # rows that were not touched since the last commit
    threads: int


class _Buffers:
    """Arrays for batches of up to ``count`` ids, and the job that names their addresses."""

    def __init__(self, count: int, parts: int, store: RowStore, dim: int) -> None:
        from lowmem.kernels import ids

        self.count, self.parts = count, parts
        self.keys = np.empty((2, count), np.int64)  # row << shift | position; and to sort into
        self.rows = np.empty(count, np.int64)  # the different rows
        self.digits = np.empty(1 << ids.DIGIT_BITS, np.int64)  # counters of the sort
        self.bounds = np.empty(parts + 1, np.int64)  # slices of the keys; no row is in two
        self.firsts = np.empty(parts, np.int64)  # different rows before each slice
        self.scalars = np.empty(5, np.float32)
        self.job = job = np.zeros(ids.JOB_SIZE, np.int64)
        self.address = job.ctypes.data
        job[ids.ROWS], job[ids.DIM], job[ids.STATE] = store.rows, dim, store.address
        for place, array in (
            (ids.KEYS, self.keys[0]),
            (ids.SPARE, self.keys[1]),
            (ids.FOUND, self.rows),
            (ids.DIGITS, self.digits),
            (ids.BOUNDS, self.bounds),
            (ids.FIRSTS, self.firsts),
            (ids.SCALARS, self.scalars),
        ):
            job[place] = array.ctypes.data


def table_shape(param: Tensor) -> tuple[int, int]:
    """``(rows, dim)`` of a parameter: dimensions after the first are flattened."""
    if param.dim() == 0:
        raise ValueError("a table needs at least one dimension; this parameter is a scalar")
    return param.shape[0], max(1, int(np.prod(param.shape[1:], dtype=np.int64)))


def require_table(param: Tensor, label: str) -> None:
    """Raise for weights that float32 moments do not go with, or that share their memory.

    Raises:
        TypeError: neither float32 nor of half precision.
        ValueError: expanded weights, which no optimizer can change one by one.
    """
    if param.dtype not in _WEIGHT_DTYPES:
        raise TypeError(
            f"{label} has {param.dtype} weights; DSA keeps float32 moments, so its tables are "
            "float32, bfloat16 or float16"
        )
    strides = param.stride()
    if any(size > 1 and not stride for size, stride in zip(param.shape, strides, strict=True)):
        raise ValueError(
            f"{label} is expanded: its {tuple(param.shape)} weights share memory, with strides "
            f"{strides}. clone() it before training"
        )


class Table:
    """A parameter whose two moments live in a row store.

    Raises:
        TypeError, ValueError: weights that :func:`require_table` refuses.
    """

    def __init__(self, param: Tensor, store: RowStore, prefetch: Prefetch, label: str) -> None:
        require_table(param, label)
        self.param = param
        self.store = store
        self.label = label
        self.step = 0
        self.journal: Journal | None = None
        self.residency = Residency(store, prefetch)
        self.rows, self.dim = table_shape(param)
        self._shape = param.shape
        self._row_traffic = 7 * 4 * self.dim  # moments and weight twice, gradient once
        self._device = param.device
        from lowmem.kernels import cpu, ids

        self._ids, self._adam_team = ids, cpu.adam_team
        self._buffers = _Buffers(0, 1, store, self.dim)

    @staticmethod
    def layout(param: Tensor) -> RowLayout:
        return RowLayout.adam(table_shape(param)[1])

    # -- checking ----------------------------------------------------------------------

    def touched(self, indices: Tensor, row_grads: Tensor) -> Touched:
        """Check ``indices`` ``(n,)`` and ``row_grads`` ``(n, dim)``; sort the indices.

        Raises:
            IndexError: an index is negative or not smaller than the number of rows.
            ValueError, TypeError: shapes or dtypes that do not fit.
            RuntimeError: the parameter changed its shape or device since its store was made.
        """
        param = self.param
        if param.shape != self._shape or param.device != self._device:
            raise RuntimeError(
                f"{self.label} is {tuple(param.shape)} on {param.device} now; its moments were "
                f"made for {tuple(self._shape)} on {self._device}. Make a new optimizer after "
                "resizing or moving a model"
            )
        if indices.dtype is not torch.int64 or not _at_hand(indices):
            indices = self._whole_numbers(indices)
        if row_grads.dtype is not torch.float32 or not _at_hand(row_grads):
            row_grads = self._floats(row_grads)
        count = indices.numel()
        if row_grads.shape[:1] != (count,) or row_grads.numel() != count * self.dim:
            raise ValueError(
                f"{self.label}: row gradients have shape {tuple(row_grads.shape)}; "
                f"{count} indices of rows with {self.dim} weights need ({count}, {self.dim})"
            )
        threads = min(thread_count(), 1 + count * self._row_traffic // _BYTES_PER_THREAD)
        # More parts than threads: who is held up leaves more to the others.
        parts = 1 if threads == 1 else 4 * threads
        buffers = self._buffers
        if buffers.count < count or buffers.parts < parts:
            buffers = self._buffers = _Buffers(count, parts, self.store, self.dim)
        ids, job = self._ids, buffers.job
        job[ids.COUNT], job[ids.PARTS] = count, parts
        job[ids.IDS], job[ids.GRADS] = indices.data_ptr(), row_grads.data_ptr()
        job[ids.TARGET] = param.data_ptr()
        job[ids.TOUCHED] = 0 if self.journal is None else self.journal.touched_address
        ids.sort_ids.ctypes(buffers.address)
        bad, unique, fresh = job[ids.BAD : ids.FRESH + 1].tolist()
        if bad >= 0:
            raise IndexError(
                f"{self.label}: index {int(indices.view(-1)[bad])} is out of range; the table "
                f"has {self.rows:,} rows (0 to {self.rows - 1:,})"
            )
        if bad == ids.SHARED:  # the update would change gradients that it has not read yet
            row_grads = row_grads.clone()
            job[ids.GRADS] = row_grads.data_ptr()
        return Touched(row_grads, buffers.rows[:unique], fresh, threads)

    def _whole_numbers(self, indices: Tensor) -> Tensor:
        if indices.dtype not in _WHOLE_NUMBERS:
            raise TypeError(f"{self.label}: indices must be whole numbers, not {indices.dtype}")
        return to_host(indices, torch.int64)

    def _floats(self, row_grads: Tensor) -> Tensor:
        if not row_grads.dtype.is_floating_point:
            raise TypeError(f"{self.label}: row gradients must be floats, not {row_grads.dtype}")
        return to_host(row_grads, torch.float32)

    # -- updating ----------------------------------------------------------------------

    def prepare(self, touched: Touched) -> None:
        """Ask for missing pages, and keep the old bytes of rows touched since the last commit.

        Raises:
            OSError: the journal's disk is full; nothing has changed.
        """
        if self.residency.asking:
            self.residency.ask(touched.rows)
        if touched.fresh and self.journal is not None:
            self.journal.protect(touched.rows)

    def update(self, touched: Touched, scalars: AdamScalars) -> None:
        """Adam on the touched rows: moments in the store, weights where they are."""
        self.step += 1
        if touched.rows.size == 0:
            return
        weight = self.param
        if weight.dtype is torch.float32 and _at_hand(weight):
            faults = self._run_kernel(touched, scalars, weight, emit=False)
        else:
            faults = self._update_elsewhere(touched, scalars, weight.detach())
        torch.autograd.graph.increment_version(weight)
        self.residency.after_step(touched.rows.size, faults)

    def _run_kernel(
        self, touched: Touched, scalars: AdamScalars, target: Tensor, emit: bool
    ) -> int:
        """Run the update on ``target``; return how many page faults waited for the disk."""
        ids, buffers = self._ids, self._buffers
        buffers.scalars[:] = scalars
        job = buffers.job
        job[ids.TARGET], job[ids.EMIT] = target.data_ptr(), emit
        job[ids.NEXT] = job[ids.FAULTS] = 0
        run_team(self._adam_team, buffers.address, touched.threads)
        return int(job[ids.FAULTS])

    def _update_elsewhere(self, touched: Touched, scalars: AdamScalars, weight: Tensor) -> int:
        """For weights on another device, of another dtype or not contiguous.

        The kernel leaves the negative update of each different row in one buffer, and only
        that buffer crosses to the device: no optimizer state is ever there.
        """
        count, dim = touched.rows.size, self.dim
        cuda = weight.device.type == "cuda"
        # The host, whatever torch.set_default_device says.
        change = torch.empty((count, dim), dtype=torch.float32, device="cpu", pin_memory=cuda)
        rows = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=cuda)
        rows.numpy()[:] = touched.rows
        faults = self._run_kernel(touched, scalars, change, emit=True)
        # Pinned buffers go back to torch's caching allocator, which waits for the copy's
        # stream before it gives them out again.
        rows = rows.to(weight.device, non_blocking=True)
        change = change.to(weight.device, non_blocking=True).view(count, *weight.shape[1:])
        if weight.dtype not in _HALF:  # doubles, where a model became that later
            weight.index_add_(0, rows, change.to(weight.dtype))
        else:
            # Added in float32 and rounded once, as a kernel on the device would do it.
            weight[rows] = (weight[rows].float() + change).to(weight.dtype)
        return faults

    # -- moments as tensors ------------------------------------------------------------

    def read(self, indices: Tensor) -> dict[str, Tensor]:
        """The moments of the rows ``indices``, as CPU tensors of shape ``(n, *row shape)``."""
        ids = to_host(indices).numpy()
        rows = self.store.rows
        if ids.size and (ids.min() < 0 or ids.max() >= rows):
            bad = ids[(ids < 0) | (ids >= rows)][0]
            raise IndexError(f"{self.label}: index {bad} is out of range for {rows:,} rows")
        shape = (len(ids), *self.param.shape[1:])
        return {
            name: torch.from_numpy(array).reshape(shape)
            for name, array in self.store.read(ids).items()
        }


def _at_hand(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def to_host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor in memory, contiguous; the tensor itself where nothing is to be done."""
    if tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        tensor = pinned
    return tensor.detach().to("cpu", dtype).contiguous()
