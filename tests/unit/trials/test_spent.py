import pytest

from advisor.trials import spent


def test_phases_add_up_without_gaps():
    now = iter((0.0, 2.0, 5.0, 5.5, 7.5))
    watch = spent.Stopwatch(spent.START, now=lambda: next(now))
    watch.enter(spent.GATE)
    watch.enter(spent.START)
    watch.enter(spent.BLOCKS)
    assert watch.seconds() == {spent.START: 2.5, spent.GATE: 3.0, spent.BLOCKS: 2.0}


def test_a_part_of_a_phase_may_be_anothers_and_never_more_than_there_was():
    now = iter((0.0, 2.0, 5.0, 5.0, 6.0))
    watch = spent.Stopwatch(spent.START, now=lambda: next(now))
    watch.enter(spent.GATE)
    watch.charge(spent.FIRST, 2.5)
    watch.charge(spent.FIRST, 9.0)
    assert watch.seconds() == {spent.START: 2.0, spent.GATE: 1.0, spent.FIRST: 3.0}


def test_what_a_process_did_not_tell_is_its_start():
    found = spent.of_process(10.0, {spent.GATE: 4.0, spent.START: 1.0})
    assert found == {spent.GATE: 4.0, spent.START: 6.0}
    assert spent.of_process(3.0, {}) == {spent.START: 3.0}  # it died before its first word


def test_the_whole_has_a_rest_and_nothing_empty():
    found = spent.whole(20.0, {spent.STACK: 5.0, spent.PROFILE: 12.0, spent.ON_TOP: 0.0})
    assert list(found) == [spent.PROFILE, spent.STACK, spent.REST]
    assert sum(found.values()) == pytest.approx(20.0)
