"""Every backend of the SlimAdamW step against the reference in float64, by one list of cases."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from torch import Tensor

from lowmem.slim import eager, reference

HYPER = {
    "lr": 1e-2,
    "beta1": 0.9,
    "beta2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.1,
}


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def transposed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))


def channels_last(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    order = (0, *range(2, len(shape)), 1) if len(shape) > 2 else tuple(range(len(shape)))
    inverse = sorted(range(len(shape)), key=order.__getitem__)
    return torch.empty([shape[i] for i in order], dtype=dtype).permute(*inverse)


def columns_of_wider(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty((*shape[:-1], shape[-1] + 13), dtype=dtype)[..., 5 : 5 + shape[-1]]


def rows_of_taller(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty((shape[0] + 9, *shape[1:]), dtype=dtype)[4 : 4 + shape[0]]


LAYOUTS = {
    layout.__name__: layout
    for layout in (dense, transposed, channels_last, columns_of_wider, rows_of_taller)
}
DIMS = [
    (1,),
    (7,),
    (1000,),
    (1, 40),
    (40, 1),
    (5, 3),
    (33, 20),
    (64, 128),
    (131, 513),
    (1, 6, 8),
    (3, 10, 24),
    (6, 4, 3, 3),
    (3, 5, 2, 2, 2),
]
# Shapes that reach the kernels' own cuts: long rows, wide panels, several blocks of rows.
LARGE = [(70_001,), (2, 70_001), (9, 8_200), (4_200, 10), (1_100, 1_000), (3, 400, 9)]
# For triton's interpreter, which is slow: several tiles and several turns of each loop.
FEW = [(1,), (1, 40), (5, 3), (70, 130), (3, 1_500), (3, 10, 24), (6, 4, 3, 3)]


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    backend: str

    @property
    def maximize(self) -> bool:
        return sum(self.axes) % 2 == 1

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        axes = "".join(map(str, self.axes)) or "none"
        return f"{self.backend}-{shape}-{axes}-{self.layout}-{str(self.dtype)[6:]}"


def axis_sets(dim: int) -> list[tuple[int, ...]]:
    if dim <= 3:
        return [c for size in range(dim + 1) for c in combinations(range(dim), size)]
    spatial = tuple(range(2, dim))
    return [(), (0, *spatial), (1, *spatial), spatial, tuple(range(dim)), (0,), (1,)]


def cases() -> list[Case]:
    found = []
    for backend in ("cpu", "eager", "cuda"):
        for shape in DIMS if backend != "cuda" else FEW:
            for axes in axis_sets(len(shape)):
                layouts = list(LAYOUTS)
                if math.prod(shape) >= 10_000:
                    layouts = ["dense", "transposed"]
                elif backend == "cuda":  # the interpreter is slow
                    layouts = ["dense", "columns_of_wider"]
                for layout in layouts:
                    found.append(Case(shape, axes, torch.float32, layout, backend))
                if backend != "cpu":
                    for dtype in (torch.bfloat16, torch.float16):
                        found.append(Case(shape, axes, dtype, "dense", backend))
        for shape in LARGE if backend != "cuda" else LARGE[:0]:
            for axes in axis_sets(len(shape)):
                found.append(Case(shape, axes, torch.float32, "dense", backend))
    return found


def backend_of(name: str):
    if name == "cpu":
        return importlib.import_module("lowmem.kernels.cpu_slim")
    if name == "eager":
        return eager
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("run in a process of its own: tests/kernels/test_slim_triton.py does")
    return importlib.import_module("lowmem.kernels.cuda")


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("case", cases(), ids=str)
def test_backend_equals_reference(case: Case) -> None:
    backend = backend_of(case.backend)
    generator = torch.Generator().manual_seed(sum(case.shape))
    make = LAYOUTS[case.layout]
    param, moment = make(case.shape, case.dtype), make(case.shape, case.dtype)
    param.copy_(torch.randn(case.shape, generator=generator))
    moment.zero_()
    grad = make(case.shape, case.dtype)
    kept = [1 if axis in case.axes else size for axis, size in enumerate(case.shape)]
    second = torch.zeros(kept) if case.axes else torch.zeros_like(param, dtype=torch.float32)
    exact = [t.double().contiguous() for t in (param, moment, second)]
    if not backend.supports(param, grad, case.axes):
        long_on_cuda = case.backend == "cuda" and len(case.axes) == len(case.shape)
        assert case.layout != "dense" or len(case.shape) > 2 or long_on_cuda
        pytest.skip("the eager path takes this one")
    for step in (1, 2, 3):
        grad.copy_(torch.randn(case.shape, generator=generator) * 10.0**-step)
        arguments = {**HYPER, "maximize": case.maximize}
        backend.slim_adamw_([param], [grad], [moment], [second], [case.axes], [step], **arguments)
        reference.slim_adamw_(
            *([t] for t in (exact[0], grad.double(), *exact[1:])), [case.axes], [step], **arguments
        )
    tolerance = TOLERANCE[case.dtype]
    for ours, theirs in zip((param, moment, second), exact, strict=True):
        torch.testing.assert_close(
            ours.double(), theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max())
        )
