"""The widgets in JupyterLab, clicked by a browser; once as it is, once with Colab's pins."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import Lab, browser_page, chromium, open_notebook, run_cell, running_lab, save_notebook

HERE = Path(__file__).parent
COLAB_PYTHON = os.environ.get("LOWMEM_COLAB_PYTHON", "")


def have(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="needs Chromium"),
    pytest.mark.skipif(not have("playwright"), reason="needs playwright"),
]

ENVIRONMENTS = [
    pytest.param(
        "jupyterlab",
        marks=pytest.mark.skipif(not have("jupyterlab"), reason="needs jupyterlab"),
    ),
    pytest.param(
        "colab",
        marks=pytest.mark.skipif(
            not COLAB_PYTHON,
            reason="set LOWMEM_COLAB_PYTHON to the python that make_colab_env.sh makes",
        ),
    ),
]


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "jupyterlab":
        with running_lab(sys.executable, folder) as lab:
            yield lab
    else:
        # Colab's marker makes the work run in the callback, as it must there.
        with running_lab(COLAB_PYTHON, folder, COLAB_RELEASE_TAG="release-colab-test") as lab:
            yield lab


@pytest.fixture
def page() -> Iterator[Any]:
    with browser_page() as page:
        yield page


def screenshot(page: Any, lab: Lab, name: str) -> None:
    """Kept where ``LOWMEM_SCREENSHOTS`` says, for a person to look at."""
    folder = os.environ.get("LOWMEM_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{lab.folder.parent.name.rstrip('0')}-{name}.png")


def button(page: Any, text: str) -> Any:
    return page.locator(".jupyter-button, .widget-toggle-button").filter(has_text=text).first


def shown_progress(page: Any) -> float:
    """How far the progress bar is, as drawn."""
    return float(
        page.evaluate(
            "() => { const bar = document.querySelector('.progress-bar');"
            " return bar ? parseFloat(bar.style.width) || 0 : 0; }"
        )
    )


CHECK = """\
from lowmem.ui import io_check
widget = io_check(".", rows="1M", dim=32)
widget.seconds.value = {seconds}
widget.batch.value = "4096"
widget"""


def test_an_io_check_runs_shows_progress_and_a_table_and_stops(page: Any, lab: Lab) -> None:
    lab.write(
        "check.ipynb", [CHECK.format(seconds=10), "print('interrupted', widget.result.interrupted)"]
    )
    open_notebook(page, lab, "check.ipynb")
    run_cell(page)
    run = button(page, "Run")
    run.wait_for()
    screenshot(page, lab, "check-0-start")

    run.dblclick()  # two quick clicks start one check
    widths, messages = set(), set()
    box = page.locator(".jp-OutputArea").first
    while "Done" not in (text := box.inner_text()):
        widths.add(shown_progress(page))
        messages.update(re.findall(r"\d+%: .+", text))
        if len(messages) == 3:
            screenshot(page, lab, "check-1-running")
        page.wait_for_timeout(100)
    assert len(widths) >= 2, "the bar was not seen to move"
    assert len(messages) >= 3, "the phases were not seen"
    tables = page.locator(".jp-OutputArea-output table")
    tables.first.wait_for()
    read = " ".join(tables.all_inner_texts()).lower()
    assert "store on disk" in read
    assert "random" in read
    picture = page.locator(".jp-OutputArea-output img[alt]").first
    assert len(picture.get_attribute("alt")) > 20
    assert picture.evaluate("image => image.naturalWidth") > 500
    page.wait_for_timeout(800)  # a second check, had one been queued, would run now
    assert "Done" in page.locator(".jp-OutputArea").first.inner_text()
    screenshot(page, lab, "check-2-done")
    save_notebook(page)
    outputs = lab.saved("check.ipynb")["cells"][0]["outputs"]
    kept = "".join("".join(out.get("data", {}).get("text/html", "")) for out in outputs)
    assert "<table" in kept, "the answer is not in the saved notebook"

    run.click()
    stop = button(page, "Stop")
    page.wait_for_function("() => /[1-9]\\d?%:/.test(document.body.innerText)")
    stop.click()
    page.get_by_text("Stopped; this is what was measured.").wait_for()
    page.get_by_text("the check was stopped before its end").first.wait_for()
    screenshot(page, lab, "check-3-stopped")
    run_cell(page, 1)
    page.get_by_text("interrupted True").wait_for()


def test_an_error_is_a_sentence(page: Any, lab: Lab) -> None:
    lab.write("error.ipynb", [CHECK.format(seconds=10)])
    open_notebook(page, lab, "error.ipynb")
    run_cell(page)
    page.get_by_label("Directory", exact=True).fill("/no/such/place")
    page.get_by_label("Directory", exact=True).press("Tab")
    button(page, "Run").click()
    alert = page.get_by_role("alert").filter(has_text="That did not work")
    alert.wait_for()
    assert "/no/such/place" in alert.inner_text()
    assert "Traceback" not in page.locator(".jp-Notebook").inner_text()
    screenshot(page, lab, "check-4-error")


def test_the_planner_answers_what_is_chosen(page: Any, lab: Lab) -> None:
    lab.write("plan.ipynb", ["from lowmem.ui import planner\nplanner(machine='colab-t4')"])
    open_notebook(page, lab, "plan.ipynb")
    run_cell(page)
    page.get_by_text("Take DSA: Adam and SparseAdam do not fit.").first.wait_for()
    screenshot(page, lab, "plan-0-start")
    rows = page.get_by_label("Rows", exact=True)
    rows.fill("1M")
    rows.press("Tab")
    button(page, "Plan").click()
    page.get_by_text("All fit here. Take SparseAdam").first.wait_for()
    rows.fill("ten")
    rows.press("Tab")
    button(page, "Plan").click()
    page.get_by_role("alert").filter(has_text="Rows is 'ten'").wait_for()
    button(page, "Dense model").click()
    page.get_by_text("SlimAdamW keeps 0.12%").first.wait_for()
    screenshot(page, lab, "plan-1-dense")


LIVE = """\
import time, math
from lowmem.ui import HeatMap, Lines, Live
panels = [Lines("loss", "loss"), HeatMap("SNR over depth", "snr")]
with Live(panels, title="Live") as live:
    for step in range({steps}):
        time.sleep(0.02)
        snr = {{f"layer {{i}}": (i + 1) * step / 300 for i in range(6)}}
        live.log(step, loss=math.exp(-step / 100), snr=snr)
