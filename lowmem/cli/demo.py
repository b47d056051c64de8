"""Train a table of ten million entities on real data, in about three minutes.

The data is a knowledge graph of the Python code on this machine: which function calls,
imports, defines, raises what, read from the standard library and site-packages. The model
is ComplEx with one sparse embedding row an entity; its optimizer is lowmem.DSA, which keeps
Adam's two moments in a file. At the end: how well held-out triples are ranked against the
untrained table, measured bytes, nearest neighbours, and a picture.

  lowmem demo                          10,000,000 x 128, or what this machine holds
  lowmem demo --rows 1M --seconds 20   a smaller and shorter run
  lowmem demo --triples FILE.tsv       your own graph: head, relation, tail, tabs between

--seconds is for the training alone. Reading the code takes up to a minute before it (no longer
than --seconds, or ten seconds, if those are fewer), and only once: the graph is cached. Ranking
takes some seconds before and after.

Ctrl-C while it trains ends the training and reports what was done until then.
LOWMEM_SMOKE=1 makes a tiny run of half a minute that touches everything.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem.demo.graph import Graph
    from lowmem.demo.sizes import Size
    from lowmem.demo.train import History

HELP = "ten million entities, trained on real data, in three minutes"

_OUTPUT = Path("demo_out")
_FEW_PASSES = 1.5  # over the triples: below, a ranking among so many says little


def _count(text: str) -> int:
    from lowmem.units import parse_count

    try:
        return parse_count(text, "the number")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds above zero, got {text!r}")
    return number


def _dim(text: str) -> int:
    number = _count(text)
    if number % 2:
        raise argparse.ArgumentTypeError(
            f"expected an even number (pairs of floats make complex numbers), got {text!r}"
        )
    return number


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows", type=_count, metavar="N", help="rows of the table: 10M, 1e7 (default 10M)"
    )
    parser.add_argument(
        "--dim", type=_dim, metavar="N", help="floats a row, an even number (default 128)"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        help="how long to train (default 75); reading and ranking come on top",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="keep the store, the graph and the picture here; without it the store is a "
        "temporary file of the working directory, and the picture goes to demo_out/",
    )
    parser.add_argument(
        "--triples",
        type=Path,
        metavar="FILE.tsv",
        help="train on this graph instead: a line is head, relation, tail, with tabs between; "
        "may be gzipped",
    )


def run(args: argparse.Namespace) -> int:
    import torch

    from lowmem import DSA, env
    from lowmem.demo.graph import split
    from lowmem.demo.kge import KGE, scatter_ids
    from lowmem.demo.ranking import filtered_ranking
    from lowmem.demo.report import (
        draw,
        interesting,
        memory_table,
        neighbour_lines,
    )
    from lowmem.demo.sizes import choose_size
    from lowmem.demo.train import LR, batches, memory_bytes, train
    from lowmem.units import short_bytes

    began = time.monotonic()
    smoke = env.smoke()
    # A smoke run counts steps: on a slow machine, too, it must have learned something.
    seconds = args.seconds or (None if smoke else 75.0)
    steps = 300 if smoke and seconds is None else None
    batch = {"groups": 4, "size": 256, "negatives": 64} if smoke else {}
    output: Path = args.directory or _OUTPUT
    store: Path | None = None
    if args.directory is not None:
        store = args.directory / "store"
        if store.exists():
            raise ValueError(
                f"{store} holds the store of an earlier run, whose weights are gone: it cannot "
                "be resumed. Delete it, or give another --directory"
            )
        output.mkdir(parents=True, exist_ok=True)

    def size(least_rows: int) -> Size:
        return choose_size(
            args.rows,
            args.dim,
            args.directory or Path(),
            default_rows=200_000 if smoke else 10_000_000,
            default_dim=32 if smoke else 128,
            least_rows=least_rows,
        )

    size(1)  # what cannot fit is said before minutes are spent on reading
    try:
        reading = 6.0 if smoke else min(60.0, max(10.0, args.seconds or 60.0))
        graph = _graph(args.triples, args.directory, reading, smoke)
    except KeyboardInterrupt:
        print("Stopped while reading: nothing was trained, nothing is kept.")
        raise
    table = size(len(graph.entities))
    if table.why:
        print(f"This machine gets {table.why}.")
    entities, relations = len(graph.entities), len(graph.relations)
    train_triples, test = split(graph, 50 if smoke else 500)
    if not len(test):
        raise ValueError(
            f"too few triples to hold any out ({len(graph.triples):,}): each entity of a "
            "held-out triple must stand in another one"
        )

    start = time.monotonic()
    model = KGE(table.rows, relations, table.dim, device=table.device)
    row_of = torch.from_numpy(scatter_ids(entities, table.rows))
    print(
        f"Table: {table.rows:,} x {table.dim} on {table.device}, "
        f"{short_bytes(table.weight_bytes)}, filled in {time.monotonic() - start:.1f} s.\n"
        f"  {entities:,} of its rows have names ({entities / table.rows:.1%}), scattered over the "
        "whole table as hashed ids would be;\n"
        "  only they are trained, drawn as negatives, and ranked."
    )
    libraries = memory_bytes()["mapped"]  # file pages that are not the store's
    optimizer = DSA(model.parameters(), lr=LR, directory=store, mode="create")
    try:
        ranking = {}
        ranking["untrained"] = filtered_ranking(
            model, row_of, test, graph.triples, progress=True, desc="ranking, untrained"
        )
        history = train(
            model,
            optimizer,
            batches(train_triples, row_of, relations, device=table.device, **batch),
            entities,
            seconds=seconds,
            steps=steps,
        )
        used = optimizer.state_bytes()
        now = memory_bytes()
        measured = [step.memory for step in history.steps]
        peak = {key: max([now[key], *(each[key] for each in measured)]) for key in now}
        peak["mapped"] = max(0, peak["mapped"] - libraries)
        if history.stopped:
            print("Stopped by Ctrl-C: here is what was done until then.")
        _print_training(history, len(train_triples))
        try:
            ranking["trained"] = filtered_ranking(
                model, row_of, test, graph.triples, progress=True, desc="ranking, trained"
            )
        except KeyboardInterrupt:
            history.stopped = True
            print("The ranking was stopped; the rest of the report follows.")
        print(f"\nFiltered ranking of {len(test):,} held-out triples, {entities:,} candidates:")
        for name, found in ranking.items():
            print(
                f"  {name:<10} MRR {found.mrr:.5f}   hits@10 {found.hits(10):>5.1%}   "
                f"middle rank {found.median:,.0f}"
            )
        if _passes(history, len(train_triples)) < _FEW_PASSES and not smoke:
            print(
                "  This was a short training: the model has hardly seen each triple once. Look at "
                "the middle rank;\n  MRR and hits@10 come with more --seconds."
            )
        print()
        print(memory_table(table.rows, table.dim, used, table.device, peak))
        least = 1 if smoke or args.triples else 20
        print(f"\nNearest neighbours by cosine (among names in at least {least} triples):")
        print(*neighbour_lines(model, row_of, graph, interesting(graph), least), sep="\n")
        picture = output / "lowmem_demo.png"
        draw(
            history,
            picture,
            f"DSA, {table.rows:,} x {table.dim}, moments on disk "
            f"({short_bytes(used['disk'])}), {torch.get_num_threads()} CPU threads",
            len(train_triples),
        )
        facts: dict[str, Any] = {
            "command": _command(args, smoke),
            "machine": env.report(),
            "graph": {
                "entities": entities,
                "relations": relations,
                "triples": len(graph.triples),
                **{k: v for k, v in graph.facts.items() if k != "fingerprint"},
            },
            "table": {"rows": table.rows, "dim": table.dim, "device": table.device},
            "training": {
                "seconds": history.seconds,
                "steps": len(history.steps),
                "passes": _passes(history, len(train_triples)),
                "loss": history.loss(),
                "rows_per_s": history.rows_per_s(),
                "optimizer_rows_per_s": history.rows_per_s(optimizer_only=True),
                "stopped": history.stopped,
            },
            "ranking": {
                name: {
                    "mrr": found.mrr,
                    "hits_at_10": found.hits(10),
                    "middle_rank": found.median,
                    "questions": len(test) * 2,
                }
                for name, found in ranking.items()
            },
            "optimizer_state_bytes": used,
            "peak_process_bytes": peak,
        }
    finally:
        optimizer.close()
    facts["total_seconds"] = time.monotonic() - began
    (output / "lowmem_demo.json").write_text(json.dumps(facts, indent=2, default=str) + "\n")
    print(f"\nPicture: {picture}, figures: {output / 'lowmem_demo.json'}")
    if store is not None:
        print(f"The store of the moments is kept: {store}. Weights are not kept.")
    else:
        print("The temporary store is removed; --directory keeps one.")
    print(f"All in {facts['total_seconds']:.0f} s.")
    return 130 if history.stopped else 0


def _graph(path: Path | None, directory: Path | None, seconds: float, smoke: bool) -> Graph:
    """The graph to train on, read and described."""
    if path is not None:
        from lowmem.demo.tsv import read_triples

        graph = read_triples(path)
        print(f"Graph: {path}, {_described(graph)}.")
        return graph
    from lowmem.demo.codegraph import code_graph

    graph = code_graph(
        seconds=seconds,
        limit=240 if smoke else None,
        cache=directory,
    )
    facts = graph.facts
    left_out = ", ".join(f"{count:,} {why}" for why, count in sorted(facts["skipped"].items()))
    print(
        f"Graph: the Python code on this machine, {_described(graph)},\n"
        f"  from {facts['files_read']:,} of {facts['files']:,} files"
        + (f" (left out: {left_out})" if left_out else "")
        + (
            f", cached in {facts['cached']}."
            if facts["cached"]
            else f", read in {facts['seconds']:.0f} s."
        )
        + ("" if facts["complete"] else f" The {facts['budget']:.0f} s for reading ended first.")
    )
    return graph


def _described(graph: Graph) -> str:
    return (
        f"{len(graph.entities):,} entities, {len(graph.relations)} relations, "
        f"{len(graph.triples):,} triples"
    )


def _passes(history: History, triples: int) -> float:
    return sum(step.triples for step in history.steps) / triples


def _print_training(history: History, triples: int) -> None:
    first = history.steps[0].loss if history.steps else math.nan
    print(
        f"\nTrained {len(history.steps):,} steps in {history.seconds:.0f} s, "
        f"{_passes(history, triples):.1f} passes over the triples; loss "
        f"{first:.2f} -> {history.loss():.2f} nats.\n"
        f"  {history.rows_per_s():,.0f} distinct rows a second, all in all; "
        f"{history.rows_per_s(optimizer_only=True):,.0f} in opt.step() alone."
    )


def _command(args: argparse.Namespace, smoke: bool) -> str:
    flags: dict[str, Any] = {
        name: getattr(args, name) for name in ("rows", "dim", "seconds", "directory", "triples")
    }
    given = "".join(f" --{name} {value}" for name, value in flags.items() if value is not None)
    return f"{'LOWMEM_SMOKE=1 ' if smoke else ''}lowmem demo{given}"
