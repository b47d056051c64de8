"""What averaging the second moment does to the final loss: a small GPT on real text.

The text is the Python source on this machine, byte by byte; the model, the data and the loop
are lowmem.demo.gpt. Five ways, each from the same start and on the same batches:

  AdamW        torch's, nothing averaged
  Slim static  SlimAdamW with the paper's rules by layer type (rules="table1")
  Slim SNR     SlimAdamW with rules measured in an AdamW run at a tenth of the learning rate
  one value    one second moment a weight matrix, every axis averaged (AdaLayer-like)
  wrong axis   the static rules with fan-in and fan-out exchanged
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from lowmem.bench import machine
from lowmem.bench.report import Result
from lowmem.bench.units import Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTENDERS = ("AdamW", "Slim static", "Slim SNR", "one value", "wrong axis")
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = 3
STEPS = 400
HYPER: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}

COLUMNS = [
    Column("contender", "optimizer", "text"),
    Column("loss_text", "validation loss", "text"),
    Column("gap_text", "against AdamW", "text"),
    Column("saved_v", "second moment saved", "share"),
    Column("saved_state", "state saved", "share"),
]


@dataclass(frozen=True)
class Job:
    """One training run; ``rules`` are what SlimAdamW takes, ``None`` for torch's AdamW."""

    contender: str
    lr: float
    seed: int
    steps: int
    rules: Any = None


@dataclass(frozen=True)
class Outcome:
    """A run's validation loss in nats per byte, and the shares of bytes that it saved."""

    job: Job
    loss: float
    saved_v: float = 0.0
    saved_state: float = 0.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rates", type=float, nargs="+", metavar="LR", help=f"learning rates, default {RATES}"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help=f"seeds, default {SEEDS}")
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps a run, default {STEPS}")


def run(args: argparse.Namespace) -> Result:
    rates = tuple(args.rates or ((3e-3,) if args.quick else RATES))
    seeds = args.seeds if args.seeds is not None else 2 if args.quick else SEEDS
    steps = args.steps if args.steps is not None else 60 if args.quick else STEPS
    if seeds < 1 or steps < 10 or any(not 0 < rate < 1 for rate in rates):
        raise ValueError(
            f"--seeds must be at least 1, --steps at least 10 and --rates between 0 and 1, "
            f"got {seeds}, {steps} and {rates}"
        )
    outcomes = measure(rates, seeds, steps)
    result = Result(
        benchmark="quality",
        command=args.command_line,
        machine=machine.describe(bandwidth=False),
        rows=summarize(outcomes),
        columns=COLUMNS,
        main="loss",
    )
    result.notes = verdict(result.rows)
    several = f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"
    result.notes.append(f"Each figure: {several}, {steps} steps a run.")
    picture = io.BytesIO()
    draw(result.rows).savefig(picture, format="png", dpi=120, metadata={"Software": None})
    result.plot_png = picture.getvalue()
    return result


