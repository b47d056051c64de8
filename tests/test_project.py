"""The project itself: what importing it costs, one version, one address, valid metadata."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def load_stamp() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stamp", ROOT / "scripts" / "stamp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stamp"] = module
    spec.loader.exec_module(module)
    return module


stamp = load_stamp()


def top_level_modules_after(code: str) -> set[str]:
    """The top-level names in ``sys.modules`` of a fresh interpreter that ran ``code``."""
    code += "\nimport sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


# What importing costs


def test_importing_lowmem_loads_nothing_heavy() -> None:
    loaded = top_level_modules_after("import lowmem")
    assert "lowmem" in loaded
    heavy = {"torch", "numpy", "numba", "matplotlib", "ipywidgets", "IPython", "tqdm"}
    assert not loaded & heavy


@pytest.mark.parametrize(
    "code",
    [
        "lowmem.DSA; lowmem.SlimAdamW; lowmem.clip_grad_norm_",
        "lowmem.SNRTracker; lowmem.snr; lowmem.derive_rules; lowmem.plan; lowmem.iocheck",
    ],
)
def test_the_public_names_add_no_user_interface(code: str) -> None:
    before = top_level_modules_after("import torch")
    after = top_level_modules_after(f"import torch, lowmem; {code}")
    assert not (after - before) & {"matplotlib", "ipywidgets", "IPython"}


def test_help_needs_no_torch() -> None:
    loaded = top_level_modules_after("from lowmem.cli import build_parser; build_parser()")
    assert not loaded & {"torch", "numba", "matplotlib", "ipywidgets"}


def test_every_public_name_is_there_and_unknown_ones_are_refused() -> None:
    import lowmem

    for name in lowmem.__all__:
        assert callable(getattr(lowmem, name))
        assert name in dir(lowmem)
    with pytest.raises(AttributeError, match="no attribute 'AdamZ'"):
        lowmem.AdamZ  # noqa: B018


# Metadata


def test_one_version_everywhere() -> None:
    import lowmem

    version = PROJECT["project"]["version"]
    assert lowmem.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r'(?m)^version: "(.+)"$', citation)[1] == version  # type: ignore[index]


def test_dependencies_have_floors_and_no_ceilings() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in [*PROJECT["project"]["dependencies"], *(r for e in extras for r in e)]:
        assert re.fullmatch(r"[A-Za-z0-9._-]+>=[0-9.]+", requirement), requirement


def test_core_dependencies_leave_colabs_pinned_packages_alone() -> None:
    names = {re.split(r"[>=<]", r)[0] for r in PROJECT["project"]["dependencies"]}
    assert names == {"torch", "numpy", "numba", "tqdm", "matplotlib", "ipywidgets"}


def test_citation_is_valid_yaml_with_the_fields_that_cff_asks_for() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == [{"name": "The lowmem authors"}]
    assert citation["license"] == PROJECT["project"]["license"] == "MIT"
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Repository"]


def test_changelog_is_in_keep_a_changelog_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.startswith("# Changelog\n")
    releases = re.findall(r"(?m)^## \[(.+?)\]", text)
    assert releases[0] == "Unreleased"
    for release in releases:
        assert f"\n[{release}]: https://" in text
    kinds = set(re.findall(r"(?m)^### (.+)$", text))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# The one address


def test_every_file_states_the_one_address() -> None:
    address = stamp.read_address(ROOT)
    assert stamp.stale_files(ROOT, address) == {}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"git+{address.url}" in readme
    assert f"git clone {address.url}" in readme


def project_copy(root: Path) -> Path:
    """A small project with one of each place where the address stands."""
    old = "https://github.com/old/thing"
    (root / "notebooks").mkdir(parents=True)
    (root / "pyproject.toml").write_text(
        f'[project.urls]\nRepository = "{old}"\n\n[tool.lowmem]\nref = "main"\n'
    )
    (root / "README.md").write_text(
        "[![Open](badge.svg)](https://colab.research.google.com/github/old/thing/blob/main/"
        "notebooks/01_a.ipynb)\n"
        f"pip install git+{old}\npip install git+{old}@main\ngit clone {old}\n"
        "thanks to https://github.com/pytorch/pytorch and git+ssh\n"
    )
    (root / "CITATION.cff").write_text(f'repository-code: "{old}"\nurl: "{old}"\n')
    (root / "CHANGELOG.md").write_text(f"[Unreleased]: {old}/commits/main\n[pip]: {old}x\n")
    code = ["import sys\n", f'REPO = "{old}"\n', 'REF = "main"\n', "x = 1"]
    cells = [
        {
            "cell_type": "markdown",
            "source": "https://colab.research.google.com/github/old/thing/blob/main/notebooks/é.ipynb",
        },
        {"cell_type": "code", "source": code},
        {"cell_type": "code", "source": '    REPO = "old/thing"\n    REF = "main"'},
    ]
    (root / "notebooks" / "01_a.ipynb").write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    return root


def test_stamping_reaches_every_form_and_nothing_else(tmp_path: Path) -> None:
    root = project_copy(tmp_path)
    assert stamp.main(["--check"], root) == 0
    assert stamp.main(["https://github.com/new-owner/low.mem/", "release/v1"], root) == 0
    assert stamp.read_address(root) == stamp.Address(
        "https://github.com/new-owner/low.mem", "release/v1"
    )
    readme = (root / "README.md").read_text()
    assert "github/new-owner/low.mem/blob/release/v1/notebooks/01_a.ipynb" in readme
    assert "pip install git+https://github.com/new-owner/low.mem\n" in readme
    assert "pip install git+https://github.com/new-owner/low.mem@release/v1\n" in readme
    assert "git clone https://github.com/new-owner/low.mem\n" in readme
    assert "https://github.com/pytorch/pytorch" in readme
    assert "new-owner/low.mem" in (root / "CHANGELOG.md").read_text()
    notebook = json.loads((root / "notebooks" / "01_a.ipynb").read_text())
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert "new-owner/low.mem/blob/release/v1/notebooks/é.ipynb" in sources[0]
    assert 'REPO = "https://github.com/new-owner/low.mem"\nREF = "release/v1"\nx = 1' in sources[1]
    assert sources[2] == '    REPO = "new-owner/low.mem"\n    REF = "release/v1"'
    assert isinstance(notebook["cells"][1]["source"], list)
    files = [p for p in root.rglob("*") if p.is_file()]
    assert not [p for p in files if "old/thing" in p.read_text().replace("old/thingx", "")]
    # Once more changes nothing, and back again gives the first state.
    assert stamp.main(["--check"], root) == 0
    assert stamp.main(["https://github.com/old/thing", "main"], root) == 0
    fresh = project_copy(tmp_path / "fresh")
    assert (root / "README.md").read_text() == (fresh / "README.md").read_text()


@pytest.mark.parametrize("name", ["README.md", "CITATION.cff", "notebooks/01_a.ipynb"])
def test_check_names_a_file_that_disagrees_and_leaves_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project_copy(tmp_path)
    path = root / name
    path.write_text(path.read_text().replace("old/thing", "stranger/thing"))
    stranger = path.read_text()
    assert stamp.main(["--check"], root) == 1
    assert name in capsys.readouterr().out
    assert path.read_text() == stranger


@pytest.mark.parametrize(
    "words",
    [
        ["https://example.org/a/b"],
        ["git@github.com:a/b.git"],
        ["https://github.com/a/b.git"],
        ["https://github.com/a"],
        ['https://github.com/a/b"'],
        ["https://github.com/a/b", "two words"],
        ["https://github.com/a/b", "\\1"],
    ],
)
def test_an_address_of_another_form_is_refused_and_nothing_is_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project_copy(tmp_path)
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert stamp.main(words, root) == 2
    assert words[-1] in capsys.readouterr().err.replace("\\\\", "\\")
    assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before


# The two commands, up to where they would install


def make_in_a_fresh_clone(
    tmp_path: Path, *words: str, python: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run ``make`` on the Makefile alone; ``python`` is a shell script that plays Python."""
    if shutil.which("make") is None:
        pytest.skip("needs make")
    clone = tmp_path / "a clone"
    clone.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, clone)
    if python:
        actor = tmp_path / "python3"
        actor.write_text(f"#!/bin/sh\n{python}\n")
        actor.chmod(0o755)
        words = (*words, f"PYTHON={actor}")
    return make(clone, *words)


