"""What a rule is, and the JSON file that holds rules: read, check, write.

A rules file is one JSON object, parameter name to rule. A rule is one of

- ``null`` (or ``[]``): the second moment of this parameter is kept whole;
- ``[axes]``: it is averaged over these axes of the parameter, ``[1]`` for one value a
  row of a matrix, ``[0, 1]`` for one value in all;
- a split, for a parameter that is several weights in one (a fused query, key, value)::

      {"split": 0, "parts": [{"size": 768, "axes": [1], "name": "query"},
                             {"size": 768, "axes": [1], "name": "key"},
                             {"size": 768, "axes": [0], "name": "value"}]}

  The parts lie one after another along axis ``split``, ``size`` indices each, and have
  their own axes, counted in the whole parameter. ``name`` is optional and only shown.
  ``"repeat": n`` (default 1) says that the list of parts comes ``n`` times, as in
  weights that hold query, key and value head by head; every repetition of a part has
  its own mean. Sizes times ``repeat`` must add up to the parameter's size on the axis.

The first two forms are the published ones. In memory a rule is ``None``, a tuple of ints
or a ``Split``. Negative axes count from the end, as in torch, and are made non-negative
as soon as the parameter's shape is known (``fit_rule``).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Axes = tuple[int, ...]


_MAX_FILE_BYTES = 64 << 20  # a rule is under a hundred bytes: beyond this it is not a rules file


@dataclass(frozen=True)
class Part:
    """A run of ``size`` indices of a split parameter; ``axes`` count in the whole parameter."""

    size: int
    axes: Axes | None
    name: str = ""


@dataclass(frozen=True)
class Split:
    """Parts one after another along ``axis``, the whole list ``repeat`` times."""

    axis: int
    parts: tuple[Part, ...]
    repeat: int = 1

    def runs(self) -> list[tuple[int, Part]]:
        """Every part with its first index along ``axis``, repetitions written out."""
        runs, start = [], 0
        for _ in range(self.repeat):
            for part in self.parts:
                runs.append((start, part))
                start += part.size
        return runs

    @property
    def length(self) -> int:
        """Indices along ``axis`` that the parts cover."""
        return self.repeat * sum(part.size for part in self.parts)


def parse_rule(value: Any, name: str) -> Axes | Split | None:
    """A rule from its JSON (or Python) form; shapes are not known here.

    Raises:
        TypeError: the value, or something in it, has a wrong type.
        ValueError: an axis twice, a size below 1, an unknown or missing key.
    """
    if isinstance(value, Split):
        value = rule_to_json(value)  # so that a Split made by hand is checked as well
    if value is None:
        return None
    if isinstance(value, Mapping):
        return _parse_split(value, name)
    return _parse_axes(value, name) or None


def parse_rules(rules: Mapping[str, Any]) -> dict[str, Axes | Split | None]:
    """Every rule of a mapping ``{parameter name: rule}``, checked."""
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"rules must be a dict of parameter name to axes, got {type(rules).__name__}"
        )
    parsed = {}
    for name, value in rules.items():
        if not isinstance(name, str):
            raise TypeError(f"a rule's name must be a string, got {name!r}")
        parsed[name] = parse_rule(value, name)
    return parsed


def fit_rule(rule: Axes | Split | None, shape: Sequence[int], name: str) -> Axes | Split | None:
    """The rule with non-negative sorted axes, held to a parameter's (global) shape.

    Averaging over no axis is ``None``. Raises ``ValueError`` where the rule does not fit.
    """
    if rule is None:
        return None
    if not isinstance(rule, Split):
        return _fit_axes(rule, shape, name) or None
    (axis,) = _fit_axes((rule.axis,), shape, name)
    if rule.length != shape[axis]:
        sizes = " + ".join(str(part.size) for part in rule.parts)
        total = f"{rule.repeat} * ({sizes})" if rule.repeat > 1 else sizes
        raise ValueError(
            f"rule for {name!r}: the parts' sizes {total} add up to {rule.length}, but axis "
            f"{axis} of shape {tuple(shape)} has {shape[axis]}"
        )
    parts = tuple(
        Part(p.size, _fit_axes(p.axes, shape, name) or None if p.axes else None, p.name)
        for p in rule.parts
    )
    if all(part.axes is None for part in parts):
        return None
    return Split(axis, parts, rule.repeat)


def rule_to_json(rule: Axes | Split | None) -> Any:
    """The JSON form of a rule: ``None``, a list of axes, or the split's object."""
    if rule is None:
        return None
    if not isinstance(rule, Split):
        return [int(axis) for axis in rule]
    parts = []
    for part in rule.parts:
        entry: dict[str, Any] = {
            "size": part.size,
            "axes": None if part.axes is None else list(part.axes),
        }
        if part.name:
            entry["name"] = part.name
        parts.append(entry)
    split: dict[str, Any] = {"split": rule.axis, "parts": parts}
    if rule.repeat != 1:
        split["repeat"] = rule.repeat
    return split


