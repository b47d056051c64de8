"""A stranger's first minute: install from a git URL into a new environment, then use it.

What is installed is the last commit of this clone, with its dependencies, exactly as
``pip install git+https://…`` would; only the address is a local one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.install

ROOT = Path(__file__).resolve().parent.parent

STEPS = """
import pathlib, sys, torch, lowmem

site = pathlib.Path(sys.prefix).resolve()
assert site in pathlib.Path(lowmem.__file__).resolve().parents, lowmem.__file__

table = torch.nn.Embedding(1000, 16, sparse=True)
before = table.weight.detach().clone()
with lowmem.DSA(table.parameters(), lr=0.1) as opt:
    table(torch.tensor([3, 7, 3])).sum().backward()
    opt.step()
moved = (table.weight != before).any(dim=1).nonzero().flatten().tolist()
assert moved == [3, 7], moved

layer = torch.nn.Linear(32, 8)
before = layer.weight.detach().clone()
opt = lowmem.SlimAdamW(layer.parameters(), lr=0.1)
layer(torch.ones(4, 32)).sum().backward()
opt.step()
assert not torch.equal(layer.weight, before)
print("both stepped")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of programs of a new environment that holds lowmem and its dependencies."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    if head.returncode:
        pytest.skip(f"needs a clone to install from: {head.stderr.strip()}")
    # A space in the path, because people have them.
    folder = tmp_path_factory.mktemp("a new") / "environment"
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    url = "git+" + ROOT.as_uri()
    install = run(programs / "python", "-m", "pip", "install", "--no-input", url, timeout=1800)
    assert install.returncode == 0, install.stdout + install.stderr
    yield programs
    shutil.rmtree(folder)  # a gigabyte and more


def run(*command: str | Path, timeout: int = 300) -> subprocess.CompletedProcess[str]:
    """Run outside the clone and without its import paths, so that only the install is seen."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=Path(command[0]).parent.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_says_what_it_can_do(installed: Path) -> None:
    shown = run(installed / "lowmem", "--help")
    assert shown.returncode == 0, shown.stderr
    for command in ("demo", "plan", "iocheck", "rules", "bench", "store"):
        assert command in shown.stdout


def test_the_package_imports(installed: Path) -> None:
    imported = run(installed / "python", "-c", "import lowmem; print(lowmem.__version__)")
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.strip()


def test_each_optimizer_takes_a_step(installed: Path) -> None:
    stepped = run(installed / "python", "-c", STEPS)
    assert stepped.returncode == 0, stepped.stderr
    assert stepped.stdout.splitlines()[-1] == "both stepped"


def test_the_install_is_what_the_environment_says_it_is(installed: Path) -> None:
    """Consistent dependencies, type hints shipped, and the layer map beside the code."""
    checked = run(installed / "python", "-m", "pip", "check")
    assert checked.returncode == 0, checked.stdout
    code = "import lowmem, pathlib; print(pathlib.Path(lowmem.__file__).parent)"
    package = Path(run(installed / "python", "-c", code).stdout.strip())
    assert (package / "py.typed").exists()
    shipped = {str(p.relative_to(package.parent)) for p in package.rglob("*")}
    listing = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "HEAD", "lowmem/"]
    tracked = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split()
    assert set(tracked) - shipped == set()
