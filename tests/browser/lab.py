"""JupyterLab on loopback and Chromium in front of it, for tests that click."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


def chromium() -> str | None:
    """Where Chromium is, or ``None``."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Lab:
    """A running JupyterLab."""

    folder: Path
    port: int
    token: str

    def url(self, notebook: str) -> str:
        return f"http://127.0.0.1:{self.port}/lab/tree/{notebook}?token={self.token}&reset"

    def write(self, name: str, cells: list[str]) -> None:
        """Make a notebook of these code cells."""
        notebook = {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {
                "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
            },
            "cells": [
                {"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "outputs": [],
                 "execution_count": None, "source": source}
                for number, source in enumerate(cells)
            ],
        }  # fmt: skip
        (self.folder / name).write_text(json.dumps(notebook))

    def saved(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


@contextlib.contextmanager
def running_lab(python: str, folder: Path, **environment: str) -> Iterator[Lab]:
    """JupyterLab of this interpreter on a free port, with files and settings in ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    files = folder / "files"
    files.mkdir(parents=True)
    home = {
        name: str(folder / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    _no_news(Path(home["JUPYTER_CONFIG_DIR"]))
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [
        python, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.token={token}",
        f"--ServerApp.root_dir={files}", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    log = folder / "lab.log"
    with open(log, "w") as output:
        server = subprocess.Popen(
            command, cwd=files, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **home, "PYTHONPATH": path, **environment},
        )  # fmt: skip
    lab = Lab(files, port, token)
    try:
        _wait_until_up(lab, server, log)
        yield lab
    finally:
        server.terminate()  # which ends its kernels too
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _no_news(configuration: Path) -> None:
    """The question whether to fetch news would lie over the page."""
    settings = configuration / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )


def _wait_until_up(lab: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{lab.port}/api?token={lab.token}"
            with urllib.request.urlopen(url, timeout=2):
                return
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


@contextlib.contextmanager
def browser_page(width: int = 1024, height: int = 1300) -> Iterator[Any]:
    """A page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium(), headless=True, args=CHROMIUM_FLAGS
        )
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(60_000)
            yield page
        finally:
            browser.close()


def open_notebook(page: Any, lab: Lab, name: str) -> None:
    """Open a notebook alone, without the side bar, its kernel ready."""
    page.goto(lab.url(name))
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_function(
        "() => document.querySelector('.jp-NotebookPanel-toolbar')"
        " && document.querySelectorAll('.jp-Spinner, .jp-LabShell-loading').length === 0"
    )
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']")
    if page.locator(".jp-FileBrowser:visible").count():
        page.keyboard.press("Control+b")


def run_cell(page: Any, number: int = 0) -> None:
    """Run one cell, once it is seen to have started."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    prompt = cell.locator(".jp-InputPrompt").first
    before = prompt.inner_text()
    for _ in range(20):  # a key that is pressed before the page is ready is lost
        cell.locator(".jp-InputArea-editor").first.click()
        page.keyboard.press("Control+Enter")
        for _ in range(20):
            if prompt.inner_text() != before:
                return
            page.wait_for_timeout(100)
    raise AssertionError(f"cell {number} did not start")


def save_notebook(page: Any) -> None:
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
