"""Which backend steps which parameter, and the views that it steps on.

A backend is a module with ``slim_adamw_`` and ``supports``: the numba kernels for the CPU,
the triton kernels for CUDA, and ``eager`` for everything else. The views of a parameter
are made once and kept for as long as its storage stays where it is.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowmem.slim import eager
from lowmem.slim.eager import is_dtensor
from lowmem.slim.rulesfile import Axes, Split
from lowmem.slim.state import cuts, moment_shape

logger = logging.getLogger(__name__)

_KERNELS = {"cpu": "lowmem.kernels.cpu_slim", "cuda": "lowmem.kernels.cuda"}


@functools.cache
def kernels(device: str) -> Any:
    """The kernels for a type of device, loaded on first use; ``None`` where there are none."""
    if device not in _KERNELS:
        return None
    if device == "cpu":
        logger.info("loading the CPU kernels; once per machine they are compiled")
    try:
        return importlib.import_module(_KERNELS[device])
    except ImportError as error:  # no triton, no numba
        logger.info("no fused kernels on %s, steps are eager: %s", device, error)
        return None


def backend_for(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, axes: Axes
) -> Any:
    """The fastest backend that takes this part."""
    found = kernels(param.device.type)
    plain = type(param) in (Tensor, nn.Parameter) and type(grad) is Tensor
    if found is None or not plain or not _aligned(param, exp_avg, exp_avg_sq):
        return eager
    return found if found.supports(param, grad, axes, exp_avg_sq.stride()) else eager


class Batch:
    """Parts that one call of one backend steps; ``places`` tell which step count is whose."""

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.exp_avg_sqs: list[Tensor] = []
        self.axes: list[Axes] = []
        self.places: list[int] = []


class Slot:
    """A parameter's parts: views of the parameter and of its moments, and their backends."""

    __slots__ = ("_backends", "_grad_key", "_key", "axes", "cuts", "exp_avg", "exp_avg_sq", "parts")

    def __init__(self, param: Tensor, state: dict[str, Any], rule: Axes | Split | None) -> None:
        self.exp_avg, self.exp_avg_sq = _restrided(param, state, rule)
        self.cuts = cuts(rule, tuple(param.shape)) if isinstance(rule, Split) else []
        self.axes = [cut.axes for cut in self.cuts] if self.cuts else [cast(Axes, rule or ())]
        self._key = _storage_key(param, self.exp_avg, self.exp_avg_sq)
        self._grad_key: Any = None
        self._backends: list[Any] = []
        self.parts = [(param, self.exp_avg, self.exp_avg_sq)]
        if self.cuts:
            self.parts = [
                (cut.of(param), cut.of(self.exp_avg), cut.of_moment(self.exp_avg_sq))
                for cut in self.cuts
            ]

    def serves(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether the views are still of this parameter's storage and state."""
        return (
            self.exp_avg is state["exp_avg"]
            and self.exp_avg_sq is state["exp_avg_sq"]
            and self._key is not None
            and self._key == _storage_key(param, self.exp_avg, self.exp_avg_sq)
        )

    def add_to(self, batches: dict[Any, Batch], grad: Tensor, place: int) -> None:
        """Put each part with its gradient into the batch of its backend."""
        # Views of the gradient are made anew: kept ones would keep a freed gradient alive.
        grads = [cut.of(grad) for cut in self.cuts] if self.cuts else [grad]
        key = (grad.stride(), grad.dtype, type(grad), grad.is_neg())
        if key != self._grad_key:
            self._backends = [
                backend_for(p, g, m, v, axes)
                for (p, m, v), g, axes in zip(self.parts, grads, self.axes, strict=True)
            ]
            self._grad_key = key
        for backend, (p, m, v), g, axes in zip(
            self._backends, self.parts, grads, self.axes, strict=True
        ):
            batch = batches.get(backend)
            if batch is None:
                batch = batches[backend] = Batch()
            batch.params.append(p)
            batch.grads.append(g)
            batch.exp_avgs.append(m)
            batch.exp_avg_sqs.append(v)
            batch.axes.append(axes)
            batch.places.append(place)


def zero_moment(param: Tensor, rule: Axes | Split | None) -> Tensor:
    """A second moment of zeros: float32, on the parameter's device, sharded as it is."""
    if rule is None:
        return torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
    shape = moment_shape(rule, tuple(param.shape))
    if is_dtensor(param):
        return _zero_dtensor(param, shape)
    return torch.zeros(shape, dtype=torch.float32, device=param.device)


def _zero_dtensor(param: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard, zeros

    # A mean over a sharded axis is the same on every rank.
    placements = [
        Replicate() if isinstance(place, Shard) and shape[place.dim] == 1 else place
        for place in param.placements
    ]
    return zeros(*shape, dtype=torch.float32, device_mesh=param.device_mesh, placements=placements)


def _storage_key(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Any, ...] | None:
    """What changes when any of the three gets another storage, layout or dtype."""
    if is_dtensor(param):
        return None
    return (
        param.data_ptr(),
        param.stride(),
        param.shape,
        param.dtype,
        exp_avg.data_ptr(),
        exp_avg.dtype,
        exp_avg_sq.data_ptr(),
        exp_avg_sq.dtype,
    )


def _restrided(
    param: Tensor, state: dict[str, Any], rule: Axes | Split | None
) -> tuple[Tensor, Tensor]:
    """Both moments, on the parameter's device, full-size ones laid out as the parameter is.

    They are not where the model has moved or changed its memory format since they were made.
    """
    shapes = {"exp_avg": tuple(param.shape), "exp_avg_sq": moment_shape(rule, tuple(param.shape))}
    for name, shape in shapes.items():
        if state[name].shape != shape:
            raise ValueError(
                f"a parameter has changed its shape to {tuple(param.shape)}, and its {name} of "
                f"shape {tuple(state[name].shape)} is for the old one: make a new optimizer"
            )
    if not is_dtensor(param):
        for name in shapes:
            if state[name].device != param.device:
                state[name] = state[name].to(param.device)
        names = ("exp_avg",) if rule is not None else ("exp_avg", "exp_avg_sq")
        for name in names:
            if state[name].stride() != param.stride():
                state[name] = torch.empty_like(param, dtype=state[name].dtype).copy_(state[name])
        if rule is not None:
            state["exp_avg_sq"] = state["exp_avg_sq"].contiguous()
    return state["exp_avg"], state["exp_avg_sq"]


def _aligned(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> bool:
    """Whether the moments are as kernels take them for granted."""
    return (
        exp_avg.stride() == param.stride()
        and exp_avg.dtype == param.dtype
        and exp_avg_sq.dtype == torch.float32
        and exp_avg.device == exp_avg_sq.device == param.device
    )
