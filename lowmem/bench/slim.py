"""SlimAdamW against AdamW, Adafactor and others: the whole `step()`, from memory, on the CPU.

The tensors are those of GPT-2 124M (148 of them, 124,439,808 float32 numbers): their shapes
and names, without the model. All contenders step the same weights with the same gradients, in
turns, so each finds the caches full of somebody else's data, as after a backward pass.

  AdamW, foreach, fused  torch.optim.AdamW as constructed by default, and its faster forms
  Adafactor              torch.optim.Adafactor (a different algorithm; here for its memory)
  Slim none              SlimAdamW without rules: the same numbers as AdamW
  Slim rows, columns     one second moment a row, or a column, of every matrix
  Slim static            the paper's static rules, query, key and value apart

adam-mini, torch-optimi and bitsandbytes join in where they are installed. "Would move" is
what the memory could have moved in the time of a step, per parameter; "must move" is what the
algorithm has to. Ratios are medians over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lowmem.bench.report import Column, Result
from lowmem.bench.slim_shapes import (
    HYPER,
    PLAIN_BYTES,
    bytes_to_move,
    gpt2_tensors,
    rules_for,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lowmem.bench.harness import Contender, Timing

_STARVED = 0.6  # of the memory's bandwidth: measured on idle machines, 0.8 and 1.03
COLUMNS = [
    Column("contender", "optimizer", "text"),
    Column("step_s", "step", "s"),
    Column("spread", "spread", "share"),
    Column("to_fused", "× fused\nAdamW", "number"),
    Column("to_default", "× AdamW", "number"),
    Column("state_bytes", "state", "bytes"),
    Column("peak_bytes", "peak\nbeyond", "bytes"),
    Column("must_move", "must move", "bytes"),
    Column("would_move", "would\nmove", "bytes"),
    Column("memory_share", "of memory\nbandwidth", "share"),
]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds (default 15)")
    parser.add_argument("--layers", type=int, metavar="N", help="default 12")
    parser.add_argument("--threads", type=int, metavar="N", help="default: torch's")


def _makers(model: nn.Module) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """A constructor for each contender, by name; those that are not installed are missing."""
    import torch

    from lowmem.slim.optimizer import SlimAdamW

    parameters = list(model.parameters())
    adamw = functools.partial(torch.optim.AdamW, parameters, **HYPER)

    def slim(kind: str) -> torch.optim.Optimizer:
        return SlimAdamW(model.named_parameters(), rules=rules_for(kind, model), **HYPER)

    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "AdamW": adamw,
        "AdamW foreach": functools.partial(adamw, foreach=True),
        "AdamW fused": functools.partial(adamw, fused=True),
        "Adafactor": functools.partial(torch.optim.Adafactor, parameters, lr=1e-4),
    }
    for kind in ("none", "rows", "columns", "static"):
        makers[f"Slim {kind}"] = functools.partial(slim, kind)
    for title, package, attribute in (
        ("optimi AdamW", "optimi", "AdamW"),
        ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit"),
    ):
        if importlib.util.find_spec(package.split(".")[0]) is not None:
            makers[title] = functools.partial(_imported, package, attribute, parameters, HYPER)
    if importlib.util.find_spec("adam_mini") is not None:
        sizes = {"dim": 768, "n_heads": 12}
        makers["adam-mini"] = functools.partial(
            _imported, "adam_mini", "Adam_mini", list(model.named_parameters()), HYPER | sizes
        )
    return makers


def _made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return _makers(model)[name]()


def _imported(package: str, name: str, parameters: Any, arguments: dict[str, Any]) -> Any:
    with _quiet():
        return getattr(importlib.import_module(package), name)(parameters, **arguments)


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """adam-mini prints lines for each parameter; the table is what a person is to see."""
    return contextlib.redirect_stdout(io.StringIO())


class _Reference:
    """SlimAdamW's twin in plain torch over the same rules, one part after another."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        import torch

        self.parts = []
        rules = rules_for(kind, model) or {}
        for name, parameter in model.named_parameters():
            moment = torch.zeros_like(parameter)
            rule = rules.get(name)
            whole = [{"size": parameter.shape[-1], "axes": rule or ()}]
            runs: list[dict[str, Any]] = rule["parts"] if isinstance(rule, dict) else whole
            start = 0
            for run in runs:
                at = (..., slice(start, start + run["size"]))
                start += run["size"]
                axes = tuple(run["axes"])
                shape = parameter.data[at].shape
                second = torch.zeros([1 if i in axes else n for i, n in enumerate(shape)])
                self.parts.append((parameter, at, moment, second, axes))
        self.count = 0

    def step(self) -> None:
        from lowmem.slim import reference

        self.count += 1
        for parameter, at, moment, second, axes in self.parts:
            gradient = parameter.grad
            assert gradient is not None
            reference.slim_adamw_(
                [parameter.data[at]], [gradient[at]], [moment[at]], [second], [axes], [self.count],
                lr=HYPER["lr"], beta1=HYPER["betas"][0], beta2=HYPER["betas"][1],
                eps=HYPER["eps"], weight_decay=HYPER["weight_decay"], maximize=False,
            )  # fmt: skip