print("stopped", live.stopped, "redraws", live.redraws)"""


def test_a_live_picture_changes_while_the_cell_runs_and_stays(page: Any, lab: Lab) -> None:
    # Long enough for several redraws where the first one has to import and load fonts.
    lab.write("live.ipynb", [LIVE.format(steps=1000)])
    open_notebook(page, lab, "live.ipynb")
    run_cell(page)
    picture = page.locator(".jp-OutputArea-output img[alt^='Live.']")
    picture.wait_for()
    seen = set()
    while not page.get_by_text("stopped False").count():
        seen.add(picture.get_attribute("alt"))
        page.wait_for_timeout(50)
    assert len(seen) >= 3, "the picture was not seen to change"
    assert picture.count() == 1
    save_notebook(page)
    open_notebook(page, lab, "live.ipynb")
    picture.wait_for()
    assert "at step 999" in picture.get_attribute("alt")
    screenshot(page, lab, "live")


def test_stop_ends_a_live_loop_and_keeps_its_picture(page: Any, lab: Lab) -> None:
    lab.write("stop.ipynb", [LIVE.format(steps=100_000)])
    open_notebook(page, lab, "stop.ipynb")
    run_cell(page)
    picture = page.locator(".jp-OutputArea-output img[alt^='Live.']")
    picture.wait_for()
    page.wait_for_timeout(1500)
    page.keyboard.press("Escape")
    page.keyboard.press("i")
    page.keyboard.press("i")
    page.get_by_text("stopped True").wait_for()
    assert "Traceback" not in page.locator(".jp-Notebook").inner_text()
    assert picture.count() == 1
