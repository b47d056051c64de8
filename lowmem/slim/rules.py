"""From SNR records to rules: which second moments to average, and over which axes.

A rule is taken for a parameter where averaging keeps more than it loses: among the axis
sets whose SNR, averaged over the measured steps, is strictly above the cutoff, the best one.
Parameters of fewer than two dimensions (norms, biases) never get one, nor do biases of two,
as experts have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lowmem.slim.records import PartKey, Record, as_records
from lowmem.slim.rulesfile import Part, Split, rule_to_json

Axes = tuple[int, ...]

BYTES = 4  # a second moment is float32
PREFERENCES = ("snr", "bytes")


@dataclass(frozen=True)
class Choice:
    """What was chosen for one parameter, or one part of one, and why.

    Attributes:
        key: The parameter, or the part, as the records name it.
        shape: Its second moment's shape.
        axes: The axes to average over; ``None`` where no set passed.
        snr: Mean SNR over the steps of every axis set that was measured.
        bytes_before: Size of the whole second moment.
        bytes_after: Size with ``axes`` averaged.
    """

    key: str
    shape: tuple[int, ...]
    axes: Axes | None
    snr: dict[Axes, float] = field(repr=False)
    bytes_before: int
    bytes_after: int

    @property
    def shown_snr(self) -> float | None:
        """The SNR of the chosen axes, or the best there was where none was chosen."""
        return self.snr[self.axes] if self.axes else max(self.snr.values(), default=None)


def derive_rules(
    records: Any, cutoff: float = 1.0, prefer: str = "snr", burn_in: int = 0
) -> dict[str, Any]:
    """Rules from SNR records, ready for ``SlimAdamW(rules=...)`` and ``write_rules``.

    For every parameter, the plain mean over the measured steps of each axis set's SNR; of
    the sets strictly above ``cutoff``, the one with the highest mean. Infinite SNR (slices of
    one repeated value) counts as such. Steps at which a second moment was all zero say
    nothing and are left out.

    Args:
        records: A path to a CSV file, an ``SNRTracker``, or records (also as mappings, or as
            a pandas table).
        cutoff: What an SNR must exceed.
        prefer: ``"snr"`` takes the highest SNR, ``"bytes"`` the set that saves most.
        burn_in: Records of steps before this one are ignored.

    Returns:
        ``{name: [axes] or None}``; a parameter measured part by part gets the split form of
        ``lowmem.slim.rulesfile`` unless one rule serves all its parts.

    Raises:
        ValueError: a bad argument, no records, a record twice, two shapes of one parameter,
            a record that is not a number, a part missing. The message names the layer.
    """
    return rules_of(choose(records, cutoff, prefer, burn_in))


def choose(
    records: Any, cutoff: float = 1.0, prefer: str = "snr", burn_in: int = 0
) -> list[Choice]:
    """What ``derive_rules`` decides, with the figures behind it, in the records' order."""
    if not isinstance(cutoff, (int, float)) or math.isnan(cutoff) or cutoff < 0:
        raise ValueError(f"cutoff must be a number of at least 0, got {cutoff!r}")
    if prefer not in PREFERENCES:
        raise ValueError(f"prefer must be one of {PREFERENCES}, got {prefer!r}")
    taken = [record for record in as_records(records) if record.step >= burn_in]
    if not taken:
        raise ValueError(
            f"no SNR records from step {burn_in} on" if burn_in else "there are no SNR records"
        )
    series, shapes = _by_layer(taken)
    return [_choose_one(key, shapes[key], sets, cutoff, prefer) for key, sets in series.items()]


def rules_of(choices: Sequence[Choice]) -> dict[str, Any]:
    """The rules that choices amount to; parts of one parameter come together."""
    rules: dict[str, Any] = {}
    parts: dict[str, dict[int, tuple[PartKey, Choice]]] = {}
    for choice in choices:
        part = PartKey.parse(choice.key)
        if part is None:
            if choice.key in rules:
                raise ValueError(f"layer {choice.key!r} is measured both whole and in parts")
            rules[choice.key] = None if choice.axes is None else list(choice.axes)
        else:
            if part.name in rules and part.name not in parts:
                raise ValueError(f"layer {part.name!r} is measured both whole and in parts")
            rules.setdefault(part.name, None)
            parts.setdefault(part.name, {})[part.index] = part, choice
    for name, found in parts.items():
        rules[name] = _join(name, found)
    return rules


