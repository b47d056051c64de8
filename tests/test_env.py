"""What the system says of itself."""

from __future__ import annotations

import os
import sys

import pytest

from lowmem import env
from lowmem.plan import Machine, plan


def test_the_system_says_how_much_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"nr_dirty_background_threshold": 1_000, "nr_dirty_threshold": 2_000}
    monkeypatch.setattr(env, "vmstat", lambda: counts)
    assert env.waiting_bytes() == 1_625 * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(env, "vmstat", dict)
    assert env.waiting_bytes() is None


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.1625),
        ({"dirty_background_ratio": 10, "dirty_ratio": 20}, 0.1625),
        ({"dirty_background_ratio": 5, "dirty_ratio": 45}, 0.3),
        ({"dirty_background_bytes": 10**9, "dirty_bytes": 2 * 10**9}, 0.1625),
        ({"dirty_background_ratio": 10, "dirty_bytes": 2 * 10**9}, 0.1625),
        ({"dirty_background_bytes": 10**12, "dirty_bytes": 2 * 10**12}, 1.0),
        # Linux: a background that is not below the limit is half of it.
        ({"dirty_background_ratio": 10, "dirty_bytes": 10**8}, 0.008125),
        ({"dirty_background_ratio": 50, "dirty_ratio": 20}, 0.1625),
        ({"dirty_background_ratio": 20, "dirty_ratio": 20}, 0.1625),
    ],
)
def test_the_share_follows_the_settings(
    settings: dict[str, int], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setting(name: str) -> int:
        if not settings:
            raise FileNotFoundError(name)
        return settings.get(name, 0)

    monkeypatch.setattr(env, "_setting", setting)
    monkeypatch.setattr(env, "available_memory_bytes", lambda: 10**10)
    assert env.own_waiting_share() == pytest.approx(share)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts pages")
def test_share_and_thresholds_agree() -> None:
    """The kernel's thresholds are its ratios of free memory and file pages."""
    waiting, available = env.waiting_bytes(), env.available_memory_bytes()
    assert waiting is not None
    assert available is not None
    assert waiting == pytest.approx(env.own_waiting_share() * available, rel=0.35)


def test_the_planner_goes_by_the_machines_own_share() -> None:
    for share, name in ((0.0, "SparseAdam"), (1.0, "DSA")):
        machine = Machine("mine", ram=64 << 30, disk=1 << 40, waiting_share=share)
        assert plan(10**6, 128, machine).recommended.name == name
    with pytest.raises(ValueError, match=r"waiting_share is 1\.5"):
        Machine("mine", ram=1, waiting_share=1.5)
