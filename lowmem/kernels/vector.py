"""Loops over float32 arrays, sixteen elements at a time, whose instructions are ours to say.

Numba's compiler turns a plain loop into vector instructions only where it can prove, or test
cheaply, that the arrays do not overlap; with four or five arrays, or a prefetch in the body,
it gives up. And it may sum in one order here and in another there. ``loop`` makes the vector
loop directly. Its body is a Python function on ``Lanes``, called twice while compiling: for
sixteen elements, and for one (what is left at the end).

>>> @loop("p g", "rate")
... def descend(at, rate):
...     at.store("p", at.load("p") - rate * at.load("g"))

makes ``descend((p, g), count, (rate,))`` for numba's nopython mode, with addresses of float32.
Where sixteen are more than the machine's vectors hold, the compiler takes several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16

_FLOAT, _INT64, _INT32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, WIDTH)


class Value:
    """A float32, or sixteen, in the code that is being made."""

    def __init__(self, lanes: Lanes, value: Any) -> None:
        self.lanes, self.value = lanes, value

    def __add__(self, other: Value) -> Value:
        return Value(self.lanes, self.lanes.builder.fadd(self.value, other.value))

    def __sub__(self, other: Value) -> Value:
        return Value(self.lanes, self.lanes.builder.fsub(self.value, other.value))

    def __mul__(self, other: Value) -> Value:
        return Value(self.lanes, self.lanes.builder.fmul(self.value, other.value))

    def __truediv__(self, other: Value) -> Value:
        return Value(self.lanes, self.lanes.builder.fdiv(self.value, other.value))

    def __neg__(self) -> Value:
        return Value(self.lanes, self.lanes.builder.fneg(self.value))

    def times_plus(self, factor: Value, summand: Value) -> Value:
        """``self * factor + summand``, rounded once where the machine can."""
        return self.lanes.call("llvm.fmuladd", self, factor, summand)

    def sqrt(self) -> Value:
        return self.lanes.call("llvm.sqrt", self)


class Lanes:
    """Where a body is: some elements from ``offset`` on, in every array."""

    def __init__(self, builder: Any, width: int, addresses: dict[str, Any], offset: Any) -> None:
        self.builder, self.width = builder, width
        self._type = _VECTOR if width > 1 else _FLOAT
        self._addresses, self._offset = addresses, offset

    def load(self, name: str) -> Value:
        pointer = self.builder.inttoptr(self._address(name), self._type.as_pointer())
        return Value(self, self.builder.load(pointer, align=4))

    def store(self, name: str, value: Value) -> None:
        pointer = self.builder.inttoptr(self._address(name), self._type.as_pointer())
        self.builder.store(value.value, pointer, align=4)

    def fetch(self, name: str, to_write: bool = False) -> None:
        """Ask for these elements' cache line, if all lanes are there; no effect but time."""
        if self.width == 1:
            return
        byte = ir.IntType(8).as_pointer()
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32]),
            "llvm.prefetch.p0",
        )
        access, nearest, data = (ir.Constant(_INT32, n) for n in (int(to_write), 3, 1))
        pointer = self.builder.inttoptr(self._address(name), byte)
        self.builder.call(function, [pointer, access, nearest, data])

    def number(self, constant: float) -> Value:
        return self.all(ir.Constant(_FLOAT, constant))

    def all(self, scalar: Any) -> Value:
        """The same number in all lanes."""
        if self.width == 1:
            return Value(self, scalar)
        one = ir.Constant(_VECTOR, ir.Undefined)
        first = self.builder.insert_element(one, scalar, ir.Constant(_INT32, 0))
        zeros = ir.Constant(ir.VectorType(_INT32, WIDTH), None)
        return Value(self, self.builder.shuffle_vector(first, one, zeros))

    def call(self, function: str, *operands: Value) -> Value:
        name = f"{function}.{f'v{WIDTH}f32' if self.width > 1 else 'f32'}"
        kind = ir.FunctionType(self._type, [self._type] * len(operands))
        declared = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return Value(self, self.builder.call(declared, [each.value for each in operands]))

    def _address(self, name: str) -> Any:
        return self.builder.add(self._addresses[name], self._offset)


def loop(arrays: str, scalars: str = "") -> Callable[[Callable[..., Value | None]], Any]:
    """Make ``name((addresses), count, (scalars))`` from a body ``name(at, *scalars)``.

    Args:
        arrays: Names of the arrays; the addresses come in this order.
        scalars: Names of the float32 numbers that the body gets, in all lanes.

    A body that returns a value makes a loop that returns the sum of these values: the lanes
    one by one over the whole length, then together, always in the same order.
    """
    names, numbers = arrays.split(), scalars.split()

    def decorate(body: Callable[..., Value | None]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            addresses = {
                name: builder.extract_value(args[0], place) for place, name in enumerate(names)
            }
            given = [builder.extract_value(args[2], place) for place in range(len(numbers))]
            whole = builder.and_(args[1], ir.Constant(_INT64, -WIDTH))
            lanes = _loop(builder, body, WIDTH, addresses, given, ir.Constant(_INT64, 0), whole)
            rest = _loop(builder, body, 1, addresses, given, whole, args[1])
            if lanes is None:
                return context.get_dummy_value()
            total = rest
            half = WIDTH // 2
            while half:
                order = [(i + half) % WIDTH for i in range(WIDTH)]
                mask = ir.Constant(ir.VectorType(_INT32, WIDTH), order)
                lanes = builder.fadd(lanes, builder.shuffle_vector(lanes, lanes, mask))
                half //= 2
            return builder.fadd(builder.extract_element(lanes, ir.Constant(_INT32, 0)), total)

        def typed(typing_context: Any, addresses: Any, count: Any, given: Any) -> Any:
            result = types.float32 if returns else types.void
            return result(
                types.UniTuple(types.int64, len(names)),
                types.int64,
                types.UniTuple(types.float32, len(numbers)),
            ), generate

        returns = body.__annotations__.get("return") not in (None, "None")
        typed.__name__, typed.__doc__ = body.__name__, body.__doc__
        typed.__module__ = body.__module__
        return intrinsic(typed)

    return decorate


def _loop(
    builder: Any,
    body: Callable[..., Value | None],
    width: int,
    addresses: dict[str, Any],
    scalars: list[Any],
    start: Any,
    stop: Any,
) -> Any:
    """``for i in range(start, stop, width): body``; the sum of what it returns, if anything."""
    kind = _VECTOR if width > 1 else _FLOAT
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("inside")
    after = builder.append_basic_block("after")
    everywhere = Lanes(builder, width, addresses, None)
    numbers = [everywhere.all(scalar) for scalar in scalars]
    builder.branch(head)
    builder.position_at_end(head)
    number, total = builder.phi(_INT64), builder.phi(kind)
    number.add_incoming(start, before)
    total.add_incoming(ir.Constant(kind, None), before)
    builder.cbranch(builder.icmp_signed("<", number, stop), inside, after)
    builder.position_at_end(inside)
    at = Lanes(builder, width, addresses, builder.mul(number, ir.Constant(_INT64, 4)))
    value = body(at, *numbers)
    more = total if value is None else builder.fadd(total, value.value)
    number.add_incoming(builder.add(number, ir.Constant(_INT64, width)), builder.block)
    total.add_incoming(more, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return None if value is None else total
