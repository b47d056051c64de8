"""Run notebooks and keep of each the one picture that stands in the repository.

    python scripts/notebook_pictures.py                 all four, at full size
    python scripts/notebook_pictures.py 02              one of them, and the README's picture
    LOWMEM_SMOKE=1 python scripts/notebook_pictures.py  in their smallest form

Of the outputs, only the picture of the cell tagged ``picture`` is kept, as PNG with its
words. Notebook 02's is the README's too: docs/live_snr.png. Needs nbclient, which comes
with JupyterLab.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LARGEST_BYTES = 200_000
README_PICTURE = {"02": ROOT / "docs" / "live_snr.png"}
_IMAGE = re.compile(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]+)"')


def pictures_of(outputs: Sequence[Any]) -> list[tuple[str, bytes]]:
    """The words and the PNG of every picture among a cell's outputs."""
    found = []
    for output in outputs:
        html = "".join(output.get("data", {}).get("text/html", ""))
        for alt, data in _IMAGE.findall(html):
            found.append((unescape(alt), base64.b64decode(data)))
    return found


def small(png: bytes) -> bytes:
    """The PNG as it is; if that is too large with a palette of 256 colours, then smaller."""
    if len(png) < LARGEST_BYTES:
        return png
    from PIL import Image

    picture = Image.open(io.BytesIO(png)).convert("RGB")
    while True:
        buffer = io.BytesIO()
        picture.quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
        if buffer.tell() < LARGEST_BYTES:
            return buffer.getvalue()
        picture = picture.resize((picture.width * 4 // 5, picture.height * 4 // 5))


def curate(notebook: Any) -> tuple[str, bytes]:
    """Strip every output but the picture's, number the cells, and give back the picture."""
    kept: tuple[str, bytes] | None = None
    number = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        number += 1
        outputs, cell["outputs"] = cell["outputs"], []
        cell["execution_count"] = number
        cell["metadata"].pop("execution", None)
        if "picture" not in cell["metadata"].get("tags", []):
            continue
        if kept is not None:
            raise ValueError("two cells have the tag 'picture'; one picture is kept")
        found = pictures_of(outputs)
        if not found:
            raise ValueError("the cell tagged 'picture' shows no picture with words")
        alt, png = found[-1]
        kept = alt, small(png)
        cell["outputs"] = [
            {
                "output_type": "display_data",
                "data": {
                    "image/png": base64.b64encode(kept[1]).decode() + "\n",
                    "text/plain": [alt],
                },
                "metadata": {"image/png": {"alt": alt}},
            }
        ]
    if kept is None:
        raise ValueError("no cell has the tag 'picture'")
    notebook["metadata"].pop("widgets", None)
    return kept


def run(path: Path) -> Any:
    """The notebook as it is after a run in its own folder."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=resources).execute()
    return notebook


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", metavar="NN", help="01, 02, 03, 04; default all")
    args = parser.parse_args(argv)
    paths = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    unknown = set(args.numbers) - set(paths)
    if unknown:
        print(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(paths)}")
        return 2
    for number in args.numbers or paths:
        path = paths[number]
        print(f"running {path.name}", flush=True)
        executed = run(path)
        alt, png = curate(executed)
        clean = json.loads(path.read_text(encoding="utf-8"))
        for cell, done in zip(clean["cells"], executed["cells"], strict=True):
            if cell["cell_type"] == "code":
                cell["outputs"] = done["outputs"]
                cell["execution_count"] = done["execution_count"]
        path.write_text(json.dumps(clean, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"kept {len(png):,} bytes: {alt}")
        if number in README_PICTURE:
            README_PICTURE[number].write_bytes(png)
            print(f"wrote {README_PICTURE[number].relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
