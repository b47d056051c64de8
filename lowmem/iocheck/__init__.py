"""What the disk can do, and what that means in rows per second. No user interface in here."""

from __future__ import annotations

from lowmem.iocheck.check import iocheck
from lowmem.iocheck.engines import Rate
from lowmem.iocheck.filesystem import FileSystem, file_system
from lowmem.iocheck.predict import Prediction
from lowmem.iocheck.report import IOReport
from lowmem.iocheck.timing import StepCost

__all__ = [
    "FileSystem",
    "IOReport",
    "Prediction",
    "Rate",
    "StepCost",
    "file_system",
    "iocheck",
]
