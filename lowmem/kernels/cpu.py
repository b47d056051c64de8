"""The fused Adam update of touched rows.

One pass a row: gradient, moments and weight are read once and written once, and no
temporary of the batch's size is made. Duplicate ids are summed inside the pass. Rows come
as the sorted keys of :mod:`lowmem.kernels.ids`.

A row is worked on a cache line at a time, and with each line go the requests for one line
of each array of a row further on: so the memory is busy while the processor divides. In a
tall table each row lies in pages of its own, whose addresses the processor looks up in
memory, too. It does several such walks at a time only if they are asked for together; so
they are, a group of rows at a time, before the lines are.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lowmem.kernels import ids
from lowmem.kernels.native import add, pointer, prefetch
from lowmem.kernels.notice import announce
from lowmem.kernels.pages import thread_faults

announce(__name__, "DSA")

_AHEAD = 4  # keys between asking the memory for a row and working on it
_GROUP = 16  # keys whose pages are looked up together
_LINE = 64  # bytes of a cache line
_LANES = 16  # float32 values in it


@intrinsic
def _adam_line(
    typing_context: Any, g: Any, m: Any, v: Any, w: Any, sign: Any,
    one_minus_beta1: Any, one_minus_beta2: Any, step_size: Any, eps: Any,
) -> Any:  # fmt: skip
    """Adam on ``_LANES`` values at the addresses ``g, m, v, w``: :func:`_adam_values`, in vectors.

    Written out because numba does not know that the four places do not overlap, and would
    check it, or not use vectors at all, in a loop as short as this.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, lane = ir.FloatType(), ir.IntType(32)
        line = ir.VectorType(number, _LANES)
        may = ("contract",)

        def load(address: Any) -> tuple[Any, Any]:
            place = builder.inttoptr(address, line.as_pointer())
            return place, builder.load(place, align=4)

        def spread(value: Any) -> Any:
            one = builder.insert_element(ir.Constant(line, ir.Undefined), value, lane(0))
            zeros = ir.Constant(ir.VectorType(lane, _LANES), [0] * _LANES)
            return builder.shuffle_vector(one, ir.Constant(line, ir.Undefined), zeros)

        (_, g), (m_at, m), (v_at, v), (w_at, w) = map(load, args[:4])
        sign, one_minus_beta1, one_minus_beta2, step_size, eps = map(spread, args[4:])
        g = builder.fmul(g, sign)
        m = builder.fadd(
            m, builder.fmul(builder.fsub(g, m, flags=may), one_minus_beta1, flags=may), flags=may
        )
        change = builder.fsub(builder.fmul(g, g, flags=may), v, flags=may)
        v = builder.fadd(v, builder.fmul(change, one_minus_beta2, flags=may), flags=may)
        kind = ir.FunctionType(line, [line])
        root = cgutils.get_or_insert_function(builder.module, kind, f"llvm.sqrt.v{_LANES}f32")
        below = builder.fadd(builder.call(root, [v]), eps)
        w = builder.fsub(w, builder.fdiv(builder.fmul(m, step_size), below))
        for place, value in ((m_at, m), (v_at, v), (w_at, w)):
            builder.store(value, place, align=4)
        return context.get_dummy_value()

    place, number = types.uintp, types.float32
    return types.void(*[place] * 4, *[number] * 5), generate


@njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", inline="always")
def _adam_values(g, m, v, w, start, sign, one_minus_beta1, one_minus_beta2, step_size, eps):
    for j in range(start, g.size):
        gj = g[j] * sign
        mj = m[j] + (gj - m[j]) * one_minus_beta1
        vj = v[j] + (gj * gj - v[j]) * one_minus_beta2
        m[j] = mj
        v[j] = vj
        w[j] -= (step_size * mj) / (np.sqrt(vj) + eps)


@njit(nogil=True, cache=True, inline="always")
def _at(array, row):
    return np.uintp(array.ctypes.data + row * array.strides[0])


@njit(nogil=True, cache=True, inline="always")
def _ask_row(address, size):
    for offset in range(0, size, _LINE):
        prefetch(np.uintp(address + offset))


@njit(nogil=True, cache=True, inline="always")
def _ask_key(keys, at, lo, hi, shift, grads, state, target, emit):
    """Ask for what the key at ``at`` will need, if it is one of ``keys[lo:hi]``."""
    if at >= hi:
        return
    row = keys[at] >> shift
    size = grads.shape[1] * grads.itemsize
    _ask_row(_at(grads, keys[at] & ((np.int64(1) << shift) - 1)), size)
    if at == lo or (keys[at - 1] >> shift) != row:
        _ask_row(_at(state, row), 2 * size)
        if not emit:
            _ask_row(_at(target, row), size)


