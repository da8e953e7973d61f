"""Paired comparison on a synthetic clock: drifting, correlated, with stragglers, and the same on every machine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from advisor.core.errors import AdvisorError
from advisor.testing.comparing import MOST_STEPS, Comparison, HostStopwatch


class SyntheticClock:
    """A step returns its true time; the clock adds what a shared machine adds: AR(1) noise of 2 %, a drift of 10 % over the
    comparison, and one straggler in fifty steps at twice the time."""

    def __init__(self, seed: int, noise: float = 0.02) -> None:
        self._random = random.Random(seed)
        self._noise, self._state, self._steps = noise, 0.0, 0

    def times(self, step: Callable[[], float], count: int) -> list[float]:
        found = []
        for _ in range(count):
            self._steps += 1
            self._state = 0.5 * self._state + self._random.gauss(0, self._noise)
            drift = 1 + 0.1 * self._steps / 10_000
            straggler = 2.0 if self._random.random() < 0.02 else 1.0
            found.append(step() * drift * straggler * (1 + self._state))
        return found


def comparison(a: float, b: float, seed: int = 0, noise: float = 0.02, **options: object) -> Comparison:
    return Comparison(lambda: a, lambda: b, stopwatch=SyntheticClock(seed, noise), **options)


def outcome(ask: Callable[[], None]) -> str:
    try:
        ask()
    except AssertionError as error:
        return "inconclusive" if str(error).startswith("inconclusive") else "failed"
    return "passed"


def test_a_against_a_rarely_fails() -> None:
    """200 comparisons of a step with itself: at most 2 may be called slower."""
    outcomes = [outcome(comparison(1e3, 1e3, seed).assert_not_slower) for seed in range(200)]
    assert outcomes.count("failed") <= 2
    assert outcomes.count("passed") >= 190


def test_a_against_a_is_never_faster() -> None:
    outcomes = [outcome(lambda s=seed: comparison(5e3, 5e3, s).assert_faster(by="1 %")) for seed in range(30)]
    assert outcomes.count("passed") == 0


def test_five_per_cent_more_time_is_caught() -> None:
    outcomes = [outcome(comparison(5e3, 5.25e3, seed).assert_not_slower) for seed in range(30)]
    assert outcomes == ["failed"] * 30


def test_what_only_every_fourth_call_does_is_counted() -> None:
    calls = itertools.count()
    found = Comparison(lambda: 1e3, lambda: 1e3 if next(calls) % 4 else 5e3, stopwatch=SyntheticClock(0))
    with pytest.raises(AssertionError, match="slower than the first"):
        found.assert_not_slower()
    assert found.gain is not None
    assert found.gain[1] == pytest.approx(-1.0, abs=0.05)


def test_a_gain_is_proved_and_not_overstated() -> None:
    found = comparison(5e3, 4.75e3)
    found.assert_faster(by="2 %")
    assert found.gain is not None
    low, point, high = found.gain
    assert low < 0.05 < high
    assert point == pytest.approx(0.05, abs=0.015)
    with pytest.raises(AssertionError, match="not faster than the first by 8"):
        found.assert_faster(by="8 %")


def test_a_failure_says_by_how_much() -> None:
    with pytest.raises(AssertionError, match=r"slower than the first by more than 1\.0%: slower: .* added to the step"):
        comparison(5e3, 6e3).assert_not_slower()


def test_what_noise_hides_is_inconclusive() -> None:
    told: list[str] = []
    comparison(5e3, 5e3, noise=0.4, undecided=told.append).assert_faster(by="0.5 %")
    assert len(told) == 1
    assert told[0].startswith("inconclusive: too noisy")
    assert outcome(lambda: comparison(5e3, 5e3, noise=0.4).assert_faster(by="0.5 %")) == "inconclusive"


def test_pairs_are_taken_as_needed_and_shared_by_several_questions() -> None:
    found = comparison(5e3, 2.5e3)
    assert found.gain is None
    found.assert_faster(by="10 %")
    assert len(found.pairs) == 6
    found.assert_not_slower()
    assert len(found.pairs) == 6
    close = comparison(5e3, 4.9e3)
    close.assert_faster(by="1 %")
    assert 6 < len(close.pairs) <= 20


def test_blocks_alternate_in_abba_order() -> None:
    order: list[str] = []

    class Recording:
        def times(self, step: Callable[[], float], count: int) -> list[float]:
            order.append("a" if step() == 1e4 else "b")
            return [step()] * count

    found = Comparison(lambda: 1e4, lambda: 2e4, stopwatch=Recording())
    with pytest.raises(AssertionError):
        found.assert_not_slower()
    assert "".join(order[2:10]) == "abbaabba"  # after one warm-up of each


def test_short_steps_get_long_blocks() -> None:
    counts: list[int] = []

    class Recording:
        def times(self, step: Callable[[], float], count: int) -> list[float]:
            counts.append(count)
            return [step()] * count

    for true_us, expected in ((1.0, MOST_STEPS), (1e3, 100), (1e6, 3)):
        counts.clear()
        Comparison(
            lambda t=true_us: 2 * t, lambda t=true_us: t, stopwatch=Recording(), undecided=lambda r: None
        ).assert_faster()
        assert set(counts[2:]) == {expected}


def test_a_slower_step_is_never_called_faster_by_a_real_clock() -> None:
    def work(rounds: int) -> Callable[[], None]:
        return lambda: sum(range(rounds)) and None

    found = Comparison(work(2_000), work(20_000), max_pairs=6)
    with pytest.raises(AssertionError):  # or undecided, where the machine is busy: not passed either way
        found.assert_faster(by="1 %")
    assert len(found.pairs) == 6
    assert all(len(HostStopwatch().times(work(10), n)) == n for n in (1, 5))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(AdvisorError, match="callable"):
        Comparison(1, lambda: 1)
    with pytest.raises(AdvisorError, match="6 or more"):
        Comparison(lambda: 1, lambda: 1, max_pairs=2)
    with pytest.raises(AdvisorError, match="by is"):
        comparison(1e3, 1e3).assert_faster(by="fast")
