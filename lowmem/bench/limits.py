"""What the disk below a benchmark could do at best, measured in the same run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

PAGE = 4096


def disk_limits(path: Path, seconds: float = 1.0) -> dict[str, float]:
    """Random 4 KiB reads a second of an existing file, one and 32 at a time.

    The file must hold real data that is on the disk already. Empty where the page cache
    cannot be kept out of the way: then there is no disk speed to measure.
    """
    from lowmem.iocheck import cache
    from lowmem.iocheck.engines import Disk
    from lowmem.iocheck.filesystem import file_system
    from lowmem.iocheck.scratch import random_pool

    size = path.stat().st_size // PAGE * PAGE
    method, _ = cache.choose_method(str(path), size, file_system(path.parent))
    if method.startswith("cached"):
        return {}
    offsets = np.random.default_rng(7).permutation(size // PAGE)[:500_000] * PAGE
    found: dict[str, float] = {}
    disk = Disk(str(path), size, method, random_pool(1, 1))
    with contextlib.closing(disk):
        for depth in (1, 32):
            rate = disk.measure(
                "read", PAGE, depth, seconds, offsets=offsets, should_stop=lambda: False
            )
            found[f"random_read_iops_qd{depth}"] = rate.iops
    return found


def fill_random(path: Path, offset: int, size: int, label: str = "") -> None:
    """Overwrite ``size`` bytes of a file with sound float32 values that do not compress."""
    from tqdm.auto import tqdm

    from lowmem.iocheck.scratch import random_pool

    pool = random_pool(3, 16)
    with (
        open(path, "r+b") as file,
        tqdm(total=size, desc=label, unit="B", unit_scale=True, leave=False) as bar,
    ):
        file.seek(offset)
        left, number = size, 0
        while left:
            pool[::1024] ^= np.uint32(number + 1)
            part = pool.view(np.uint8)[: min(left, pool.nbytes)]
            file.write(part.data)
            left -= part.size
            number += 1
            bar.update(part.size)
