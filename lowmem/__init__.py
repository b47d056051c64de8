"""lowmem: train with Adam where Adam's states do not fit, and do it faster than Adam.

``DSA`` keeps the two moments of a sparse embedding in a file and moves only the
rows that a batch touches. ``SlimAdamW`` replaces the second moment of dense layers
by its mean along the axes where a signal-to-noise analysis allows it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem.clip import clip_grad_norm_
    from lowmem.dsa.optimizer import DSA
    from lowmem.iocheck import iocheck
    from lowmem.plan import plan
    from lowmem.slim.optimizer import SlimAdamW
    from lowmem.slim.rules import derive_rules
    from lowmem.slim.snr import SNRTracker, snr

__version__ = "0.1.0"

__all__ = [
    "DSA",
    "SNRTracker",
    "SlimAdamW",
    "clip_grad_norm_",
    "derive_rules",
    "iocheck",
    "plan",
    "snr",
]

# Where each public name lives. Names load on first use, so that `import lowmem`
# stays as quick as `import torch`.
_HOMES = {
    "DSA": "lowmem.dsa.optimizer",
    "SNRTracker": "lowmem.slim.snr",
    "SlimAdamW": "lowmem.slim.optimizer",
    "clip_grad_norm_": "lowmem.clip",
    "derive_rules": "lowmem.slim.rules",
    "iocheck": "lowmem.iocheck",
    "plan": "lowmem.plan",
    "snr": "lowmem.slim.snr",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lowmem' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps ``lowmem.plan`` and ``lowmem.iocheck`` the functions.

    Importing the submodules of the same names would put the modules in their place.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
