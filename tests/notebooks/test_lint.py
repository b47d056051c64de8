"""The rules that every notebook keeps, so that it opens, installs and teaches anywhere."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).resolve().parents[2]
NAMES = [
    "01_ten_million_entities.ipynb",
    "02_live_snr.ipynb",
    "03_rules.ipynb",
    "04_io_check.ipynb",
]


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


stamp = load_script("stamp")
notebook_pictures = load_script("notebook_pictures")
ADDRESS = stamp.read_address(ROOT)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def notebook(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def prose(notebook: dict[str, Any]) -> str:
    return "\n\n".join(source(c) for c in notebook["cells"] if c["cell_type"] == "markdown")


def without_magics(text: str) -> str:
    return re.sub(r"(?m)^[%!].*$", "pass", text)


def test_every_notebook_there_is_is_tested_and_listed() -> None:
    assert sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"](notebooks/{name})" in readme
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    smoke = "--nbval-lax --nbval-current-env --nbval-cell-timeout=300 -x notebooks/"
    assert f"LOWMEM_SMOKE=1 $(PY) -m pytest {smoke}" in makefile  # the folder, so all of them
    assert re.search(r"(?m)^test:.*\n(?:\t.*\n)*?\t.*notebooks-smoke", makefile)


def test_the_format_is_4_5_with_ids(name: str, notebook: dict[str, Any]) -> None:
    nbformat.validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)


def test_metadata_choose_a_gpu_and_python_and_hold_no_widgets(notebook: dict[str, Any]) -> None:
    metadata = notebook["metadata"]
    assert "widgets" not in metadata
    assert metadata["accelerator"] == "GPU"
    assert metadata["colab"]["gpuType"] == "T4"
    assert metadata["kernelspec"]["name"] == "python3"


def test_badge_and_install_cell_state_the_one_address(name: str, notebook: dict[str, Any]) -> None:
    top = source(notebook["cells"][0])
    link = f"https://colab.research.google.com/github/{ADDRESS.slug}/blob/{ADDRESS.ref}/notebooks/"
    assert top.count("colab.research.google.com/github/") == 1
    assert f"]({link}{name})" in top
    install = source(code_cells(notebook)[0])
    assert f'REPO = "{ADDRESS.url}"' in install
    assert f'REF = "{ADDRESS.ref}"' in install
    text = json.dumps(notebook, ensure_ascii=False)
    assert stamp.stamp_notebook(text, ADDRESS) == text


def test_the_install_cell_does_nothing_where_lowmem_is(notebook: dict[str, Any]) -> None:
    guard = "import subprocess\nsubprocess.run = lambda *a, **k: 1 / 0\n"
    install = source(code_cells(notebook)[0])
    done = subprocess.run(
        [sys.executable, "-c", guard + install], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("lowmem ")


def test_the_top_says_what_it_shows_and_needs(notebook: dict[str, Any]) -> None:
    top = source(notebook["cells"][0])
    assert top.startswith("# ")
    assert "**What it shows.**" in top
    needs = top[top.index("**What it needs.**") :]
    assert "GPU" in needs
    assert "disk" in needs
    assert "minutes" in needs


def test_the_end_says_what_was_seen_what_it_means_and_cleans_up(notebook: dict[str, Any]) -> None:
    headings = re.findall(r"(?m)^## (.+)$", prose(notebook))
    assert headings[-3:] == ["What you saw", "What it means", "Clean up"]
    last = source(notebook["cells"][-1])
    assert "shutil.rmtree(FOLDER)" in last
    assert "assert not FOLDER.exists()" in last


def test_every_picture_cell_has_an_assertion_near_it(notebook: dict[str, Any]) -> None:
    """A claim that is drawn is asserted too: in its own cell or in the one before or after."""
    cells = [source(cell) for cell in code_cells(notebook)]
    drawing = re.compile(
        r"(?m)^\s*(?:display\()?(?:bars|curves|second_moment_picture)\(|with Live\("
    )
    for at, text in enumerate(cells):
        if drawing.search(text):
            near = "\n".join(cells[max(0, at - 1) : at + 2])
            assert re.search(r"(?m)^\s*assert |assert_close\(", near), text[:200]
    assert sum("assert" in text for text in cells) >= len(cells) / 2


def test_no_absolute_paths_and_no_pyplot(notebook: dict[str, Any]) -> None:
    for cell in notebook["cells"]:
        text = source(cell)
        assert not re.search(
            r"(?<![\w.:/<])/(?:home|root|tmp|usr|work|content|kaggle|Users)\b", text
        )
        assert not re.search(r"\b[A-Z]:\\\\", text)
        assert "pyplot" not in text
        assert "clear_output" not in text


def test_the_only_output_is_one_curated_picture(notebook: dict[str, Any]) -> None:
    outputs = [out for cell in code_cells(notebook) for out in cell["outputs"]]
    assert len(outputs) == 1
    (output,) = outputs
    assert output["output_type"] == "display_data"
    assert set(output["data"]) == {"image/png", "text/plain"}
    png = base64.b64decode(output["data"]["image/png"])
    assert len(png) < 200_000
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 600
    assert height > 200
    assert len(output["metadata"]["image/png"]["alt"]) > 40
    counts = [cell["execution_count"] for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))  # nbval fails on unrun cells with outputs


def test_code_compiles_and_cells_are_short(notebook: dict[str, Any]) -> None:
    for cell in code_cells(notebook):
        text = without_magics(source(cell))
        ast.parse(text)
        assert len(text.splitlines()) <= 45, text
        assert max(map(len, text.splitlines())) <= 110, text


def test_code_cells_come_with_prose(notebook: dict[str, Any]) -> None:
    """Never more than three code cells without a word between them."""
    run = 0
    for cell in notebook["cells"]:
        run = run + 1 if cell["cell_type"] == "code" else 0
        assert run <= 3, source(cell)[:100]


# The script that keeps the pictures


def html_output(*pictures: tuple[str, bytes]) -> dict[str, Any]:
    html = "".join(
        f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(png).decode()}" style="">'
        for alt, png in pictures
    )
    return {"output_type": "display_data", "data": {"text/html": html}, "metadata": {}}


def some_png(noise: int = 40) -> bytes:
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (noise, noise, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def cell(tags: list[str], *outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "metadata": {"tags": tags, "execution": {}},
        "outputs": list(outputs),
        "execution_count": 9,
        "source": "",
    }


def test_of_the_outputs_only_the_last_picture_of_the_tagged_cell_stays() -> None:
    png = some_png()
    text = {"output_type": "stream", "name": "stdout", "text": "hello"}
    book = {
        "metadata": {"widgets": {}},
        "cells": [
            cell([], text, html_output(("other", png))),
            {"cell_type": "markdown", "source": ""},
            cell(["picture"], text, html_output(("first", png)), html_output(("it&#x27;s", png))),
        ],
    }
    alt, kept = notebook_pictures.curate(book)
    assert alt == "it's"
    assert book["metadata"] == {}
    first, _, second = book["cells"]
    assert first["outputs"] == []
    assert [c["execution_count"] for c in (first, second)] == [1, 2]
    assert second["metadata"] == {"tags": ["picture"]}
    (output,) = second["outputs"]
    assert base64.b64decode(output["data"]["image/png"]) == kept
    assert output["data"]["text/plain"] == ["it's"]


def test_a_picture_is_never_too_large() -> None:
    assert len(notebook_pictures.small(some_png(1000))) < 200_000


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([cell([])], "no cell has the tag"),
        ([cell(["picture"])], "shows no picture"),
        ([cell(["picture"], html_output(("a", some_png())))] * 2, "two cells"),
    ],
)
def test_a_notebook_without_its_one_picture_is_refused(
    cells: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        notebook_pictures.curate({"metadata": {}, "cells": json.loads(json.dumps(cells))})
