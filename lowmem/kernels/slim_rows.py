"""The SlimAdamW step on runs of float32 in memory: updates, and sums of squared gradients.

Rows are told by addresses. Beside the row that a function works on, it is told the next one,
so that memory is asked for ``AHEAD`` elements before they are needed, across the rows' ends:
the processor's own guesses stop at every gap and at every page. ``k`` are the numbers that
every update needs: 1 − β1, the decay factor, and −1 to maximize, else 1.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from lowmem.kernels.vector import WIDTH, Lanes, Value, loop

# NaN and infinities count as in torch.
JIT: dict[str, Any] = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "nsz", "arcp"},
}
AHEAD = 512
# What is summed of a matrix that comes later, as one int64 each: the address of its present
# row and the bytes to the next, elements a row and the first of them that asks for the next
# row, the present element, rows left, rows left in this block and rows a block; addresses of
# the block's sums and of the total.
ROW, STRIDE, WIDE, NEAR, ELEMENT, LEFT, BLOCK_LEFT, BLOCK, PART, TOTAL, SUMS_SIZE = range(11)


def _moved(at: Lanes, weight: Value, sign: Value) -> Value:
    """The first moment, moved to the gradient."""
    moment = at.load("m")
    moment = weight.times_plus(sign * at.load("g") - moment, moment)
    at.store("m", moment)
    return moment


def _shared_body(at: Lanes, scale: Value, weight: Value, decay: Value, sign: Value) -> None:
    moment = _moved(at, weight, sign)
    at.store("p", (-scale).times_plus(moment, at.load("p") * decay))


@loop("p g m p_ahead g_ahead m_ahead", "scale weight decay sign")
def _update_run(at: Lanes, scale: Value, weight: Value, decay: Value, sign: Value) -> None:
    at.fetch("p_ahead", to_write=True)
    at.fetch("g_ahead")
    at.fetch("m_ahead", to_write=True)
    _shared_body(at, scale, weight, decay, sign)


@loop("p g m scales p_ahead g_ahead m_ahead", "weight decay sign")
def _update_across(at: Lanes, weight: Value, decay: Value, sign: Value) -> None:
    at.fetch("p_ahead", to_write=True)
    at.fetch("g_ahead")
    at.fetch("m_ahead", to_write=True)
    _shared_body(at, at.load("scales"), weight, decay, sign)


@loop("p g m scales p_ahead g_ahead m_ahead h sums h_ahead", "weight decay sign")
def _update_across_and_sum(at: Lanes, weight: Value, decay: Value, sign: Value) -> None:
    at.fetch("p_ahead", to_write=True)
    at.fetch("g_ahead")
    at.fetch("m_ahead", to_write=True)
    at.fetch("h_ahead")
    _shared_body(at, at.load("scales"), weight, decay, sign)
    gradient = at.load("h")
    at.store("sums", gradient.times_plus(gradient, at.load("sums")))


@loop("h sums h_ahead")
def _sum_across(at: Lanes) -> None:
    at.fetch("h_ahead")
    gradient = at.load("h")
    at.store("sums", gradient.times_plus(gradient, at.load("sums")))


@loop(
    "p g m v p_ahead g_ahead m_ahead v_ahead",
    "weight decay sign beta2 rest2 step inverse_root eps",
)
def _update_plain(
    at: Lanes, weight: Value, decay: Value, sign: Value, beta2: Value, rest2: Value,
    step: Value, inverse_root: Value, eps: Value,
) -> None:  # fmt: skip
    for name in ("p_ahead", "m_ahead", "v_ahead"):
        at.fetch(name, to_write=True)
    at.fetch("g_ahead")
    gradient = at.load("g")
    moment = _moved(at, weight, sign)
    # (1 − β2)·g·g is small where g·g overflows.
    square = (rest2 * gradient).times_plus(gradient, beta2 * at.load("v"))
    at.store("v", square)
    update = step * moment / square.sqrt().times_plus(inverse_root, eps)
    at.store("p", at.load("p") * decay - update)


@loop("g g_ahead")
def _squares(at: Lanes) -> Value:
    at.fetch("g_ahead")
    gradient = at.load("g")
    return gradient * gradient


@loop("total part")
def add_and_clear(at: Lanes) -> None:
    """``total += part; part = 0``."""
    part = at.load("part")
    at.store("total", at.load("total") + part)
    at.store("part", at.number(0.0))


@loop("values")
def clear(at: Lanes) -> None:
    at.store("values", at.number(0.0))


@numba.njit(**JIT)
def _near(n: int) -> int:
    """The first element of a row from which on memory is asked for the next row."""
    return max(0, n - AHEAD) // WIDTH * WIDTH


@numba.njit(**JIT)
def sum_of_squares(g: int, g_next: int, n: int) -> np.float32:
    near = _near(n)
    first = _squares((g, g + 4 * (n - near)), near, ())
    return first + _squares((g + 4 * near, g_next), n - near, ())


@numba.njit(**JIT)
def update_run(
    p: int, g: int, m: int, p_next: int, g_next: int, m_next: int,
    n: int, scale: np.float32, k: tuple,
) -> None:  # fmt: skip
    """Update a run of elements that share one second moment."""
    near = _near(n)
    numbers = (scale, k[0], k[1], k[2])
    far, at = 4 * (n - near), 4 * near
    _update_run((p, g, m, p + far, g + far, m + far), near, numbers)
    _update_run((p + at, g + at, m + at, p_next, g_next, m_next), n - near, numbers)


@numba.njit(**JIT)
def update_plain(
    p: int, g: int, m: int, v: int, p_next: int, g_next: int, m_next: int, v_next: int,
    n: int, s: np.ndarray,
) -> None:  # fmt: skip
    """Update a row in which each element's second moment is its own."""
    near = _near(n)
    numbers = (s[0], s[3], s[7], s[1], s[2], s[4], np.float32(1) / s[5], s[6])
    far, at = 4 * (n - near), 4 * near
    _update_plain((p, g, m, v, p + far, g + far, m + far, v + far), near, numbers)
    rest = (p + at, g + at, m + at, v + at, p_next, g_next, m_next, v_next)
    _update_plain(rest, n - near, numbers)


