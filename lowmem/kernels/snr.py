"""Means and variances of the rows and the columns of a matrix in one pass over memory.

Every sum is of differences from a value of its own row or column, in float64. So a
variance that is tiny beside the mean keeps its digits, a constant row has a variance of
exactly zero, and squares neither overflow nor vanish, whatever the scale of float32 data.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from lowmem.kernels.threads import run_parallel, thread_count

_PIECE = 4096  # differences of a row that are summed at a time: they stay in the nearest cache
_PARALLEL_ABOVE = 1 << 17  # elements; below, one thread is done before a second has woken up


# The sums alone may be reassociated (that is what lets them use vector registers): they
# read differences from memory, so no rounding of a difference can be reassociated away.
@njit(nogil=True, cache=True, fastmath={"contract", "reassoc", "nsz"})
def _sums(values: np.ndarray, count: int) -> tuple[float, float]:
    total = 0.0
    squares = 0.0
    for i in range(count):
        total += values[i]
        squares += values[i] * values[i]
    return total, squares


@njit(nogil=True, cache=True, fastmath={"contract"})
def _scan(
    data: np.ndarray,
    strides: tuple[int, int],
    shape: tuple[int, int, int],
    first: int,
    last: int,
    row_mean: np.ndarray,
    row_var: np.ndarray,
    columns: bool,
    column_sum: np.ndarray,
    column_square: np.ndarray,
) -> None:
    """Rows ``first`` to ``last`` of a stack of matrices, counted through the stack."""
    height, width = shape[1], shape[2]
    differences = np.empty(min(width, _PIECE))
    row = first
    while row < last:
        matrix = row // height
        top = matrix * strides[0]
        m = row - matrix * height
        count = min(4, min(last - row, height - m))  # four rows share one trip over the sums
        at = top + m * strides[1]
        if columns and count == 4:
            at1, at2, at3 = at + strides[1], at + 2 * strides[1], at + 3 * strides[1]
            for c in range(width):
                pivot = np.float64(data[top + c])
                a = data[at + c] - pivot
                b = data[at1 + c] - pivot
                d = data[at2 + c] - pivot
                e = data[at3 + c] - pivot
                column_sum[matrix, c] += (a + b) + (d + e)
                column_square[matrix, c] += (a * a + b * b) + (d * d + e * e)
        elif columns:
            for k in range(count):
                at1 = at + k * strides[1]
                for c in range(width):
                    a = data[at1 + c] - np.float64(data[top + c])
                    column_sum[matrix, c] += a
                    column_square[matrix, c] += a * a
        for k in range(count):
            at1 = at + k * strides[1]
            pivot = np.float64(data[at1])
            total = squares = 0.0
            for begin in range(0, width, _PIECE):
                size = min(_PIECE, width - begin)
                for c in range(size):
                    differences[c] = data[at1 + begin + c] - pivot
                more, more_squares = _sums(differences, size)
                total += more
                squares += more_squares
            row_mean[row + k] = pivot + total / width
            row_var[row + k] = max(squares - total * total / width, 0.0) / width
        row += count


def row_and_column_moments(
    data: np.ndarray,
    strides: tuple[int, int],
    shape: tuple[int, int, int],
    columns: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Mean and population variance of every row, and of every column, of stacked matrices.

    Args:
        data: One-dimensional, contiguous float32 or float64 array that starts at the first
            matrix.
        strides: Elements from one matrix to the next, and from one row to the next.
        shape: Matrices in the stack, rows, columns.
        columns: Whether the columns are wanted too.

    Returns:
        Row means and variances, shape (stack, rows), and column means and variances, shape
        (stack, columns) or ``None``; all float64.
    """
    stack, height, width = shape
    rows = stack * height
    row_mean, row_var = np.empty(rows), np.empty(rows)
    slices = min(thread_count(), rows) if rows * width > _PARALLEL_ABOVE else 1
    kept = (slices, stack, width) if columns else (slices, 1, 1)
    sums, squares = np.zeros(kept), np.zeros(kept)
    edges = [rows * i // slices for i in range(slices + 1)]
    run_parallel(
        _scan,
        [
            (
                *(data, strides, shape, edges[i], edges[i + 1]),
                *(row_mean, row_var, columns, sums[i], squares[i]),
            )
            for i in range(slices)
        ],
    )
    by_row = row_mean.reshape(stack, height), row_var.reshape(stack, height)
    if not columns:
        return *by_row, None, None
    total, square = sums.sum(0), squares.sum(0)
    pivot = np.lib.stride_tricks.as_strided(
        data, (stack, width), (strides[0] * data.itemsize, data.itemsize), writeable=False
    )
    mean = pivot + total / height
    var = np.maximum(square - total * total / height, 0.0) / height
    return *by_row, mean, var
