"""Compiled kernels, cached by numba in ``__pycache__``."""

from pathlib import Path

from lowmem.kernels import notice  # noqa: F401 - from here on it listens to numba
from lowmem.kernels.cache import drop_stale

drop_stale(Path(__file__).parent)