def check() -> tuple[set[str], list[str]]:
    """Which contenders compute what they should, on tensors an eighth as wide.

    Returns:
        Names that may be timed, and a sentence for each one that may not.
    """
    import torch

    from lowmem.bench.harness import Contender, check_equal

    def contender(name: str, make: Callable[[nn.Module], Any]) -> Contender:
        model = gpt2_tensors(2, 96, 500)
        optimizer = make(model)

        def prepare(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)

        return Contender(name, optimizer.step, prepare, lambda: list(model.parameters()))

    names: set[str] = set()
    messages: list[str] = []
    every = list(_makers(gpt2_tensors(1, 24, 50)))
    groups = {"AdamW": ["AdamW", "AdamW foreach", "AdamW fused", "Slim none", "optimi AdamW"]}
    for kind in ("rows", "columns", "static"):
        groups[f"reference {kind}"] = [f"Slim {kind}"]
    for against, members in groups.items():
        contenders = [contender(n, functools.partial(_made, n)) for n in members if n in every]
        if against.startswith("reference"):
            kind = against.split()[1]
            contenders.append(contender(against, functools.partial(_Reference, kind)))
        kept, dropped = check_equal(contenders, against=against, rtol=1e-4, atol=1e-6)
        names |= {c.name for c in kept}
        messages += dropped
    others = [name for name in every if not any(name in group for group in groups.values())]
    if others:
        messages.append(f"Not AdamW, so not checked against it: {', '.join(others)}.")
    return names | set(others), messages


def run(args: argparse.Namespace) -> Result:
    """Check, then time everything in turns."""
    import torch

    from lowmem.bench import machine
    from lowmem.bench.harness import time_interleaved, unsteady

    for name in ("repeats", "layers", "threads"):
        given = getattr(args, name)
        if given is not None and given < 1:
            raise ValueError(f"--{name} must be at least 1, got {given}")
    before = torch.get_num_threads()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        facts = machine.describe(args.directory, quick=args.quick)
        names, notes = check()
        layers = args.layers or (2 if args.quick else 12)
        model = gpt2_tensors(layers, vocabulary=12_000 if args.quick else 50_257)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter).mul_(1e-3)
        contenders = list(_contenders(model, names, notes))
        repeats = args.repeats or (5 if args.quick else 15)
        timings = time_interleaved(contenders, repeats=repeats, warmup=1, label="slim")
        rows = _rows(model, contenders, timings, facts)
        rows.append(_snr(model, contenders, repeats))
        notes += unsteady(rows) or _starved(rows)
        return Result("slim", args.command_line, facts, rows, COLUMNS, "step_s", notes)
    finally:
        torch.set_num_threads(before)


