"""SNR records and their CSV: ``step,key,shape,compress_dims,snr,mean_sqr,var``.

One line is one parameter, one set of axes, one step. Tuples are written as ``(50304, 768)``
and ``(0,)``. Reading is by a small grammar, never by evaluation, and takes what other
writers of this form leave: other column orders, extra columns, CRLF, a byte order mark,
spaces, ``[0]`` or ``0`` for ``(0,)``, an empty field for not a number.

A part of a parameter that holds several weights in one (a fused query, key and value) has
the key ``NAME[LABEL I/N axis A size S]``: part ``I`` of ``N``, each a run of ``S`` indices
along axis ``A``; ``repeat R`` follows where the list of parts comes ``R`` times.
"""

from __future__ import annotations

import csv
import functools
import io
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

COLUMNS = ("step", "key", "shape", "compress_dims", "snr", "mean_sqr", "var")
_NEEDED = COLUMNS[:5]
MAX_STEP = 10**18 - 1
_MAX_LINE = 1 << 16  # characters: a record is about a hundred

_INTEGER = re.compile(r"-?\d{1,18}")
_STEP = re.compile(r"(\d{1,18})(?:\.0*)?")
_FLOAT = re.compile(
    r"[+-]?(?:(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:e[+-]?\d{1,6})?|inf|infinity|nan)",
    re.IGNORECASE,
)
_PART = re.compile(
    r"(?P<name>.+)\[(?P<label>[^\[\]]*) (?P<index>\d{1,6})/(?P<count>\d{1,6})"
    r" axis (?P<axis>\d{1,6}) size (?P<size>\d{1,18})(?: repeat (?P<repeat>\d{1,18}))?\]"
)


def as_whole(value: Any) -> int | None:
    """A whole number of any numeric type (numpy's, a tensor, ``3.0``), or ``None``."""
    if isinstance(value, (bool, str, bytes)) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(value) if value == int(value) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


class Record(NamedTuple):
    """The SNR of one parameter over one set of axes at one step.

    ``mean_sqr`` and ``var`` are the squared mean and the variance over the averaged axes,
    each averaged over the others. ``shape`` is the shape of the measured second moment.
    """

    step: int
    key: str
    shape: tuple[int, ...]
    compress_dims: tuple[int, ...]
    snr: float
    mean_sqr: float = math.nan
    var: float = math.nan

    @property
    def unknown(self) -> bool:
        """Nothing was learned: the second moment was all zero.

        Other writers also leave not-a-number where the variance is zero.
        """
        if math.isnan(self.snr):
            return self.var == 0
        return self.snr == 0 and self.mean_sqr == 0 and self.var == 0


@dataclass(frozen=True)
class PartKey:
    """Which part of which parameter a key names."""

    name: str
    label: str
    index: int
    count: int
    axis: int
    size: int
    repeat: int = 1

    def __str__(self) -> str:
        repeat = f" repeat {self.repeat}" if self.repeat != 1 else ""
        label = re.sub(r"[\[\]]", "", self.label)
        return (
            f"{self.name}[{label} {self.index}/{self.count}"
            f" axis {self.axis} size {self.size}{repeat}]"
        )

    @classmethod
    def parse(cls, key: str) -> PartKey | None:
        """The part that ``key`` names, or ``None`` where it names a whole parameter."""
        match = _PART.fullmatch(key)
        if match is None:
            return None
        numbers = {name: int(match[name]) for name in ("index", "count", "axis", "size")}
        part = cls(match["name"], match["label"], **numbers, repeat=int(match["repeat"] or 1))
        sound = part.index < part.count and part.size > 0 and part.repeat > 0
        return part if sound else None


def format_records(records: Iterable[Record]) -> str:
    """Lines of CSV, without the header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for record in records:
        shape, axes = (str(tuple(map(int, t))) for t in (record.shape, record.compress_dims))
        numbers = (repr(float(x)) for x in (record.snr, record.mean_sqr, record.var))
        writer.writerow((record.step, record.key, shape, axes, *numbers))
    return text.getvalue()


@functools.lru_cache(maxsize=4096)
def is_writable(key: str) -> bool:
    """Whether a line with ``key`` is read back: no line breaks, no spaces around it, not huge."""
    record = Record(MAX_STEP, key, (1, 1), (0,), 0.0, 0.0, 0.0)
    try:
        line = format_records([record]).encode().decode().removesuffix("\n")
        found = _record(_fields(line), {name: i for i, name in enumerate(COLUMNS)})
    except ValueError:
        return False
    short = len(line) + 512 <= _MAX_LINE  # shapes and figures may be longer than here
    return found.key == key and short and "\n" not in line and "\r" not in line


def header() -> str:
    """The first line of a records file."""
    return ",".join(COLUMNS) + "\n"


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a CSV file.

    A last line that was torn off when its writer died is left out, with a warning.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not such a file, or a line is malformed or stands there twice; the
            message names the line.
    """
    shown = os.fspath(path)
    records: list[Record] = []
    seen: dict[tuple[int, str, tuple[int, ...]], int] = {}
    columns: dict[str, int] | None = None
    for number, line, torn in _lines(path):
        try:
            if columns is None:
                columns = _header(line)
                continue
            record = _record(_fields(line), columns)
        except ValueError as error:
            if torn and columns is not None:
                logger.warning("%s, line %d was torn off and is left out", shown, number)
                break
            raise ValueError(f"{shown}, line {number}: {error}") from None
        identity = record[0], record.key, record.compress_dims
        if identity in seen:
            raise ValueError(
                f"{shown}, line {number}: step {record.step}, {record.key!r}, axes "
                f"{record.compress_dims} already stands in line {seen[identity]}"
            )
        seen[identity] = number
        records.append(record)
    if not records:
        raise ValueError(f"{shown} holds no SNR records")
    return records