def read_rules(path: str | os.PathLike[str]) -> dict[str, Axes | Split | None]:
    """The rules of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON (with line and column), names a parameter twice, or holds
            something that is no rule (with the parameter's name).
    """
    try:
        loaded = read_json_object(path, "rules")
    except ValueError as error:
        if _holds_records(path):
            raise ValueError(
                f"{os.fspath(path)} holds SNR records, not rules: `lowmem rules --snr_filename "
                f"{os.fspath(path)} --out rules.json` makes rules from them (in Python: "
                "lowmem.derive_rules)"
            ) from None
        raise error
    try:
        return parse_rules(loaded)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _holds_records(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as SNR records do."""
    with open(path, "rb") as file:
        first = file.readline(1000).decode("utf-8-sig", "replace").lower()
    return {"step", "key", "compress_dims", "snr"} <= {
        part.strip(' "\r\n') for part in first.split(",")
    }


def write_rules(path: str | os.PathLike[str], rules: Mapping[str, Any]) -> None:
    """Write rules as JSON, one line a parameter; the file is whole or not there.

    Missing directories are made. The rules are checked as ``parse_rules`` does.
    """
    parsed = parse_rules(rules)
    lines = [
        f"    {json.dumps(name)}: {json.dumps(rule_to_json(rule))}" for name, rule in parsed.items()
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n"
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(aside, 0o666 & ~umask)  # mkstemp's 0600 would surprise whoever shares the file
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def read_json_object(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """A JSON file whose top level is an object; errors name the file and the line."""
    shown = os.fspath(path)
    size = os.stat(path).st_size
    if size > _MAX_FILE_BYTES:
        raise ValueError(f"{shown} has {size} bytes: too large for a {what} file")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown} is not UTF-8 text (byte {error.start}): no JSON file") from None
    try:
        loaded = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{shown}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown}: not a {what} file: {error}") from None
    if not isinstance(loaded, dict):
        raise ValueError(
            f"{shown}: a {what} file holds one JSON object, this holds a {type(loaded).__name__}"
        )
    return loaded


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} stands in it twice")
        found[key] = value
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_axes(value: Any, name: str) -> Axes:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"rule for {name!r}: axes must be a list of ints or None, got {value!r}")
    for axis in value:
        if not _is_int(axis):
            raise TypeError(f"rule for {name!r}: an axis must be an int, got {axis!r}")
    if len(set(value)) != len(value):
        raise ValueError(f"rule for {name!r}: an axis stands twice in {list(value)}")
    return tuple(value)


def _fit_axes(axes: Axes, shape: Sequence[int], name: str) -> Axes:
    dims = len(shape)
    for axis in axes:
        if not -dims <= axis < dims:
            raise ValueError(
                f"rule for {name!r}: axis {axis} does not exist in shape {tuple(shape)} "
                f"({dims} dimensions: axes 0 to {dims - 1})"
                if dims
                else f"rule for {name!r}: axis {axis} does not exist, the parameter is a scalar"
            )
    fitted = tuple(sorted(axis % dims for axis in axes)) if dims else ()
    if len(set(fitted)) != len(fitted):
        raise ValueError(f"rule for {name!r}: {list(axes)} names one axis of {tuple(shape)} twice")
    return fitted


def _parse_split(value: Mapping[Any, Any], name: str) -> Split:
    _known_keys(value, {"split", "parts"}, {"repeat"}, f"rule for {name!r}")
    axis, repeat = value["split"], value.get("repeat", 1)
    if not _is_int(axis):
        raise TypeError(f"rule for {name!r}: 'split' must be one axis (an int), got {axis!r}")
    if not _is_int(repeat):
        raise TypeError(f"rule for {name!r}: 'repeat' must be an int, got {repeat!r}")
    if repeat < 1:
        raise ValueError(f"rule for {name!r}: 'repeat' must be at least 1, got {repeat}")
    entries = value["parts"]
    if not isinstance(entries, (list, tuple)):
        raise TypeError(f"rule for {name!r}: 'parts' must be a list, got {entries!r}")
    if not entries:
        raise ValueError(f"rule for {name!r}: 'parts' is empty")
    return Split(axis, tuple(_parse_part(entry, name) for entry in entries), repeat)


def _parse_part(entry: Any, name: str) -> Part:
    where = f"rule for {name!r}: a part"
    if not isinstance(entry, Mapping):
        raise TypeError(f"{where} must be an object with 'size' and 'axes', got {entry!r}")
    _known_keys(entry, {"size", "axes"}, {"name"}, where)
    size, label = entry["size"], entry.get("name", "")
    if not _is_int(size):
        raise TypeError(f"{where}'s 'size' must be an int, got {size!r}")
    if size < 1:
        raise ValueError(f"{where}'s 'size' must be at least 1, got {size}")
    if not isinstance(label, str):
        raise TypeError(f"{where}'s 'name' must be a string, got {label!r}")
    axes = None if entry["axes"] is None else _parse_axes(entry["axes"], name) or None
    return Part(size, axes, label)


def _known_keys(value: Mapping[Any, Any], needed: set[str], extra: set[str], where: str) -> None:
    missing, unknown = needed - set(value), set(value) - needed - extra
    if missing:
        raise ValueError(f"{where} lacks {sorted(missing)}: {dict(value)!r}")
    if unknown:
        raise ValueError(f"{where} has unknown keys {sorted(map(str, unknown))}")
