"""The triton kernels under triton's interpreter, in a process of their own.

Whether triton interprets is decided when it is first imported, hence the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).with_name("test_slim_backends.py")


def test_interpreted_triton_equals_the_reference() -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-x", "-k", "cuda", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