def as_records(source: Any) -> list[Record]:
    """Records from a path, a tracker, a table (``to_dict``), or records or mappings.

    Raises:
        TypeError: ``source`` is none of these.
        ValueError: a record is malformed; the message names its position.
    """
    if isinstance(source, (str, os.PathLike)):
        return read_records(source)
    source = getattr(source, "records", source)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # a pandas table
        source = source.to_dict("records")
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise TypeError(f"SNR records must be a path or a list, got {type(source).__name__}")
    records = []
    for number, item in enumerate(source):
        if isinstance(item, Record):
            if _is_sound(item):
                records.append(item)
                continue
            item = _plain(item)
        if not isinstance(item, Mapping):
            raise TypeError(f"SNR record {number} is a {type(item).__name__}, not a Record")
        missing = [name for name in _NEEDED if name not in item]
        if missing:
            raise ValueError(f"SNR record {number} lacks {', '.join(missing)}")
        fields = [str(item.get(name, "")) for name in COLUMNS]
        try:
            records.append(_record(fields, {name: i for i, name in enumerate(COLUMNS)}))
        except ValueError as error:
            raise ValueError(f"SNR record {number}: {error}") from None
    return records


def _is_sound(record: Record) -> bool:
    """Whether a record is as the tracker makes it, and needs no closer look."""
    axes = record.compress_dims
    return (
        type(record.step) is int
        and 0 <= record.step <= MAX_STEP
        and type(record.key) is str
        and record.key != ""
        and type(axes) is type(record.shape) is tuple
        and len(axes) == len(set(axes)) > 0
        and all(type(axis) is int and 0 <= axis < len(record.shape) for axis in axes)
        and all(type(size) is int and size > 0 for size in record.shape)
        and all(type(x) is float and not x < 0 for x in record[4:])
    )


def _plain(record: Record) -> dict[str, Any]:
    """A record's fields, those of numpy's types as Python's."""
    fields = record._asdict()
    for name in ("shape", "compress_dims"):
        if isinstance(fields[name], Iterable) and not isinstance(fields[name], str):
            whole = [as_whole(number) for number in fields[name]]
            fields[name] = fields[name] if None in whole else tuple(whole)
    return fields


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str, bool]]:
    """Number, text and whether its end is missing, of every line that is not blank."""
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        number = 0
        while line := file.readline(_MAX_LINE + 1):
            number += 1
            if len(line) > _MAX_LINE:
                raise ValueError(f"{os.fspath(path)}, line {number}: not a line of SNR records")
            if line.strip():
                yield number, line.strip("\r\n"), not line.endswith(("\n", "\r"))


def _fields(line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True, skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from None


def _header(line: str) -> dict[str, int]:
    if line.lstrip().startswith("{"):
        raise ValueError("this is JSON, perhaps a rules file; SNR records are CSV")
    names = [name.strip() for name in _fields(line)]
    columns = {name: i for i, name in enumerate(names) if name in COLUMNS}
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise ValueError(
            f"no column {', '.join(missing)}; the header of SNR records is {header().strip()}"
        )
    twice = [name for name in columns if names.count(name) > 1]
    if twice:
        raise ValueError(f"column {twice[0]} stands there twice")
    return columns


def _record(fields: list[str], columns: Mapping[str, int]) -> Record:
    def field(name: str) -> str:
        place = columns.get(name)
        if place is None:
            return ""
        if place >= len(fields):
            raise ValueError(f"no field for column {name}")
        return fields[place].strip()

    step = _STEP.fullmatch(field("step"))
    if step is None:
        raise ValueError(f"step must be a whole number, got {field('step')!r}")
    key = field("key")
    if not key:
        raise ValueError("key is empty")
    shape = _tuple("shape", field("shape"))
    if any(size < 1 for size in shape):
        raise ValueError(f"shape must hold positive sizes, got {field('shape')!r}")
    axes = _tuple("compress_dims", field("compress_dims"))
    if not axes:
        raise ValueError("compress_dims names no axis")
    for axis in axes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axis {axis} of {key!r} is unknown: the shape is {shape}")
    axes = tuple(sorted(axis % len(shape) for axis in axes))
    if len(set(axes)) != len(axes):
        raise ValueError(f"compress_dims names an axis twice: {field('compress_dims')!r}")
    numbers = [_number(name, field(name)) for name in COLUMNS[4:]]
    return Record(int(step[1]), key, shape, axes, *numbers)


def _tuple(name: str, text: str) -> tuple[int, ...]:
    body = text
    if body.startswith("torch.Size(") and body.endswith(")"):
        body = body[len("torch.Size(") : -1].strip()
    if len(body) >= 2 and body[0] + body[-1] in ("()", "[]"):
        body = body[1:-1]
    body = body.strip().removesuffix(",")
    if not body.strip():
        return ()
    items = [item.strip() for item in body.split(",")]
    if not all(_INTEGER.fullmatch(item) for item in items):
        raise ValueError(f"{name} must be a tuple such as (0, 1), got {text!r}")
    return tuple(int(item) for item in items)


def _number(name: str, text: str) -> float:
    if text == "":
        return math.nan
    if not _FLOAT.fullmatch(text):
        raise ValueError(f"{name} must be a number, got {text!r}")
    value = float(text)
    if value < 0:
        raise ValueError(f"{name} cannot be negative, got {text!r}")
    return value
