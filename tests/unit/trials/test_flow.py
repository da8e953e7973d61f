import math
import random
from statistics import fmean

import pytest

from advisor.trials import flow, pairs, proof
from advisor.trials.records import Measurement

EPOCH = "new epoch"


def run(step, first, *, epoch=40, start=1000.0, count=30, seed=0):
    """A window of steps behind step `first`; each epoch begins with a wait for the loader."""
    r = random.Random(seed)
    held = [EPOCH if number % epoch == 0 else "" for number in range(first, first + count)]
    every = [step * math.exp(r.gauss(0, 0.02)) + (start if reason else 0.0) for reason in held]
    plain = tuple(us for us, reason in zip(every, held, strict=True) if not reason)
    return Measurement(step_us=plain, every_us=tuple(every), held=tuple(held))


def test_epoch_starts_weigh_alike_in_windows_that_hold_more_and_fewer_of_them():
    """Two processes of each arm were timed from the tenth second on: those of the faster one by other steps."""
    slow = [run(50.0, 215, epoch=25, seed=1), run(50.0, 216, epoch=25, seed=2)]  # one start each
    fast = [run(48.0, 224, epoch=25, seed=3), run(48.0, 225, epoch=25, seed=4)]  # two each
    assert fmean(slow[0].every_us) < 0.8 * fmean(fast[0].every_us)
    low, point, high = proof.ratio(slow, fast, flow=True).bounds
    truth = (50.0 + 1000.0 / 20) / (48.0 + 1000.0 / 20)  # six in 120 steps
    assert point == pytest.approx(truth, abs=0.01)
    assert low < truth < high


def test_a_pair_is_not_decided_by_whose_window_an_epochs_start_falls_into():
    """Of thirty steps of the slow arm none begins an epoch; the fast one takes 39 for the same time, and one does."""
    tried = pairs.PairsOfRuns(
        off=[run(24.0, 13, epoch=44, seed=i) for i in range(3)],
        on=[run(18.0, 13, epoch=44, count=39, seed=i) for i in range(3)],
    )
    assert all(on / off == pytest.approx(0.75, abs=0.02) for off, on in tried.times_us)


def test_what_one_arm_never_did_counts_for_neither():
    with_start, without = run(50.0, 20, epoch=40), run(50.0, 45, epoch=40)
    (slow,), (fast,) = flow.every_us(((with_start,), (without,)))
    assert fmean(slow) == pytest.approx(50.0, rel=0.02)
    assert fmean(fast) == pytest.approx(50.0, rel=0.02)


def test_windows_with_as_many_starts_have_the_means_that_they_had():
    runs = [run(50.0, 13, epoch=20, seed=1), run(20.0, 15, epoch=20, seed=2)]
    assert all(sum(map(bool, each.held)) == 2 for each in runs)
    (slow,), (fast,) = flow.every_us(((runs[0],), (runs[1],)))
    assert fmean(slow) == pytest.approx(fmean(runs[0].every_us))
    assert fmean(fast) == pytest.approx(fmean(runs[1].every_us))


def test_a_step_of_no_known_kind_stays_where_it_is():
    """A recompilation is the change's own, and a measurement of another version tells of no kinds."""
    plain, compiled = Measurement(every_us=(10.0,) * 30), Measurement(every_us=(5.0,) * 29 + (400.0,))
    assert flow.every_us(((plain,), (compiled,))) == [[[10.0] * 30], [[5.0] * 29 + [400.0]]]


def test_runs_without_a_plain_step_are_left_as_they_are():
    odd = Measurement(every_us=(3.0, 5.0), held=(EPOCH, "evaluation"))
    assert flow.every_us(((odd,), (odd,))) == [[[3.0, 5.0]], [[3.0, 5.0]]]
