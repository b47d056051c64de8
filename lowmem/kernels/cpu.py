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
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lowmem.kernels.native import pointer, take_next

# What may be reassociated without breaking NaN and infinity.
_FAST = {"contract", "arcp", "nsz", "reassoc"}

_AHEAD = 8  # rows between asking the processor for a line and using it


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
        # To read, into the second level: the first has too few places for whole rows.
        read, level, data = (ir.Constant(ir.IntType(32), n) for n in (0, 1, 1))
        builder.call(function, [pointer, read, level, data])
        return context.get_dummy_value()

    return signature, codegen


@njit(nogil=True, cache=True)
def pack_keys(indices, rows, shift, keys):
    """``keys[i] = indices[i] << shift | i``; the shift holds the largest position.

    Returns the position of the first index outside ``0 … rows - 1``, or -1.
    """
    for i in range(indices.size):
        row = np.int64(indices[i])
        if row < 0 or row >= rows:
            return i
        keys[i] = (row << shift) | i
    return -1


@njit(nogil=True, cache=True)
def divide(keys, shift, parts, rows, bounds, firsts):
    """Find the different rows of the sorted keys, and cut the keys into parts.

    Writes the rows into ``rows``, the bounds of the parts into ``bounds`` (``parts + 1``)
    and the number of different rows before each part into ``firsts``. No row stands in two
    parts. Returns the number of different rows.
    """
    size = keys.size
    unique = part = 0
    last = np.int64(-1)
    for i in range(size):
        row = keys[i] >> shift
        if row == last:
            continue
        while part < parts and i >= size * part // parts:
            bounds[part] = i
            firsts[part] = unique
            part += 1
        rows[unique] = row
        unique += 1
        last = row
    while part <= parts:
        bounds[part] = size
        if part < parts:
            firsts[part] = unique
        part += 1
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


# The work of one step, as int64: addresses, sizes and flags, in this order.
(
    NEXT, PARTS, BOUNDS, FIRSTS, KEYS, COUNT, SHIFT, GRADS, DIM, STATE, ROWS, TARGET, EMIT, SCALARS,
    JOB_SIZE,
) = range(15)  # fmt: skip


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def adam_team(job_address):
    """:func:`adam_rows` on one part after the other, until all are taken.

    Any number of threads may call it with the same job; each part is done once.
    """
    job = carray(job_address, (JOB_SIZE,), np.int64)
    parts, dim, count, rows = job[PARTS], job[DIM], job[COUNT], job[ROWS]
    bounds = carray(pointer(job[BOUNDS]), (parts + 1,), np.int64)
    firsts = carray(pointer(job[FIRSTS]), (parts,), np.int64)
    keys = carray(pointer(job[KEYS]), (count,), np.int64)
    grads = carray(pointer(job[GRADS]), (count, dim), np.float32)
    state = carray(pointer(job[STATE]), (rows, 2 * dim), np.float32)
    target = carray(pointer(job[TARGET]), (rows, dim), np.float32)
    s = carray(pointer(job[SCALARS]), (5,), np.float32)
    while True:
        part = take_next(job.ctypes.data)
        if part >= parts:
            break
        adam_rows(
            keys, bounds[part], bounds[part + 1], job[SHIFT], grads, state, target,
            firsts[part], job[EMIT] != 0, s[0], s[1], s[2], s[3], s[4],
        )  # fmt: skip


def warm_up() -> None:
    """Compile every kernel, or load it from the cache, so that the first step does not."""
    ids, keys, rows, bounds, firsts = np.zeros((5, 2), np.int64)
    pack_keys(ids, 1, 2, keys)
    divide(keys, 2, 1, rows, bounds, firsts)