def measure(rates: Sequence[float], seeds: int, steps: int) -> list[Outcome]:
    """Calibrate at a tenth of every rate, then train every contender at every rate and seed.

    Runs are dealt to one process a core, each with one thread: they are too small to share.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(cores or 1, mp_context=context, initializer=_one_thread) as pool,
        _workers_end_with_us(),
    ):
        with _deaf_children():
            calibrations = {rate: pool.submit(calibrate, rate / 10, steps) for rate in rates}
        measured = {}
        for rate in tqdm(rates, desc="calibrating", unit="run", leave=True):
            measured[rate] = calibrations[rate].result()
        jobs = [
            Job(contender, rate, seed, steps, measured[rate] if contender == "Slim SNR" else None)
            for rate in rates
            for seed in range(seeds)
            for contender in CONTENDERS
        ]
        with _deaf_children():
            runs = pool.map(train_one, jobs)
        return list(tqdm(runs, desc="training", total=len(jobs), unit="run", leave=True))


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that start meanwhile ignore Ctrl-C from their first moment: it is for us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _workers_end_with_us() -> Iterator[None]:
    """What stops the measuring ends the runs under way, too, and does not wait for them."""
    others = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            if child not in others:
                child.kill()
        raise


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def calibrate(lr: float, steps: int) -> dict[str, Any]:
    """Rules from an AdamW run at ``lr``, by the published cutoff of 1."""
    import torch

    from lowmem import SNRTracker
    from lowmem.demo.gpt import GPT, python_text, train

    model = GPT(seed=1000)  # no seed that is trained later
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **HYPER)
    with tempfile.TemporaryDirectory() as folder:
        often = max(1, steps // 20)
        tracker = SNRTracker(early_freq=often, late_freq=often, save_dir=folder)

        def on_step(step: int, loss: float) -> None:
            if tracker.should_measure(step):
                tracker.measure_and_save(model=model, optimizer=optimizer, step=step)

        train(model, optimizer, python_text()[0], steps, seed=1000, on_step=on_step)
        return tracker.rules()


def train_one(job: Job) -> Outcome:
    """One run, from the start and on the batches that its seed gives to every contender."""
    import torch

    from lowmem import SlimAdamW
    from lowmem.demo.gpt import GPT, evaluate, python_text, train

    text, held_out = python_text()
    model = GPT(seed=job.seed)
    if job.contender == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.named_parameters(), lr=job.lr, **HYPER
        )
        saved_v = saved_state = 0.0
    else:
        rules = job.rules if job.rules is not None else fixed_rules(job.contender, model)
        slim = SlimAdamW(model.named_parameters(), lr=job.lr, rules=rules, model=model, **HYPER)
        report = slim.report()
        saved_v, saved_state = report.second_moment_saved, report.state_saved
        optimizer = slim
    train(model, optimizer, text, job.steps, seed=job.seed)
    return Outcome(job, evaluate(model, held_out), saved_v, saved_state)


def fixed_rules(contender: str, model: Any) -> dict[str, Any]:
    """The rules of the contenders that measure nothing."""
    from lowmem.slim.axes import table1_rules

    table = table1_rules(model)
    if contender == "Slim static":
        return dict(table)
    exchanged = {(0,): [1], (1,): [0], None: None}  # the model has no fused weights
    if contender == "wrong axis":
        return {name: exchanged[rule] for name, rule in table.items()}  # type: ignore[index]
    if contender == "one value":
        return {name: rule and [0, 1] for name, rule in table.items()}
    raise ValueError(f"unknown contender {contender!r}; known are {CONTENDERS}")


def summarize(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row a contender and learning rate: losses, and differences from AdamW seed by seed."""
    losses = {(o.job.lr, o.job.contender, o.job.seed): o.loss for o in outcomes}
    rows = []
    for lr in dict.fromkeys(o.job.lr for o in outcomes):
        for contender in CONTENDERS:
            runs = [o for o in outcomes if o.job.lr == lr and o.job.contender == contender]
            own = [o.loss for o in runs]
            gaps = [o.loss - losses[lr, "AdamW", o.job.seed] for o in runs]
            loss, gap = statistics.fmean(own), statistics.fmean(gaps)
            rows.append(
                {
                    "contender": contender,
                    "workload": f"learning rate {lr:g}",
                    "lr": lr,
                    "losses": own,
                    "loss": loss,
                    "gaps": gaps,
                    "gap": gap,
                    "loss_text": f"{loss:.3f} ({min(own):.3f} to {max(own):.3f})",
                    "gap_text": "–"
                    if contender == "AdamW"
                    else f"{gap:+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})",
                    "saved_v": statistics.fmean(o.saved_v for o in runs),
                    "saved_state": statistics.fmean(o.saved_state for o in runs),
                }
            )
    return rows


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the figures say, one sentence a contender, losses first and foremost."""
    best = _best(rows, "AdamW")
    notes = [f"AdamW is at its best at learning rate {best['lr']:g}: {best['loss']:.3f}."]
    for contender in CONTENDERS[1:]:
        own = _best(rows, contender)
        gap = own["loss"] - best["loss"]
        said = f"{contender}, at its own best rate {own['lr']:g}: {own['loss']:.3f}, {gap:+.3f}"
        said += f", with {own['saved_v']:.1%} of the second moment saved."
        every = [row for row in rows if row["contender"] == contender]
        worse = [f"{row['lr']:g}" for row in every if min(row["gaps"]) > 0]
        better = [f"{row['lr']:g}" for row in every if max(row["gaps"]) < 0]
        if worse:
            said += f" It loses to AdamW with every seed at {', '.join(worse)}."
        if better:
            said += f" It wins with every seed at {', '.join(better)}."
        notes.append(said)
    order = sorted(CONTENDERS, key=lambda contender: _best(rows, contender)["loss"])
    notes.append(f"From best to worst, each at its own best rate: {', '.join(order)}.")
    return notes


def _best(rows: Sequence[dict[str, Any]], contender: str) -> dict[str, Any]:
    own = [row for row in rows if row["contender"] == contender]
    return min(own, key=lambda row: math.inf if math.isnan(row["loss"]) else row["loss"])


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Loss over learning rate, and the difference from AdamW; bars span the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    for number, contender in enumerate(CONTENDERS):
        own = [row for row in rows if row["contender"] == contender]
        saved = statistics.fmean(row["saved_v"] for row in own)
        label = contender if contender == "AdamW" else f"{contender} ({saved:.0%} of v saved)"
        marker, shift = "os^Dv"[number], 1.04 ** (number - 2)
        for axis, mean, several in ((left, "loss", "losses"), (right, "gap", "gaps")):
            if axis is right and contender == "AdamW":
                continue
            below = [row[mean] - min(row[several]) for row in own]
            above = [max(row[several]) - row[mean] for row in own]
            axis.errorbar(
                [row["lr"] * shift for row in own],
                [row[mean] for row in own],
                yerr=[below, above],
                marker=marker,
                capsize=3,
                color=f"C{number}",
                label=label,
            )
    right.axhline(0, color="C0", linewidth=1)
    left.set_title("validation loss (nats per byte)", loc="left")
    right.set_title("minus AdamW's with the same seed", loc="left")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.set_xlabel("learning rate")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    left.legend(fontsize=8)
    return figure
