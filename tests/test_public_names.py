"""``lowmem.plan`` and ``lowmem.iocheck`` are functions, whatever was imported first."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST = [
    "import lowmem",
    "import lowmem.{name}",
    "from lowmem import {name}",
    "from lowmem.{name} import {name}",
    "import importlib; importlib.import_module('lowmem.{name}')",
    "import lowmem.cli; lowmem.cli.build_parser()",
]


@pytest.mark.parametrize("name", ["plan", "iocheck"])
@pytest.mark.parametrize("first", FIRST)
def test_a_public_function_is_never_its_module(name: str, first: str) -> None:
    code = "\n".join(
        [
            first.format(name=name),
            "import inspect, lowmem",
            f"assert inspect.isfunction(lowmem.{name}), lowmem.{name}",
            f"from lowmem import {name} as short",
            f"from lowmem.{name} import {name} as long",
            f"assert short is long is lowmem.{name}",
            f"import lowmem.{name}",
            f"assert inspect.isfunction(lowmem.{name}), lowmem.{name}",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, lowmem; "
        "print(sorted(m for m in ('ipywidgets', 'matplotlib', 'numba', 'torch') "
        "if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