@numba.njit(**JIT)
def update_across(
    p: int, g: int, m: int, p_next: int, g_next: int, m_next: int,
    n: int, scales: int, k: tuple, later: np.ndarray,
) -> None:  # fmt: skip
    """Update a row in which each column has its scale, and sum up as many elements of ``later``.

    Sums alone, and reading alone, wait for memory half of the time; beside an update they
    cost less than half of that.
    """
    near, i = _near(n), 0
    far = 4 * (n - near)
    while i < n:
        here = 4 * i
        row = (p + here, g + here, m + here, scales + here)
        if i < near:
            stop, ahead = near, (p + here + far, g + here + far, m + here + far)
        else:
            back = here - 4 * near
            stop, ahead = n, (p_next + back, g_next + back, m_next + back)
        if later[LEFT] == 0:
            _update_across(row + ahead, stop - i, k)
        else:
            h, sums, h_ahead, most = _present(later)
            stop = min(stop, i + most)
            _update_across_and_sum(row + ahead + (h, sums, h_ahead), stop - i, k)
            _advance(later, stop - i)
        i = stop


@numba.njit(**JIT)
def begin_sums(
    later: np.ndarray, g: int, stride: int, wide: int, rows: int, block: int, part: int, total: int
) -> None:
    """Make ``later`` the column sums of the squares of a matrix; ``total`` holds them at the end.

    They are taken over ``block`` rows at a time, and these sums are added up in order.
    """
    later[ROW], later[STRIDE], later[WIDE], later[NEAR] = g, stride, wide, _near(wide)
    later[ELEMENT], later[LEFT], later[BLOCK_LEFT], later[BLOCK] = 0, rows, block, block
    later[PART], later[TOTAL] = part, total
    clear((part,), wide, ())
    clear((total,), wide, ())


@numba.njit(**JIT)
def finish_sums(later: np.ndarray) -> None:
    """Sum up what is left of ``later``."""
    while later[LEFT] > 0:
        h, sums, h_ahead, most = _present(later)
        _sum_across((h, sums, h_ahead), most, ())
        _advance(later, most)


@numba.njit(**JIT)
def _present(later: np.ndarray) -> tuple[int, int, int, int]:
    """Where ``later`` is: gradient, sums, what to ask for, and how many elements that holds for."""
    i, near, wide = later[ELEMENT], later[NEAR], later[WIDE]
    h, sums = later[ROW] + 4 * i, later[PART] + 4 * i
    if i < near:
        return h, sums, h + 4 * (wide - near), near - i
    following = later[ROW] + later[STRIDE] if later[LEFT] > 1 else later[ROW]
    return h, sums, following + 4 * (i - near), wide - i


@numba.njit(**JIT)
def _advance(later: np.ndarray, count: int) -> None:
    later[ELEMENT] += count
    if later[ELEMENT] < later[WIDE]:
        return
    later[ELEMENT] = 0
    later[ROW] += later[STRIDE]
    later[LEFT] -= 1
    later[BLOCK_LEFT] -= 1
    if later[BLOCK_LEFT] == 0 or later[LEFT] == 0:
        add_and_clear((later[TOTAL], later[PART]), later[WIDE], ())
        later[BLOCK_LEFT] = later[BLOCK]
