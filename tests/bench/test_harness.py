"""The method: who is timed, in which order, and what the figures mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lowmem.bench.harness import (
    Contender,
    Timing,
    check_equal,
    close_all,
    time_interleaved,
    unsteady,
)


def counting(name: str, log: list[str], **kwargs) -> Contender:
    return Contender(name, step=lambda: log.append(name), **kwargs)


class Clock:
    """Time that passes only when a contender says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time

    def spends(self, seconds: float):
        def step() -> None:
            self.time += seconds

        return step


def test_rounds_are_interleaved_and_start_with_another_contender_each() -> None:
    log: list[str] = []
    time_interleaved([counting("a", log), counting("b", log)], repeats=3, steps=2, warmup=1)
    assert log == [*"ab", *"aabb", *"bbaa", *"aabb"]


def test_prepare_is_not_timed_and_sees_the_same_numbers_for_everyone() -> None:
    clock = Clock()
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def preparing(name: str):
        def prepare(number: int) -> None:
            clock.time += 100
            seen[name].append(number)

        return prepare

    timings = time_interleaved(
        [
            Contender("a", clock.spends(1.0), prepare=preparing("a")),
            Contender("b", clock.spends(2.0), prepare=preparing("b")),
        ],
        repeats=5,
        steps=3,
        warmup=2,
        now=clock,
    )
    assert seen["a"] == seen["b"] == list(range(2 + 5 * 3))
    assert timings["a"].samples.tolist() == [1.0] * 15
    assert timings["b"].median == 2.0


def test_median_of_the_repeats_with_stalls_counted_within_them() -> None:
    timing = Timing([[1.0, 3.0], [2.0, 2.0], [50.0, 50.0]])
    assert timing.median == 2.0
    assert timing.row()["steps"] == 6
    assert "p99_s" not in timing.row()


def test_percentiles_are_those_of_the_single_steps() -> None:
    seconds = list(np.linspace(1, 100, 100))
    row = Timing([seconds[:50], seconds[50:]]).row()
    assert row["p50_s"] == pytest.approx(50.5)
    assert row["p95_s"] == pytest.approx(95.05)
    assert row["p99_s"] == pytest.approx(99.01)


def test_a_time_budget_ends_after_whole_rounds_but_never_before_two() -> None:
    clock = Clock()
    contenders = [Contender("a", clock.spends(10.0)), Contender("b", clock.spends(10.0))]
    timings = time_interleaved(contenders, repeats=9, warmup=0, seconds=1.0, now=clock)
    assert [len(t.repeats) for t in timings.values()] == [2, 2]


def adder(name: str, amount: float, tensor: torch.Tensor) -> Contender:
    return Contender(name, lambda: tensor.add_(amount), outcome=lambda: [tensor])


def test_a_contender_that_computes_something_else_is_dropped_with_a_sentence() -> None:
    contenders = [
        adder("close", 1.0 + 1e-7, torch.zeros(3)),
        adder("wrong", 1.1, torch.zeros(3)),
        adder("right", 1.0, torch.zeros(3)),
        Contender("broken", lambda: torch.zeros(2) @ torch.zeros(3), outcome=list),
        Contender("other job", lambda: None),
    ]
    kept, messages = check_equal(contenders, against="right")
    assert [c.name for c in kept] == ["close", "right", "other job"]
    assert len(messages) == 2
    assert "wrong" in messages[0]
    assert "something else than right" in messages[0]
    assert "broken is left out: it failed" in messages[1]


def test_nan_against_a_number_is_a_difference() -> None:
    contenders = [adder("nan", float("nan"), torch.zeros(1)), adder("right", 1.0, torch.zeros(1))]
    kept, _ = check_equal(contenders, against="right")
    assert [c.name for c in kept] == ["right"]


def test_a_reference_that_fails_is_an_error_not_an_empty_table() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        check_equal([Contender("right", fail, outcome=list)], against="right")


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"steps": 0}])
def test_nothing_to_time_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        time_interleaved([Contender("a", lambda: None)], **bad)


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        time_interleaved([Contender("a", lambda: None), Contender("a", lambda: None)])


def test_every_contender_is_closed_even_if_one_fails() -> None:
    log: list[str] = []

    def fail() -> None:
        raise OSError("stuck")

    with pytest.raises(OSError, match="stuck"):
        close_all(
            [
                Contender("a", print, close=fail),
                Contender("b", print, close=lambda: log.append("b")),
            ]
        )
    assert log == ["b"]


def test_stalls_are_the_time_beyond_twice_the_middle_step() -> None:
    assert Timing([[1.0, 1.0, 1.0], [1.0, 6.0]]).stall_share == 4.0 / 10.0
    assert Timing([[1.0, 1.9, 1.0]]).stall_share == 0.0


def test_repeats_that_lie_far_apart_are_said() -> None:
    even = Timing([[1.0], [1.1], [0.9], [1.0], [5.0]])  # one stall is no busy machine
    wild = Timing([[1.0], [3.0], [2.0], [5.0], [0.5]])
    rows = [{"contender": "even", **even.row()}, {"contender": "wild", **wild.row()}]
    assert unsteady(rows[:1]) == []
    [said] = unsteady(rows)
    assert "wild (spread 50%)" in said
    assert "even" not in said
