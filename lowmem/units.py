"""Counts and bytes as people write them: ``10e6``, ``"10M"``, ``5.12 GB``."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

_SUFFIXES = {"": 0, "k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
_PATTERN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e\+?(\d{1,3}))?\s*([kmgbt]?)", re.IGNORECASE)
# An index is an int64 and a file offset too, so no table is larger than this.
LARGEST_COUNT = 1 << 48


def parse_count(value: Any, name: str = "rows") -> int:
    """A whole number above zero from ``10_000_000``, ``10e6``, ``"10M"``, ``"1.5k"`` or ``"2B"``.

    Args:
        value: an integer, a whole float, or text with an optional suffix k, M, G or B, T.
        name: what the number counts, for the message.

    Raises:
        TypeError: ``value`` is neither a number nor text.
        ValueError: it is not a whole number from 1 to 2**48.
    """
    if isinstance(value, bool) or not (
        isinstance(value, (int, float, str)) or hasattr(value, "__index__")
    ):
        raise TypeError(f"{name} is {value!r}; give a number such as 10_000_000 or text like '10M'")
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value.strip().replace(",", "").replace("_", ""))
        if match is None:
            raise ValueError(f"{name} is {value!r}; write it as 10000000, 10e6 or 10M")
        digits, exponent, suffix = match.groups()
        number = Decimal(digits).scaleb(int(exponent or 0) + _SUFFIXES[suffix.lower()])
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1")
        number = Decimal(value)
    else:
        number = Decimal(value.__index__())
    if number != number.to_integral_value() or number < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
    if number > LARGEST_COUNT:
        raise ValueError(f"{name} is {value!r}; the largest that an index reaches is 2**48")
    return int(number)


def short_count(number: int) -> str:
    """``10_000_000`` -> ``"10M"``, four digits kept and the rest cut off, never rounded up."""
    for suffix, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= unit:
            whole = number // unit
            places = max(0, 3 - len(str(whole)))
            scaled = number * 10**places // unit
            text = f"{Decimal(scaled).scaleb(-places):f}"
            return (text.rstrip("0").rstrip(".") if "." in text else text) + suffix
    return str(number)


def short_bytes(number: float) -> str:
    """Bytes in decimal units with three digits: ``5.12 GB``, ``640 MB``, ``0``."""
    if number == 0:
        return "0"
    for suffix, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= unit * 0.9995:
            scaled = number / unit
            places = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{places}f} {suffix}"
    return f"{number:.0f} B"


_BYTES_PATTERN = re.compile(r"([\d._]+(?:e\+?\d{1,3})?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


def parse_bytes(value: Any, name: str = "bytes") -> int:
    """Bytes from ``64e9``, ``"64GB"``, ``"64G"`` (10**9) or ``"64GiB"`` (2**30).

    Raises:
        ValueError: ``value`` is none of these.
    """
    match = _BYTES_PATTERN.fullmatch(str(value).strip())
    try:
        if match is None:
            raise ValueError
        number, unit, binary = match.groups()
        step = 1024 if binary else 1000
        amount = float(number) * step ** (" kmgt".index((unit or " ").lower()))
        if not 0 <= amount < 1 << 62:
            raise ValueError
    except ValueError:
        raise ValueError(f"{name} is {value!r}; write bytes as 64GB, 64GiB or 64e9") from None
    return int(amount)