def _contenders(model: nn.Module, names: set[str], notes: list[str]) -> Iterator[Contender]:
    from lowmem.bench.harness import Contender

    for name, make in _makers(model).items():
        if name not in names:
            continue
        try:
            optimizer = make()
            began = time.perf_counter()
            with _quiet():
                optimizer.step()
            first = time.perf_counter() - began
            peak = _peak_of(optimizer.step)
        except Exception as error:
            if name.startswith(("optimi", "bitsandbytes", "adam-mini")):
                notes.append(f"{name} is left out: it failed with: {error}")
                continue
            raise
        metrics = {"first_step_s": first, "peak_bytes": peak, "state_bytes": _state(optimizer)}
        yield Contender(name, optimizer.step, metrics=functools.partial(dict, metrics))


def _state(optimizer: torch.optim.Optimizer) -> int:
    import torch

    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _peak_of(step: Callable[[], object]) -> int | None:
    """Bytes of memory that a step takes for a while; ``None`` where the system does not tell."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        before = _status("VmRSS")
        step()
        return max(0, _status("VmHWM") - before)
    except (OSError, StopIteration):
        return None


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:"))


def _rows(
    model: nn.Module,
    contenders: Sequence[Contender],
    timings: dict[str, Timing],
    facts: dict[str, Any],
) -> list[dict[str, Any]]:
    count = sum(parameter.numel() for parameter in model.parameters())
    bandwidth = facts.get("update_bytes_per_s")
    rows = []
    for contender in contenders:
        timing = timings[contender.name]
        row: dict[str, Any] = {
            "contender": contender.name,
            "workload": f"{count:,} float32 parameters of GPT-2's shapes, whole step",
            **timing.row(),
            "to_fused": _ratio(timing, timings["AdamW fused"]),
            "to_default": _ratio(timing, timings["AdamW"]),
            **(contender.metrics() if contender.metrics else {}),
        }
        if contender.name.startswith("Slim"):
            row["must_move"] = bytes_to_move(model, rules_for(contender.name[5:], model))
        elif contender.name == "AdamW fused":
            row["must_move"] = PLAIN_BYTES
        if bandwidth:
            row["would_move"] = timing.median * bandwidth / count
            if "must_move" in row:
                row["memory_share"] = row["must_move"] / row["would_move"]
        rows.append(row)
    return rows


def _starved(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence where AdamW fused is far below what memory gives: no ratio to it is to be used.

    Its threads wait for each other, so one that has to share its core holds all of them up,
    step after step alike; those of SlimAdamW's kernels take the work of one that is late.
    """
    for row in rows:
        if row["contender"] == "AdamW fused" and row.get("memory_share", 1.0) < _STARVED:
            return [
                f"AdamW fused reached {row['memory_share']:.0%} of the memory's bandwidth, where "
                f"{_STARVED:.0%} to all of it is usual: something else had one of the cores, so "
                "ratios to it say little; run it again on an idle machine."
            ]
    return []


def _ratio(ours: Timing, theirs: Timing) -> float:
    import numpy as np

    rounds = zip(ours.repeats, theirs.repeats, strict=True)
    return float(np.median([np.mean(a) / np.mean(b) for a, b in rounds]))


def _snr(model: nn.Module, contenders: Sequence[Contender], repeats: int) -> dict[str, Any]:
    """One SNR measurement of all parameters' second moments, as AdamW keeps them."""
    from lowmem.bench.harness import Contender, time_interleaved
    from lowmem.slim.snr import SNRTracker

    optimizer = next(c.step.__self__ for c in contenders if c.name == "AdamW fused")  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        tracker = SNRTracker(save_dir=folder)
        steps = iter(range(1, 10_000_000))

        def measure() -> None:
            tracker.measure_and_save(model=model, optimizer=optimizer, step=next(steps))

        timing = time_interleaved(
            [Contender("SNR measurement", measure)], repeats=max(3, repeats // 3), label="snr"
        )["SNR measurement"]
    return {
        "contender": "SNR measurement",
        "workload": "Measuring SNR of all parameters, once",
        **timing.row(),
    }
