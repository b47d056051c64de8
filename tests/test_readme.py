"""README.md keeps what it says: its code runs, its links and pictures are there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
COMMANDS = sorted(set(re.findall(r"(?m)(?:^|`)lowmem ([a-z]+)", README)))


def anchor(heading: str) -> str:
    """GitHub's name for a heading."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


def test_every_python_block_runs_as_it_stands(tmp_path: Path) -> None:
    """In the order of the page, each in its own interpreter, all in one folder.

    The one change: a table of 10,000,000 rows becomes one of 10,000.
    """
    assert len(BLOCKS) >= 2
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    for block in BLOCKS:
        code = block.replace("10_000_000", "10_000")
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
            timeout=300,
        )
        assert run.returncode == 0, f"{block}\n{run.stdout}\n{run.stderr}"


def test_five_lines_of_use_come_first() -> None:
    for block in BLOCKS[:2]:
        assert len(block.splitlines()) == 5
    assert "lowmem.DSA" in BLOCKS[0]
    assert "lowmem.SlimAdamW" in BLOCKS[1]


def test_an_address_that_is_nobodys_is_called_so_where_it_is_first_pasted() -> None:
    install = README.index("pip install git+https://")
    if "github.com/no-home" in README[install:]:
        assert "placeholder" in README[install : install + 200]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_the_page_names_exist(command: str) -> None:
    from lowmem.cli import COMMANDS as KNOWN

    assert command in KNOWN


def test_make_targets_that_the_page_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"`make ([a-z-]+)`|(?m:^make ([a-z-]+))", README)):
        name = next(filter(None, target))
        assert re.search(rf"(?m)^{name}:", makefile), name


def test_links_and_pictures_inside_the_repository_are_there() -> None:
    targets = re.findall(r"\]\((?!https?://)([^)\s]+)\)", README)
    assert targets
    headings = {anchor(h) for h in re.findall(r"(?m)^#+ (.+)$", README)}
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, target
        else:
            assert (ROOT / target).exists(), target


def test_every_notebook_is_in_the_table() -> None:
    """A notebook that exists is linked with its badge; one that does not is called coming."""
    rows = dict(re.findall(r"(?m)^\| (?:\[)?(\d\d) (.+)$", README))
    assert sorted(rows) == ["01", "02", "03", "04"]
    present = {path.name[:2]: path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(present) <= set(rows)
    for number, row in rows.items():
        if number in present:
            assert "coming" not in row
            assert f"/notebooks/{present[number]})" in row
            assert f"](notebooks/{present[number]})" in row
        else:
            assert "coming" in row


def test_markers_for_generated_parts_come_in_pairs() -> None:
    for name in ("bench:dsa", "bench:slim", "troubleshooting"):
        assert README.count(f"<!-- {name} -->") == README.count(f"<!-- /{name} -->") == 1


def messages_in_the_package() -> list[str]:
    """Every string of the package's code; what an f-string fills in stands as ``…``."""
    found = []
    for path in (ROOT / "lowmem").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [" ".join(message.split()) for message in found]


def test_troubleshooting_quotes_messages_that_exist() -> None:
    """A quoted message is a piece of one in the code, with ``…`` wherever a value stands."""
    section = README.split("<!-- troubleshooting -->")[1].split("<!-- /troubleshooting -->")[0]
    quoted = re.findall(r"\*\*`(.+?)`\*\*", section)
    known = messages_in_the_package()
    assert quoted
    for quote in quoted:
        assert any(quote in message for message in known), quote
