import math
import random

import pytest

from advisor.trials import losses


def curve(seed=0, steps=42, start=2.3, fall=0.01, noise=0.01):
    r = random.Random(seed)
    return [start - fall * i + r.gauss(0, noise) for i in range(steps)]


def test_the_same_training_with_other_rounding_passes():
    assert losses.compare([curve(1), curve(2)], [curve(3), curve(4)]).passed is True


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_nan_fails_and_all_nan_fails(bad):
    one = curve(3)
    one[20] = bad
    assert losses.compare([curve(1)], [one]).passed is False
    assert losses.compare([curve(1)], [[bad] * 42]).passed is False


def test_no_losses_with_the_changes_fails():
    assert losses.compare([curve(1)], []).passed is False
    assert losses.compare([curve(1)], [[]]).passed is False
    assert losses.compare([curve(1)], [curve(2), []]).passed is False


def test_too_few_steps_fail():
    check = losses.compare([curve(1)], [curve(2, steps=losses.LEAST - 1)])
    assert check.passed is False
    assert "only 9" in check.detail


def test_a_script_without_losses_cannot_be_compared():
    assert losses.compare([], [curve(1)]).passed is None
    assert losses.compare([()], [curve(1)]).passed is None


def test_a_plain_script_that_diverges_is_no_measure():
    assert losses.compare([[*curve(1)[:5], *[math.nan] * 37]], [curve(2)]).passed is None
    assert losses.compare([[math.nan] * 42, curve(1)], [curve(2)]).passed is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_batch_that_overflows_is_no_licence_for_a_training_that_breaks(bad):
    plain, again, alike = curve(1), curve(2), curve(3)
    plain[3] = bad
    assert losses.compare([plain, again], [[math.nan] * 42]).passed is False
    assert losses.compare([plain, again], [[2.3 + 0.05 * i for i in range(42)]]).passed is False
    assert losses.compare([plain, again], [alike]).passed is True
    alike[3] = bad  # the same batch
    found = losses.compare([plain, again], [alike])
    assert found.passed is True
    assert found.numbers["steps"] == 41


def test_a_training_that_stands_still_or_blows_up_fails():
    falling = curve(1, fall=0.03)
    assert losses.compare([falling], [[2.3] * 42]).passed is False
    assert losses.compare([falling], [[2.3 + 0.05 * i for i in range(42)]]).passed is False


def test_plain_runs_that_differ_widen_the_envelope():
    apart = [curve(1, start=2.0, fall=0.0), curve(2, start=2.6, fall=0.0)]
    assert losses.compare(apart, [curve(3, start=3.0, fall=0.0)]).passed is True
    assert losses.compare(apart[:1], [curve(3, start=3.0, fall=0.0)]).passed is False


def test_precision_changes_get_more_room():
    stack = [curve(2, start=2.3 * 1.12, fall=0.0)]
    assert losses.compare([curve(1, fall=0.0)], stack).passed is False
    assert losses.compare([curve(1, fall=0.0)], stack, precision=True).passed is True


def test_losses_that_jump_from_batch_to_batch_get_room_for_it():
    jumping = curve(1, noise=0.6, fall=0.0)
    other = [value + (0.35 if i % 10 < 5 else -0.35) for i, value in enumerate(jumping)]
    assert losses.compare([jumping], [other]).passed is True
    steady = curve(1, noise=0.01, fall=0.0)
    shifted = [value + (0.35 if i % 10 < 5 else -0.35) for i, value in enumerate(steady)]
    assert losses.compare([steady], [shifted]).passed is False


def test_a_fall_from_the_first_losses_hides_no_training_that_goes_wrong_later():
    """Regressions and sums over pixels begin at hundreds of what they come to; these then fall from 5 to 3, or climb to 80."""

    def run(seed, climb):
        r = random.Random(seed)
        return [500.0, 120.0, 40.0, 15.0, 8.0, *(5.0 + climb * i + r.gauss(0, 0.1) for i in range(37))]

    plain = [run(1, -0.05), run(2, -0.05)]
    assert losses.compare(plain, [run(3, -0.05)]).passed is True
    assert losses.compare(plain, [run(4, 2.0)]).passed is False


def test_plain_runs_that_cross_are_as_far_apart_as_around_their_crossing():
    apart = [curve(1, start=2.0, fall=-0.02), curve(2, start=2.8, fall=0.02)]  # they meet in the middle
    elsewhere = [curve(3, start=3.2, fall=0.0)]
    assert losses.compare(apart, elsewhere).passed is True
    assert losses.compare([curve(1, start=2.4, fall=0.0), curve(2, start=2.4, fall=0.0)], elsewhere).passed is False


def test_only_a_finite_distance_may_be_chances():
    assert losses.apart(losses.compare([curve(1)], [curve(2, start=4.0)]))
    assert not losses.apart(losses.compare([curve(1)], [curve(2)]))
    assert not losses.apart(losses.compare([curve(1)], [[math.nan] * 42]))
    assert not losses.apart(losses.compare([curve(1)], [curve(2, steps=3)]))
