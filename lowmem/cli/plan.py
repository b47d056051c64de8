"""What fits where: for Adam, SparseAdam and DSA (an embedding table), or for AdamW and
SlimAdamW (a dense model), the bytes in VRAM, RAM and on disk, and which one to take.

  lowmem plan --rows 10M --dim 128                      this machine, measured now
  lowmem plan --rows 10M --dim 128 --machine colab-t4   a free Colab with a T4
  lowmem plan --rows 40M --dim 64 --ram 64GB --disk 500GB --vram 24GB
  lowmem plan --parameters 1.5B --machine kaggle-t4     a dense model

Counts are written 10000000, 10e6 or 10M; bytes 64GB or 64e9. A GB is 10**9 bytes.
"""

from __future__ import annotations

import argparse
import json

HELP = "what fits on a machine, and which optimizer to take"


def configure(parser: argparse.ArgumentParser) -> None:
    table = parser.add_argument_group("an embedding table")
    table.add_argument("--rows", metavar="N", help="rows of the table, for example 10M")
    table.add_argument("--dim", metavar="N", help="weights in a row, for example 128")
    table.add_argument(
        "--batch", default="65536", metavar="N", help="ids in one step (%(default)s)"
    )
    dense = parser.add_argument_group("or a dense model")
    dense.add_argument("--parameters", metavar="N", help="its number of weights, for example 124M")
    dense.add_argument(
        "--share", type=float, metavar="X",
        help="part of the second moment that SlimAdamW keeps, 0 to 1, from SlimAdamW.report() "
        "(0.0012: the published static rules)",
    )  # fmt: skip
    both = parser.add_argument_group("the weights")
    both.add_argument("--dtype", default="float32", help="float32, bfloat16, float16 (%(default)s)")
    both.add_argument(
        "--weights", default="auto", choices=("auto", "cpu", "cuda"),
        help="where they lie; auto is the GPU if they fit (%(default)s)",
    )  # fmt: skip
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--machine", default=None, help="this (default), colab-t4, colab-cpu or kaggle-t4"
    )
    machine.add_argument(
        "--directory",
        default=".",
        metavar="DIR",
        help="where the state would lie, for its disk (.)",
    )
    for name in ("ram", "vram", "disk"):
        machine.add_argument(f"--{name}", metavar="BYTES", help=f"{name} of a machine of your own")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print plain JSON, every size in bytes")
    out.add_argument("--plot", metavar="FILE.png", help="write the picture there too")
    out.add_argument("--code", action="store_true", help="print only the lines of code to write")


def run(args: argparse.Namespace) -> int:
    from lowmem.plan import Machine, plan
    from lowmem.units import parse_bytes

    own = {name: getattr(args, name) for name in ("ram", "vram", "disk") if getattr(args, name)}
    machine: str | Machine = args.machine or "this"
    if own:
        if args.machine is not None:
            raise ValueError("give --machine, or --ram, --vram and --disk of your own, not both")
        if "ram" not in own:
            raise ValueError("a machine of your own needs --ram, for example --ram 64GB")
        sizes = {name: parse_bytes(value, f"--{name}") for name, value in own.items()}
        machine = Machine("yours", sizes["ram"], sizes.get("vram", 0), sizes.get("disk", 0))
    result = plan(
        args.rows, args.dim, machine, dtype=args.dtype, weights=args.weights, batch=args.batch,
        parameters=args.parameters, share=args.share, directory=args.directory,
    )  # fmt: skip
    if args.plot:
        _save(result.figure(), args.plot)
    if args.json:
        print(json.dumps(result.as_dict(), indent=2))
    elif args.code:
        print(result.code, end="")
    else:
        print(result)
        fewer = result.recommended is None
        print("\nThe code, but not for what you asked:\n" if fewer else "\nThe code:\n")
        print("\n".join(f"    {line}".rstrip() for line in result.code.splitlines()))
        if args.plot:
            print(f"\nPicture: {args.plot}")
    return 0


def _save(figure: object, path: str) -> None:
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    suffix = path.rpartition(".")[2].lower()
    if suffix not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"--plot is {path!r}; end it in .png, .svg or .pdf")
    figure.savefig(path)
