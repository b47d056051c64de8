"""Machines: what memory and disk there is to fill."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from lowmem import env
from lowmem.units import short_bytes

_GIB = 1 << 30
RESOURCES = ("vram", "ram", "disk")
RESOURCE_NAMES = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}


@dataclass(frozen=True)
class Machine:
    """What a training process may fill, in bytes.

    Attributes:
        name: what to call it.
        ram: RAM that a fresh process can take without swapping.
        vram: memory of one GPU; 0 where there is none.
        disk: free bytes on a real disk.
        note: where the figures are from.
        waiting_share: of the RAM that file pages can have, what the system lets wait to be
            written in a long run; by default as Linux comes.
    """

    name: str
    ram: int
    vram: int = 0
    disk: int = 0
    note: str = ""
    waiting_share: float = field(default=env.waiting_share(), repr=False)

    def __post_init__(self) -> None:
        for resource in RESOURCES:
            value = getattr(self, resource)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{resource} is {value!r}; give bytes, for example 12e9")
            if not 0 <= value < 1 << 62:
                raise ValueError(f"{resource} is {value} bytes; it must be at least 0 and finite")
            object.__setattr__(self, resource, int(value))
        if self.ram == 0:
            raise ValueError("ram is 0 bytes; no process runs without RAM")
        if not 0 <= self.waiting_share <= 1:
            raise ValueError(f"waiting_share is {self.waiting_share}; it is from 0 to 1")

    @property
    def label(self) -> str:
        """The name as it stands in a sentence."""
        return "this machine" if self.name == "this" else self.name

    def limit(self, resource: str) -> int:
        """Bytes of ``"vram"``, ``"ram"`` or ``"disk"``."""
        if resource not in RESOURCES:
            raise ValueError(f"resource is {resource!r}; it is one of {', '.join(RESOURCES)}")
        return int(getattr(self, resource))

    def __str__(self) -> str:
        parts = [f"{short_bytes(self.ram)} RAM free"]
        if self.vram:
            parts.insert(0, f"{short_bytes(self.vram)} VRAM")
        parts.append(f"{short_bytes(self.disk)} disk free")
        return f"{self.label}: {', '.join(parts)}"


# The free machines as they were in 2026. RAM is what their own services leave.
PRESETS = {
    "colab-t4": Machine(
        "colab-t4", ram=11 * _GIB, vram=int(14.75 * _GIB), disk=65_000_000_000,
        note="free Colab with a T4, as of 2026: 12.67 GiB RAM, about 11 free",
    ),
    "colab-cpu": Machine(
        "colab-cpu", ram=11 * _GIB, disk=65_000_000_000,
        note="free Colab without a GPU, as of 2026: 12.67 GiB RAM, about 11 free",
    ),
    "kaggle-t4": Machine(
        "kaggle-t4", ram=29 * _GIB, vram=int(14.75 * _GIB), disk=20_000_000_000,
        note="free Kaggle, one of its two T4, as of 2026: 31 GiB RAM, 20 GB of kept output; "
        "/kaggle/temp may hold more, and machine='this' measures it",
    ),
}  # fmt: skip
MACHINE_NAMES = ("this", *PRESETS)


def get_machine(machine: str | Machine, directory: str | os.PathLike[str] = ".") -> Machine:
    """A machine by name; ``"this"`` is measured now, its disk where ``directory`` lies."""
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str):
        raise TypeError(f"machine is {machine!r}; give a name or a Machine(name, ram=…, disk=…)")
    if machine == "this":
        return this_machine(directory)
    if machine not in PRESETS:
        names = ", ".join(MACHINE_NAMES)
        raise ValueError(f"machine is {machine!r}; take one of {names}, or a Machine(…) of yours")
    return PRESETS[machine]


def this_machine(directory: str | os.PathLike[str] = ".") -> Machine:
    """What is free on this machine right now.

    Raises:
        OSError: ``directory`` does not exist.
    """
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(
            f"directory {str(path)!r} is no folder that exists; make it, or name another"
        )
    available = env.available_memory_bytes()
    if available is None:
        # Not Linux: take what is installed, less what a desktop keeps for itself.
        available = int((env.total_memory_bytes() or 8 * _GIB) * 0.7)
    own = _anonymous_bytes()
    ram = min(available + own, env.total_memory_bytes() or available + own)
    return Machine(
        "this",
        ram=ram,
        vram=_free_vram(),
        disk=shutil.disk_usage(path).free,
        note=f"measured now, disk at {path.resolve()}",
        waiting_share=env.own_waiting_share(),
    )


def _free_vram() -> int:
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.mem_get_info()[0])


def _anonymous_bytes() -> int:
    """RAM that this process holds already, and that a fresh one would have back."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
