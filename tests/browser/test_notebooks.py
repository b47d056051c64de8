"""Notebook 02 in JupyterLab, as a person runs it: all cells, watched while they run."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import (
    REPOSITORY,
    Lab,
    browser_page,
    chromium,
    open_notebook,
    run_cell,
    running_lab,
    save_notebook,
)
from .test_widgets import have, screenshot

NAME = "02_live_snr.ipynb"
FIRST = "img[alt^='A small GPT learns Python']"
SECOND = "img[alt^='The same at ten times the learning rate']"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="needs Chromium"),
    pytest.mark.skipif(not have("playwright", "jupyterlab"), reason="needs JupyterLab"),
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    smoke = os.environ.get("LOWMEM_SMOKE", "1")  # 0: at full size, for pictures to look at
    folder = tmp_path_factory.mktemp("notebooks")
    with running_lab(sys.executable, folder, LOWMEM_SMOKE=smoke) as lab:
        shutil.copy(REPOSITORY / "notebooks" / NAME, lab.folder / NAME)
        yield lab


def show(page: Any, picture: Any) -> None:
    picture.scroll_into_view_if_needed()
    page.wait_for_timeout(300)


def menu(page: Any, *labels: str) -> None:
    """Choose from the menu bar, where what is chosen is there in every version."""
    page.locator(".lm-MenuBar-itemLabel").filter(has_text=labels[0]).first.click()
    for label in labels[1:]:
        page.locator(".lm-Menu-itemLabel").filter(has_text=label).first.click()


@pytest.mark.slow
def test_the_live_figure_changes_while_its_cell_runs_and_stays(lab: Lab) -> None:
    with browser_page(1280, 1500) as page:
        page.set_default_timeout(180_000)
        open_notebook(page, lab, NAME)
        menu(page, "Run", "Run All Cells")
        first = page.locator(f".jp-OutputArea-output {FIRST}")
        # The picture that came with the file goes when its cell starts; then this one comes.
        first.wait_for()
        show(page, first)
        seen: list[str] = []
        drawn: set[str] = set()
        second = page.locator(f".jp-OutputArea-output {SECOND}")
        while not second.count():
            alt = first.get_attribute("alt") or ""
            if alt not in seen:
                seen.append(alt)
                drawn.add(str(hash(first.get_attribute("src"))))
                if len(seen) == 3:
                    screenshot(page, lab, "notebook-02-running")
            page.wait_for_timeout(100)
        assert len(seen) >= 3, "the live figure was not seen to change"
        assert len(drawn) >= 3
        page.get_by_text("removed lowmem-scratch-02").wait_for()
        assert not page.locator(".jp-RenderedText[data-mime-type*='error']").count()
        assert first.count() == second.count() == 1  # one display each, updated in place
        show(page, first)
        screenshot(page, lab, "notebook-02-live")
        save_notebook(page)
        final = first.get_attribute("alt")

        open_notebook(page, lab, NAME)
        first.wait_for()
        assert first.get_attribute("alt") == final
        assert first.evaluate("image => image.naturalWidth") > 600
        show(page, second)
        screenshot(page, lab, "notebook-02-reloaded")


@pytest.mark.slow
def test_the_menu_of_layers_changes_the_picture(lab: Lab) -> None:
    """What nbval cannot see: a person's choice reaches the kernel and comes back drawn."""
    cell = """\
import torch
from lowmem.demo import gpt
from lowmem.ui import second_moment_explorer
torch.set_num_threads(1)
model = gpt.GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
gpt.train(model, optimizer, gpt.python_text(1.0)[0], 5)
second_moment_explorer(model, optimizer)"""
    lab.write("menu.ipynb", [cell])
    with browser_page() as page:
        page.set_default_timeout(180_000)
        open_notebook(page, lab, "menu.ipynb")
        run_cell(page)
        page.locator("img[alt^='Second moment of tok_emb.weight']").wait_for()
        page.get_by_label("Layer").select_option("blocks.2.attn.k_proj.weight")
        page.locator("img[alt^='Second moment of blocks.2.attn.k_proj.weight']").wait_for()
        assert not page.locator("img[alt^='Second moment of tok_emb.weight']").count()
        screenshot(page, lab, "second-moment-menu")


def test_the_notebook_that_is_watched_is_there() -> None:
    assert Path(REPOSITORY / "notebooks" / NAME).exists()