def bytes_kept(key: str, shape: Sequence[int], axes: Axes | None) -> int:
    """Bytes of a second moment once it is averaged over ``axes``."""
    part = PartKey.parse(key)
    kept = 1
    for axis, size in enumerate(shape):
        if not axes or axis not in axes:
            kept *= size
        elif part is not None and axis == part.axis:
            kept *= part.repeat  # every repetition of a part has its own mean
    return kept * BYTES


def _by_layer(
    records: Sequence[Record],
) -> tuple[dict[str, dict[Axes, list[float]]], dict[str, tuple[int, ...]]]:
    """SNR over steps, by layer and axis set, without the steps that say nothing."""
    series: dict[str, dict[Axes, list[float]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[tuple[int, str, Axes]] = set()
    for record in records:
        key, shape, axes = record.key, tuple(record.shape), tuple(record.compress_dims)
        if shapes.setdefault(key, shape) != shape:
            raise ValueError(
                f"layer {key!r} has the shape {shapes[key]} and, at step {record.step}, {shape}: "
                "are these records of two models?"
            )
        if any(not 0 <= axis < len(shape) for axis in axes) or not axes:
            raise ValueError(f"layer {key!r}, step {record.step}: unknown axes {axes} of {shape}")
        if (record.step, key, axes) in seen:
            raise ValueError(f"layer {key!r}, axes {axes}: step {record.step} is there twice")
        seen.add((record.step, key, axes))
        values = series.setdefault(key, {}).setdefault(axes, [])
        if record.unknown:
            continue
        if math.isnan(record.snr):
            raise ValueError(
                f"layer {key!r}, axes {axes}: the SNR at step {record.step} is not a number; "
                "did the run diverge? Drop these steps, or measure again"
            )
        values.append(record.snr)
    return series, shapes


def _choose_one(
    key: str,
    shape: tuple[int, ...],
    sets: dict[Axes, list[float]],
    cutoff: float,
    prefer: str,
) -> Choice:
    means = {axes: _mean(values) for axes, values in sets.items() if values}
    before = bytes_kept(key, shape, None)
    best: Axes | None = None
    if len(shape) >= 2 and not _is_bias(key):
        saved = {axes: before - bytes_kept(key, shape, axes) for axes in means}
        passed = [axes for axes in means if means[axes] > cutoff and saved[axes] > 0]
        passed.sort(key=str)  # among equals the first in this order, as published
        if prefer == "bytes":
            best = max(passed, key=lambda axes: (saved[axes], means[axes]), default=None)
        else:
            best = max(passed, key=lambda axes: means[axes], default=None)
    return Choice(key, shape, best, means, before, bytes_kept(key, shape, best))


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _is_bias(key: str) -> bool:
    part = PartKey.parse(key)
    leaf = (part.name if part else key).rpartition(".")[2]
    return leaf.endswith("bias") or "bias" in leaf.split("_")


def _join(name: str, found: dict[int, tuple[PartKey, Choice]]) -> Any:
    keys = [found[index][0] for index in sorted(found)]
    first = keys[0]
    for key in keys:
        if (key.axis, key.count, key.repeat) != (first.axis, first.count, first.repeat):
            raise ValueError(f"layer {name!r}: {key} and {first} are parts of different splits")
    missing = sorted(set(range(first.count)) - set(found))
    if missing:
        raise ValueError(f"layer {name!r}: part {missing[0]} of {first.count} is not measured")
    axes = [found[index][1].axes for index in sorted(found)]
    if all(rule == axes[0] for rule in axes) and first.axis not in (axes[0] or ()):
        return None if axes[0] is None else list(axes[0])  # one rule serves all parts
    parts = tuple(Part(key.size, rule, key.label) for key, rule in zip(keys, axes, strict=True))
    return rule_to_json(Split(first.axis, parts, first.repeat))
