"""Notebook 01's promise: after a real restart of the kernel, one cell brings everything back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).resolve().parents[2]


def run_in_a_new_kernel(cells: list[Any], folder: Path) -> list[Any]:
    book = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources=resources, shutdown_kernel="immediate"
    )
    return list(client.execute().cells)


@pytest.mark.slow
def test_the_resume_cell_needs_nothing_but_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWMEM_SMOKE", "1")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    book = nbformat.read(ROOT / "notebooks" / "01_ten_million_entities.ipynb", as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    lost = next(i for i, cell in enumerate(code) if "%reset -f" in cell.source)
    run_in_a_new_kernel(code[:lost], tmp_path)  # killed at the end: the optimizer is not closed
    *_, resumed = run_in_a_new_kernel([code[0], code[lost + 1]], tmp_path)
    said = "".join(output.get("text", "") for output in resumed.outputs)
    assert "back at step 300" in said
