"""Steps from calls: the period of their sequence, whatever comes between."""

from __future__ import annotations

from advisor.cupy_loops.period import EARLY, find_anchor, period_of

STEP = [("array", "t.py:1"), ("dot", "t.py:2"), *[("__isub__", "t.py:9")] * 4, ("sum", "t.py:4")]


def test_the_smallest_period_that_covers_most_of_the_sequence() -> None:
    assert period_of("xyabcabcabc") == (3, 9)
    assert period_of("abcde") == (0, 0)


def test_a_step_begins_with_its_batch() -> None:
    found = find_anchor([("zeros", "t.py:0"), *(STEP * 4)], ("array",))
    assert found is not None
    assert (found.key, found.count, found.period) == (("array", "t.py:1"), 1, len(STEP))


def test_the_optimizers_loop_over_parameters_is_no_step() -> None:
    calls = [("a", str(i)) for i in range(40)] + [("__isub__", "t.py:9")] * 12
    assert find_anchor(calls) is None


def test_a_print_between_steps_is_passed_over() -> None:
    calls = [*(STEP * 2), ("__float__", "t.py:7"), *(STEP * 5)]
    found = find_anchor(calls, ("array",))
    assert found is not None
    assert found.period == len(STEP)


def test_where_each_call_comes_several_times_one_is_counted() -> None:
    found = find_anchor([("dot", "t.py:1"), ("dot", "t.py:1"), ("add", "t.py:2"), ("add", "t.py:2")] * EARLY)
    assert found is not None
    assert (found.count, found.period) == (2, 4)


def test_a_loop_inside_the_first_step_is_no_step() -> None:
    step = [("array", "t.py:1"), *[("add", "t.py:2"), ("mul", "t.py:3")] * 100]
    assert find_anchor(step, ("array",)) is None
    assert find_anchor(step * 2 + step[:80], ("array",)) is None
    found = find_anchor(step * 3, ("array",))
    assert found is not None
    assert found.period == len(step)
