"""The fused Adam update of touched rows.

One pass a row: gradient, moments and weight are read once and written once, and no
temporary of the batch's size is made. Duplicate ids are summed inside the pass. All
kernels work on *keys*: the row id and the position of its gradient packed into one
int64, sorted, so that equal ids are neighbours, rows come in the order of the file,
and the sum of duplicates has one fixed order whatever the number of threads.
"""

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# What may be reassociated without breaking NaN and infinity.
_FAST = {"contract", "arcp", "nsz", "reassoc"}

_AHEAD = 6  # rows between asking the processor for a line and using it


@intrinsic
def _prefetch_line(typingctx, address):
    """Ask the processor for one cache line; no effect but time."""
    signature = types.void(types.uintp)

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(
                ir.VoidType(),
                [ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(32), ir.IntType(32)],
            ),
            "llvm.prefetch.p0",
        )
        one, three = ir.Constant(ir.IntType(32), 1), ir.Constant(ir.IntType(32), 3)
        builder.call(function, [pointer, one, three, one])
        return context.get_dummy_value()

    return signature, codegen


@njit(nogil=True, cache=True)
def pack_keys(indices, shift, keys):
    """``keys[i] = indices[i] << shift | i``; the shift holds the largest position."""
    for i in range(indices.size):
        keys[i] = (np.int64(indices[i]) << shift) | i


@njit(nogil=True, cache=True)
def split_points(keys, shift, parts):
    """Bounds of ``parts`` slices of the sorted keys; no id stands in two slices."""
    bounds = np.empty(parts + 1, np.int64)
    size = keys.size
    bounds[0] = 0
    for part in range(1, parts):
        at = max(bounds[part - 1], size * part // parts)
        while 0 < at < size and (keys[at] >> shift) == (keys[at - 1] >> shift):
            at += 1
        bounds[part] = at
    bounds[parts] = size
    return bounds


@njit(nogil=True, cache=True)
def count_unique(keys, shift):
    """Number of different ids in the sorted keys."""
    unique = 0
    last = np.int64(-1)
    for i in range(keys.size):
        row = keys[i] >> shift
        if row != last:
            unique += 1
            last = row
    return unique


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def _adam_row(g, m, v, w, sign, one_minus_beta1, one_minus_beta2, step_size, eps):
    for j in range(g.size):
        gj = g[j] * sign
        mj = m[j] + (gj - m[j]) * one_minus_beta1
        vj = v[j] + (gj * gj - v[j]) * one_minus_beta2
        m[j] = mj
        v[j] = vj
        w[j] -= step_size * (mj / (np.sqrt(vj) + eps))


@njit(nogil=True, cache=True, inline="always")
def _prefetch_row(array, row):
    address = array.ctypes.data + row * array.strides[0]
    for line in range(0, array.shape[1] * array.itemsize, 64):
        _prefetch_line(np.uintp(address + line))


@njit(nogil=True, cache=True, fastmath=_FAST, error_model="numpy")
def adam_rows(
    keys, lo, hi, shift, grads, state, target, first, emit,
    sign, one_minus_beta1, one_minus_beta2, step_size, eps,
):  # fmt: skip
    """Adam on the rows of ``keys[lo:hi]``; ``state`` is ``(rows, 2 * dim)``, moments side by side.

    With ``emit`` false, ``target`` is the weight table ``(rows, dim)``, updated in place.
    With ``emit`` true, ``target`` gets the negative update of the ``n``-th different id in
    row ``first + n``: what a weight on another device has to add.
    """
    dim = grads.shape[1]
    mask = (np.int64(1) << shift) - 1
    summed = np.empty(dim, np.float32)
    out = first
    i = lo
    while i < hi:
        row = keys[i] >> shift
        end = i + 1
        while end < hi and (keys[end] >> shift) == row:
            end += 1
        ahead = i + _AHEAD
        if ahead < hi:
            next_row = keys[ahead] >> shift
            _prefetch_row(state, next_row)
            _prefetch_row(grads, keys[ahead] & mask)
            if not emit:
                _prefetch_row(target, next_row)
        place = out if emit else row
        if emit:
            target[place, :] = np.float32(0)
        m = state[row, :dim]
        v = state[row, dim:]
        w = target[place]
        if end == i + 1:
            g = grads[keys[i] & mask]
        else:
            first_grad = grads[keys[i] & mask]
            for j in range(dim):
                summed[j] = first_grad[j]
            for n in range(i + 1, end):
                more = grads[keys[n] & mask]
                for j in range(dim):
                    summed[j] += more[j]
            g = summed
        _adam_row(g, m, v, w, sign, one_minus_beta1, one_minus_beta2, step_size, eps)
        out += 1
        i = end


@njit(nogil=True, cache=True)
def unique_rows(keys, shift, rows):
    """Write the different ids of the sorted keys into ``rows``; return how many there are."""
    unique = 0
    last = np.int64(-1)
    for i in range(keys.size):
        row = keys[i] >> shift
        if row != last:
            rows[unique] = row
            unique += 1
            last = row
    return unique


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, so that the first step does not."""
    ids, keys, rows = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    pack_keys(ids, 2, keys)
    unique_rows(keys, 2, rows)
    count_unique(keys, 2)
    bounds = split_points(keys, 2, 1)
    numbers = (np.float32(1),) * 5
    grads, state, weight = (np.zeros(shape, np.float32) for shape in ((2, 1), (1, 2), (1, 1)))
    adam_rows(keys, bounds[0], bounds[1], 2, grads, state, weight, 0, False, *numbers)
