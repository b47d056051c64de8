"""Two things that numba lacks: an address as a pointer, and an atomic counter."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as the pointer that ``carray`` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


@intrinsic
def take_next(typing_context: Any, address: Any) -> Any:
    """Add one to the int64 at ``address`` and return what was there; safe between threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(address), generate
