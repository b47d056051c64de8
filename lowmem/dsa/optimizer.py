"""DSA: Adam for sparse embeddings whose moments live in a file."""

from __future__ import annotations

import functools
import logging
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from lowmem import interrupts
from lowmem.dsa import checkpoint, checks, dense, states, transfer
from lowmem.dsa.busy import CLOSED
from lowmem.dsa.estate import Durability, Estate
from lowmem.dsa.folder import Mode
from lowmem.dsa.residency import Prefetch
from lowmem.dsa.table import AdamScalars, Table, Touched, table_shape

log = logging.getLogger(__name__)


class DSA(Optimizer):
    r"""Disk Sparse Adam: a drop-in optimizer that keeps Adam's moments of embeddings on disk.

    A parameter's first gradient decides its home. A sparse one (``nn.Embedding`` and
    ``nn.EmbeddingBag`` with ``sparse=True``) gets a row store, a file in which the two
    moments of a row lie side by side and only touched rows move; its update equals
    ``torch.optim.SparseAdam``. A dense one gets ordinary in-memory Adam, equal to
    ``torch.optim.Adam``. Weights may be float32, bfloat16 or float16, on a CPU or a CUDA
    device; moments are float32 and take no device memory for sparse parameters.

    As in SparseAdam the step count is the parameter's, not the row's; duplicate ids sum;
    a row whose gradients sum to zero is still a touched row. NaN and infinite gradients
    are applied as torch applies them: the rows they touch become NaN. Use ``GradScaler``
    or :func:`lowmem.clip_grad_norm_` to notice them first.

    Args:
        params: what any torch optimizer takes: tensors, named parameters or groups.
        lr: learning rate (default: 1e-3).
        betas: decay rates of the two moments (default: (0.9, 0.999)).
        eps: added to the denominator (default: 1e-8).
        directory: folder for the stores, kept after ``close``. ``None`` (default) makes a
            scratch folder in the working directory, removed at ``close`` or exit.
        mode: ``"create"`` (default) refuses a folder that holds stores, ``"resume"`` goes
            on with them (after a crash from the last commit), ``"overwrite"`` replaces
            them, ``"resume-unclean"`` takes them as a crash left them.
        maximize: ascend instead of descend (default: False).
        prefetch: ask the disk for missing pages before the update touches them. ``"auto"``
            (default) while pages are missing, or ``"always"``, ``"never"``.
        durability: what a crash may cost, see :mod:`lowmem.dsa.journal`
            (default: ``"process"``).

    Raises:
        TypeError, ValueError: a hyper-parameter of the wrong kind, or outside its range.
        OSError: the folder cannot be written, holds stores or none against ``mode``, is
            held by another process, or its disk is too small.

    Warns:
        UserWarning: a group has ``weight_decay``, ``amsgrad`` or another such option of
            torch's Adam family, which DSA, like SparseAdam, does not use.

    Example:
        >>> table = torch.nn.Embedding(10_000_000, 128, sparse=True)
        >>> opt = DSA(table.parameters(), lr=1e-3, directory="moments")
        >>> table(torch.tensor([3, 5])).sum().backward()
        >>> opt.step(); opt.zero_grad(); opt.close()

    Source: Kingma and Ba, "Adam: a method for stochastic optimization" (2015),
    algorithm 1, on the rows that have a gradient.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        directory: str | os.PathLike[str] | None = None,
        mode: Mode = "create",
        maximize: bool = False,
        prefetch: Prefetch = "auto",
        durability: Durability = "process",
    ) -> None:
        # Numba, and the kernels compiled or loaded from its cache: what `import lowmem` and
        # the first step do not wait for.
        from lowmem.kernels import cpu, ids  # noqa: F401

        checks.require_choice("mode", mode, ("create", "resume", "overwrite", "resume-unclean"))
        checks.require_choice("prefetch", prefetch, ("auto", "always", "never"))
        checks.require_choice("durability", durability, ("process", "power", "none"))
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"DSA takes parameters, not a {type(params).__name__}: pass model.parameters()"
            )
        self._estate: Estate | None = None
        self._numbers: dict[Tensor, int] = {}
        self._labels: dict[Tensor, str] = {}
        self._told: set[tuple[int, str]] = set()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "maximize": maximize}
        super().__init__(params, defaults)
        checks.warn_of_unused(self.param_groups, self._told, stacklevel=2)
        estate = Estate(directory, mode, prefetch, durability)
        try:
            estate.adopt(self._numbers, self._labels)
            likely = sum(checks.moment_bytes(p) for p in self._numbers if checks.embedding_sized(p))
            estate.require_space(likely)
        except BaseException:
            estate.close()
            raise
        self._estate = estate
        # Runs when the optimizer is forgotten, and at interpreter exit.
        self._finalizer = weakref.finalize(self, estate.close)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch's wrapper of ``step``, passed by while there is no hook and no profiler.

        It opens a profiler's range at every step, which at a batch of a thousand rows takes a
        tenth of the step.
        """
        hooked = Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: DSA, *args: Any, **kwargs: Any) -> Any:
            watched = (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
                or torch.autograd._profiler_enabled()
            )
            return (hooked if watched else func)(self, *args, **kwargs)

        return step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as for any torch optimizer; its options are checked."""
        group = {**self.defaults, **param_group}
        checks.check_hyperparameters(group["lr"], group["betas"], group["eps"])
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        names = added.get("param_names") or [None] * len(added["params"])
        for param, name in zip(added["params"], names, strict=True):
            number = len(self._numbers)
            if param.is_sparse or param.is_complex():
                raise ValueError(
                    f"DSA takes dense, real parameters; parameter {number} is "
                    f"{'sparse' if param.is_sparse else param.dtype}"
                )
            if param in self._numbers:
                raise ValueError(f"parameter {number} stands twice in this optimizer's groups")
            self._numbers[param] = number
            self._labels[param] = name or f"parameter {number}"
        if self._estate is not None:  # while it is made, one warning speaks of all groups
            checks.warn_of_unused(self.param_groups, self._told, stacklevel=2)

    # -- stepping ----------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on every parameter that has a gradient.

        All gradients are checked before the first parameter changes: a step that raises
        for bad input has changed nothing.
        """
        estate = self._open_estate()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with estate.busy:
            self._step(estate)
        return loss

    def _step(self, estate: Estate) -> None:
        sparse: list[tuple[Table, Touched, dict[str, Any]]] = []
        in_ram: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            in_memory = []
            for param in group["params"]:
                grad = param.grad
                if grad is None or grad.numel() == 0:
                    continue
                table = estate.tables.get(param)
                if table is not None and grad.is_sparse:
                    sparse.append((table, self._gather(table, grad), group))
                elif self._lives_on_disk(param, grad):
                    table = self._table(param)
                    sparse.append((table, self._gather(table, grad), group))
                else:
                    in_memory.append(param)
            if in_memory:
                in_ram.append((group, in_memory))
        self._update(estate, sparse, in_ram)

    @torch.no_grad()
    def step_rows(self, param: Tensor, indices: Tensor, row_grads: Tensor) -> None:
        """One step of one table by hand, without autograd.

        Args:
            param: a parameter of this optimizer, ``(rows, dim)``.
            indices: rows that have a gradient, whole numbers ``(n,)``; duplicates sum.
            row_grads: their gradients, ``(n, dim)``.

        Raises:
            IndexError, ValueError, TypeError: as the message says; nothing has changed.
        """
        estate = self._open_estate()
        group = self._group_of(param)
        indices, row_grads = torch.as_tensor(indices), torch.as_tensor(row_grads)
        if indices.dim() != 1:
            raise ValueError(
                f"{self._labels[param]}: indices must have one dimension, not shape "
                f"{tuple(indices.shape)}"
            )
        with estate.busy:
            table = self._table(param)
            touched = table.touched(indices, row_grads)
            self._update(estate, [(table, touched, group)], [])

    @staticmethod
    def _gather(table: Table, grad: Tensor) -> Touched:
        if grad.sparse_dim() != 1:
            raise ValueError(
                f"{table.label}: the gradient has {grad.sparse_dim()} sparse dimensions; DSA "
                "updates whole rows, so it needs exactly one"
            )
        return table.touched(grad._indices(), grad._values())

    def _update(
        self,
        estate: Estate,
        sparse: list[tuple[Table, Touched, dict[str, Any]]],
        in_ram: list[tuple[dict[str, Any], list[Tensor]]],
    ) -> None:
        """The part of a step that changes things; what can fail comes first."""
        estate.require_whole()
        work = [
            (
                table,
                touched,
                AdamScalars.at_step(
                    table.step + 1, group["lr"], group["betas"], group["eps"], group["maximize"]
                ),
            )
            for table, touched, group in sparse
        ]
        for group, in_memory in in_ram:
            checks.check_hyperparameters(group["lr"], group["betas"], group["eps"])
            dense.prepare(in_memory, self.state, self._labels)
        for table, touched, _ in sparse:
            table.prepare(touched)
        with interrupts.whole(), estate.changing():
            for table, touched, scalars in work:
                table.update(touched, scalars)
            for group, in_memory in in_ram:
                dense.update(in_memory, self.state, group)

    # -- homes -------------------------------------------------------------------------

    def _lives_on_disk(self, param: Tensor, grad: Tensor) -> bool:
        label = self._labels[param]
        sparse = grad.layout == torch.sparse_coo
        if not sparse and grad.layout != torch.strided:
            raise ValueError(f"{label}: DSA takes dense and COO gradients, not {grad.layout}")
        on_disk = param in self._open_estate().tables
        if on_disk and not sparse:
            raise RuntimeError(
                f"{label} had sparse gradients until now and got a dense one. Is the table also "
                "used outside its embedding layer, as in tied weights? Then it needs sparse=False "
                "from the start"
            )
        if sparse and param in self.state:
            raise RuntimeError(
                f"{label} had dense gradients until now and got a sparse one; use sparse=True "
                "from the start"
            )
        if not sparse and param not in self.state and checks.embedding_sized(param):
            rows, dim = table_shape(param)
            warnings.warn(
                f"{label} ({rows:,} × {dim}) got a dense gradient, so its Adam moments take "
                f"{checks.moment_bytes(param) / 1e9:.2f} GB of memory. Pass sparse=True to its "
                "nn.Embedding or nn.EmbeddingBag to keep them on disk",
                stacklevel=5,
            )
        return sparse

    def _table(self, param: Tensor) -> Table:
        """The table of a parameter, made now if this is its first gradient."""
        estate = self._open_estate()
        if param in self.state:
            raise ValueError(
                f"{self._labels[param]} had dense gradients: its moments are in memory"
            )
        table = estate.tables.get(param)
        if table is None:
            table = estate.create(param, self._numbers[param], self._labels[param])
        return table

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(param is other for other in group["params"]):
                return group
        raise ValueError(f"this tensor of shape {tuple(param.shape)} is no parameter of this DSA")

    def _open_estate(self) -> Estate:
        estate = self._estate
        if estate is None or estate.closed:
            raise RuntimeError(CLOSED)
        estate.require_own_process()
        return estate

    # -- looking -----------------------------------------------------------------------

    def read_state(self, param: Tensor, indices: Tensor) -> dict[str, Tensor]:
        """Copies of the moments of some rows: ``{"exp_avg", "exp_avg_sq"}``, each ``(n, dim)``.

        A row that was never touched has zeros.
        """
        self._group_of(param)
        table = self._open_estate().tables.get(param)
        if table is not None:
            return table.read(torch.as_tensor(indices))
        ids = torch.as_tensor(indices)
        state = self.state.get(param) or {}
        return {
            name: state[name][ids].clone()
            if name in state
            else torch.zeros(len(ids), *param.shape[1:])
            for name in ("exp_avg", "exp_avg_sq")
        }

    def state_bytes(self) -> dict[str, int]:
        """Measured bytes of optimizer state: ``{"vram", "ram", "disk"}``.

        ``disk`` is what the file system counts for the stores; ``ram`` and ``vram`` are the
        in-memory moments of dense parameters. The stores' pages in the page cache are not
        counted: the system takes them back whenever it needs memory.
        """
        sizes = {"vram": 0, "ram": 0, "disk": self._open_estate().disk_bytes()}
        for state in self.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    sizes["vram" if value.is_cuda else "ram"] += value.nbytes
        return sizes

    # -- saving and loading ------------------------------------------------------------

    def state_dict(self, materialize: bool = False) -> dict[str, Any]:
        """Hyper-parameters, in-memory moments, and each store's identity and step.

        Args:
            materialize: include the stores' moments as tensors, in the format of
                ``torch.optim.SparseAdam``. Takes memory for the whole tables.
        """
        return states.save(super().state_dict(), self._open_estate(), self._numbers, materialize)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, or a ``torch.optim.SparseAdam`` state_dict.

        Raises:
            StoreError: the stores here are not the ones that the state_dict speaks of, or
                stand at another step.
            ValueError: groups, parameters or shapes that do not match.
        """
        estate = self._open_estate()
        with estate.busy:
            self._load(state_dict, estate)

    def _load(self, state_dict: dict[str, Any], estate: Estate) -> None:
        params = list(self._numbers)
        plan = states.check(state_dict, self.param_groups, params, self._labels, estate, self.state)
        for number in plan.on_disk:
            states.protect(self._table(params[number]))
        super().load_state_dict(plan.in_memory)
        checks.warn_of_unused(self.param_groups, self._told, stacklevel=3)
        for number in plan.removed:
            estate.remove(params[number], number)
        for number in plan.rolled_back:
            estate.roll_back(estate.tables[params[number]], number)
        with interrupts.whole(), estate.changing():
            for number, entry in plan.on_disk.items():
                states.write(self._table(params[number]), entry)

    def commit(self) -> None:
        """Make this step the one to come back to after a crash; belongs beside ``torch.save``.

        Costs what was touched since the last commit, not the table. To write weights and
        commit as one, use :meth:`save_checkpoint`.

        Raises:
            ValueError: a scratch folder (``directory=None``), to which nothing comes back.
            OSError: the disk is full; the commit before still holds.
        """
        estate = self._open_estate()
        with estate.busy:
            estate.commit()

    def save_checkpoint(
        self, path: str | os.PathLike[str], model: torch.nn.Module, extra: Any = None
    ) -> None:
        """Write model, optimizer and the stores' commit as one file, whole or not at all.

        Args:
            path: the file to write; an older one is replaced by one rename at the end.
            model: its ``state_dict`` is saved. The stores are not copied: the file says
                which step of them belongs to it.
            extra: anything of tensors, numbers, strings, lists and dicts (a scheduler's
                state, a random state), returned by :meth:`load_extra`.

        Raises:
            IsADirectoryError: ``path`` is a folder.
            TypeError: something that a checkpoint cannot hold; none was written.
        """
        checks.require_path_first(path)
        target = checks.checkpoint_path(path)
        estate = self._open_estate()
        with estate.busy:
            checkpoint.save(target, self, model, extra, estate)

    def load_checkpoint(self, path: str | os.PathLike[str], model: torch.nn.Module) -> int:
        """Load what :meth:`save_checkpoint` wrote; return the step that it holds.

        Rows that are ahead of the checkpoint are rolled back if it is the last commit.

        Raises:
            StoreError: the stores here are others, or cannot go back to that step.
            IsADirectoryError: ``path`` is a folder.
            ValueError: it is no checkpoint, or one of another model.
        """
        checks.require_path_first(path)
        return checkpoint.load(path, self, model)

    def load_extra(self, path: str | os.PathLike[str]) -> Any:
        """The ``extra`` of a checkpoint."""
        return checkpoint.read(path)["extra"]

    def export(self, directory: str | os.PathLike[str]) -> None:
        """Make an independent copy of the stores at this step, for another disk or machine.

        May be interrupted: a second call skips what is there already. While it runs, the copy
        of the call before is gone, so keep two folders in turn where that matters. A
        checkpoint of this step fits the copy. Takes no memory beyond a few blocks.

        Args:
            directory: an empty or new folder, or one with an earlier export of these stores.

        Raises:
            FileExistsError: the folder holds other stores.
            OSError: too little space, with both figures; training may go on.
        """
        estate = self._open_estate()
        with estate.busy:
            estate.export(Path(directory).expanduser().absolute())

    @staticmethod
    def import_(
        directory: str | os.PathLike[str], to: str | os.PathLike[str] | None = None
    ) -> Path:
        """Check what :meth:`export` wrote, byte for byte, and copy it to ``to`` if given.

        Returns:
            the folder to pass as ``directory=`` with ``mode="resume"``.

        Raises:
            FileNotFoundError: no export, or one that was broken off.
            StoreError: a file does not match its checksums; the rows are named.
            FileExistsError: ``to`` holds stores already.
        """
        source = Path(directory).expanduser().absolute()
        return transfer.import_(source, None if to is None else Path(to).expanduser().absolute())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DSA holds open files and cannot be pickled or deep-copied; save its state_dict()"
        )

    # -- the end -----------------------------------------------------------------------

    def close(self) -> None:
        """Close the stores; scratch folders are removed. Further steps raise."""
        if self._estate is not None:
            self._finalizer()

    def __enter__(self) -> DSA:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