def make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # These tests may themselves run under make; its own variables are not for this one.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *words], cwd=folder, capture_output=True, text=True, timeout=60, env=environment
    )


def test_make_alone_teaches_and_installs_nothing(tmp_path: Path) -> None:
    shown = make_in_a_fresh_clone(tmp_path)
    assert shown.returncode == 0
    for target in ("make demo", "make test", "make notebooks", "make bench", "make clean"):
        assert target in shown.stdout
    assert not (tmp_path / "a clone" / ".venv").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_an_old_python_is_named_with_the_way_out(tmp_path: Path, target: str) -> None:
    old = 'test "$1" = --version && echo "Python 3.9.1" && exit 0; exit 1'
    shown = make_in_a_fresh_clone(tmp_path, target, python=old)
    assert shown.returncode != 0
    assert "lowmem needs Python 3.11 or newer; here is: Python 3.9.1." in shown.stderr
    assert f"make PYTHON=/path/to/python3.12 {target}" in shown.stderr
    assert not (tmp_path / "a clone" / ".venv").exists()


def test_a_python_without_venv_is_named_with_the_way_out(tmp_path: Path) -> None:
    # What Debian's python3 does: it leaves half an environment behind and fails.
    bare = 'test "$1" = -m || exit 0; mkdir -p "$3/bin"; exit 1'
    shown = make_in_a_fresh_clone(tmp_path, "demo", python=bare)
    assert shown.returncode != 0
    assert "apt-get install python3-venv" in shown.stderr
    assert not (tmp_path / "a clone" / ".venv").exists()


def test_one_install_serves_until_the_requirements_change_or_the_clone_moves(
    tmp_path: Path,
) -> None:
    """pip is played by a script that counts how often it is asked."""
    count = tmp_path / "count"
    stays = f'test "$2" = pip && echo x >> "{count}"; exit 0'
    makes = f"""test "$1" = -m || exit 0
mkdir -p "$3/bin"; printf '%s\\n' '#!/bin/sh' '{stays}' > "$3/bin/python"
chmod +x "$3/bin/python" """
    clone = tmp_path / "a clone"

    def installs() -> int:
        return len(count.read_text().splitlines())

    def again(folder: Path) -> int:
        assert make(folder, "demo").returncode == 0
        return installs()

    first = make_in_a_fresh_clone(tmp_path, "demo", python=makes)
    assert first.returncode == 0, first.stderr
    assert installs() == 1
    assert again(clone) == 1
    later = (clone / ".venv" / ".ready").stat().st_mtime + 5
    os.utime(clone / "pyproject.toml", (later, later))
    assert again(clone) == 2
    os.utime(clone / "pyproject.toml", (later - 60, later - 60))
    assert again(clone) == 2
    moved = clone.rename(tmp_path / "moved here")
    assert again(moved) == 3
    assert again(moved) == 3
