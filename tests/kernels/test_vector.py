"""The vector loops that kernels are made of, against numpy, at every length around sixteen."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from lowmem.kernels.vector import Lanes, Value, loop

LENGTHS = [0, 1, 2, 15, 16, 17, 31, 32, 47, 100]


@loop("x y ahead", "factor")
def _blend(at: Lanes, factor: Value) -> None:
    at.fetch("ahead", to_write=True)
    x, y = at.load("x"), at.load("y")
    at.store("y", (x * factor - y).sqrt() / at.number(2.0) + x)


@loop("x")
def _total(at: Lanes) -> Value:
    return at.load("x")


@loop("x y")
def _negated_product_plus_one(at: Lanes) -> None:
    at.store("y", (-at.load("x")).times_plus(at.load("y"), at.number(1.0)))


@numba.njit
def blend(x, y, count, factor):
    _blend((x, y, y), count, (factor,))


@numba.njit
def total(x, count):
    return _total((x,), count, ())


@numba.njit
def negated_product_plus_one(x, y, count):
    _negated_product_plus_one((x, y), count, ())


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_a_loop_is_what_its_body_says_and_touches_nothing_else(count, offset) -> None:
    rng = np.random.default_rng(count)
    x, y = rng.random((2, 120), np.float32)
    x += 1
    expected, at = y.copy(), slice(offset, offset + count)
    expected[at] = np.sqrt(x[at] * np.float32(1.5) - y[at]) / np.float32(2) + x[at]
    blend(x[offset:].ctypes.data, y[offset:].ctypes.data, count, np.float32(1.5))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("count", LENGTHS)
def test_a_product_is_added_with_one_rounding_or_two(count) -> None:
    rng = np.random.default_rng(count)
    x, y = rng.random((2, 120), np.float32)
    exact = 1 - x.astype(np.float64) * y
    expected = np.where(np.arange(120) < count, exact, y)
    negated_product_plus_one(x.ctypes.data, y.ctypes.data, count)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1.2e-7)


@pytest.mark.parametrize("count", LENGTHS)
def test_a_sum_has_one_order(count) -> None:
    x = np.random.default_rng(count).standard_normal(120).astype(np.float32)
    whole = count // 16 * 16
    lanes = np.zeros(16, np.float32)
    for row in x[:whole].reshape(-1, 16):
        lanes += row
    for half in (8, 4, 2, 1):
        lanes = lanes + np.roll(lanes, -half)
    rest = np.float32(0)
    for value in x[whole:count]:
        rest += value
    assert total(x.ctypes.data, count) == lanes[0] + rest


def test_infinities_and_nan_are_ordinary_numbers() -> None:
    for bad in (np.inf, -np.inf, np.nan):
        x = np.ones(40, np.float32)
        x[21] = bad
        np.testing.assert_equal(total(x.ctypes.data, 40), np.float32(bad))
