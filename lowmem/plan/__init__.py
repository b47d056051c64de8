"""What fits where: bytes of every choice on a given machine."""

from __future__ import annotations

from lowmem.plan.access import cached_share
from lowmem.plan.machine import MACHINE_NAMES, Machine, this_machine
from lowmem.plan.planner import plan
from lowmem.plan.result import Choice, Plan
from lowmem.units import parse_count

__all__ = [
    "MACHINE_NAMES",
    "Choice",
    "Machine",
    "Plan",
    "cached_share",
    "parse_count",
    "plan",
    "this_machine",
]