@njit(nogil=True, cache=True, inline="always")
def _ask_pages(keys, start, end, shift, grads, state, target, emit):
    """Have the addresses of the pages of ``keys[start:end]`` looked up, all at a time."""
    for at in range(start, end):
        row = keys[at] >> shift
        prefetch(_at(grads, keys[at] & ((np.int64(1) << shift) - 1)))
        prefetch(_at(state, row))
        if not emit:
            prefetch(_at(target, row))


@njit(nogil=True, cache=True, error_model="numpy")
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
    size = np.uintp(dim * grads.itemsize)
    summed = np.empty(dim, np.float32)
    out = first
    for at in range(lo, min(hi, lo + _AHEAD)):
        _ask_key(keys, at, lo, hi, shift, grads, state, target, emit)
    i = lo
    known = min(hi, lo + _AHEAD)  # keys before this one have had their pages looked up
    while i < hi:
        if i + 2 * _AHEAD >= known:
            end = min(hi, known + _GROUP)
            _ask_pages(keys, known, end, shift, grads, state, target, emit)
            known = end
        row = keys[i] >> shift
        g = grads[keys[i] & mask]
        i += 1
        if i < hi and (keys[i] >> shift) == row:
            for j in range(dim):
                summed[j] = g[j]
            while i < hi and (keys[i] >> shift) == row:
                _ask_key(keys, i - 1 + _AHEAD, lo, hi, shift, grads, state, target, emit)
                more = grads[keys[i] & mask]
                for j in range(dim):
                    summed[j] += more[j]
                i += 1
            g = summed
        place = out if emit else row
        if emit:
            target[place, :] = np.float32(0)
        g_at, m_at, w_at = np.uintp(g.ctypes.data), _at(state, row), _at(target, place)
        # A row that nobody needs to ask for is asked for in vain: cheaper than to choose.
        ahead = min(i - 1 + _AHEAD, hi - 1)
        next_row = keys[ahead] >> shift
        next_g, next_m = _at(grads, keys[ahead] & mask), _at(state, next_row)
        next_w = w_at if emit else _at(target, next_row)
        offset = np.uintp(0)
        for _ in range(dim // _LANES):
            prefetch(next_g + offset)
            prefetch(next_m + offset)
            prefetch(next_m + size + offset)
            prefetch(next_w + offset)
            _adam_line(
                g_at + offset, m_at + offset, m_at + size + offset, w_at + offset,
                sign, one_minus_beta1, one_minus_beta2, step_size, eps,
            )  # fmt: skip
            offset += np.uintp(_LINE)
        if dim % _LANES:
            prefetch(next_g + offset)
            prefetch(next_m + offset)
            prefetch(next_m + size + offset)
            prefetch(next_w + offset)
            # Rows of such a size may begin and end within a line.
            prefetch(next_g + size - np.uintp(1))
            prefetch(next_m + size + size - np.uintp(1))
            prefetch(next_w + (np.uintp(0) if emit else size - np.uintp(1)))
            _adam_values(
                g, state[row, :dim], state[row, dim:], target[place], dim // _LANES * _LANES,
                sign, one_minus_beta1, one_minus_beta2, step_size, eps,
            )  # fmt: skip
        out += 1


@cfunc(types.void(types.voidptr), nopython=True, cache=True)
def adam_team(job_address):
    """:func:`adam_rows` on one part after the other, until all are taken.

    Any number of threads may call it with the same job; each part is done once. ``FAULTS``
    counts the page faults that had to wait for a disk, where the system tells a thread's.
    """
    job = carray(job_address, (ids.JOB_SIZE,), np.int64)
    parts, dim, count, rows = job[ids.PARTS], job[ids.DIM], job[ids.COUNT], job[ids.ROWS]
    bounds = carray(pointer(job[ids.BOUNDS]), (parts + 1,), np.int64)
    firsts = carray(pointer(job[ids.FIRSTS]), (parts,), np.int64)
    keys = carray(pointer(job[ids.KEYS]), (count,), np.int64)
    grads = carray(pointer(job[ids.GRADS]), (count, dim), np.float32)
    state = carray(pointer(job[ids.STATE]), (rows, 2 * dim), np.float32)
    target = carray(pointer(job[ids.TARGET]), (rows, dim), np.float32)
    s = carray(pointer(job[ids.SCALARS]), (5,), np.float32)
    shift = ids.shift_of(count)
    before = thread_faults()
    while True:
        part = add(job.ctypes.data + ids.NEXT * 8, 1)
        if part >= parts:
            break
        adam_rows(
            keys, bounds[part], bounds[part + 1], shift, grads, state, target,
            firsts[part], job[ids.EMIT] != 0, s[0], s[1], s[2], s[3], s[4],
        )  # fmt: skip
    add(job.ctypes.data + ids.FAULTS * 8, thread_faults() - before)
