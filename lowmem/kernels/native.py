"""What numba lacks: an address as a pointer, an atomic counter, and asking for a cache line."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    """An address as the pointer that ``carray`` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate


@intrinsic
def add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at ``address`` and return what was there; safe between threads."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(address, types.int64), generate


@njit(nogil=True, inline="always")
def take_next(address):
    """Add one to the int64 at ``address`` and return what was there; safe between threads."""
    return add(address, 1)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask the processor for the cache line at ``address``; no effect but time."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into the second level: the first has too few places for whole rows.
        read, level, data = (ir.Constant(number, n) for n in (0, 1, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, level, data])
        return context.get_dummy_value()

    return types.void(types.uintp), generate
