"""What the blocks of a trial say: by which clock, how much memory, and when the first step is paid for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from advisor.core.findings import Interval
from advisor.profiling.session import Session
from advisor.trials.live.blocks import TimedBlocks
from advisor.trials.live.limit import Limit
from advisor.trials.live.times import Arm, Times
from advisor.trials.records import InTrial
from advisor.trials.statistics import Decision

KEPT = Decision("kept", Interval(low=0.45, high=0.55), 0.5, "half of the step saved")
PAIRS = 6


def timed(*, off_wall: float, on_wall: float) -> Times:
    def arm(step_us: float, wall_us: float) -> Arm:
        steps = [step_us * (1 + 0.001 * i) for i in range(PAIRS)]
        return Arm(medians=steps, means=steps, walls=[wall_us * (1 + 0.001 * i) for i in range(PAIRS)])

    return Times(off=arm(1000.0, off_wall), on=arm(500.0, on_wall))


def test_a_gain_that_the_wall_clock_does_not_show_is_not_kept() -> None:
    found = timed(off_wall=1000.0, on_wall=1000.0).against_the_wall(KEPT)
    assert found.status == "inconclusive"
    assert "CUDA events and wall clock disagree" in found.reason
    assert timed(off_wall=1100.0, on_wall=600.0).against_the_wall(KEPT) == KEPT
    unseen = timed(off_wall=math.nan, on_wall=1000.0)  # epochs ended in all of them
    assert unseen.against_the_wall(KEPT) == KEPT


def test_the_first_step_is_paid_for_by_what_is_saved_of_the_step_without_the_change() -> None:
    times = timed(off_wall=1000.0, on_wall=500.0)
    assert times.break_even_steps(10_000.0, KEPT) == 20
    assert times.break_even_steps(10_000.0, None) is None
    assert times.break_even_steps(10_000.0, Decision("reverted", None, -0.1, "slower")) is None
    assert Times().break_even_steps(10_000.0, KEPT) is None


def test_memory_is_told_where_it_was_seen_with_the_change_and_without() -> None:
    assert Times(off=Arm(peak_bytes=100), on=Arm(peak_bytes=300)).memory_bytes == 200
    assert Times(on=Arm(peak_bytes=300)).memory_bytes == 0  # time ended in the first pair


@pytest.mark.parametrize(("on_wall", "step_us", "status"), [(500.0, 500.0, "kept"), (1000.0, 1000.0, "inconclusive")])
def test_the_loops_step_is_that_with_the_change_only_where_it_stays(monkeypatch, on_wall, step_us, status) -> None:
    """Planted: a gain that the wall clock denies is not kept, so the loop goes on as it was."""
    whole, times = timed(off_wall=1000.0, on_wall=on_wall), Times()

    def block(self, on):
        arm, source = (times.on, whole.on) if on else (times.off, whole.off)
        for name in ("medians", "means", "walls"):
            getattr(arm, name).append(getattr(source, name)[len(arm.medians) - (name != "medians")])
        return ""
        yield

    monkeypatch.setattr(TimedBlocks, "_block", block)
    switch = SimpleNamespace(is_on=True, on=lambda: None, off=lambda: None)
    loop = SimpleNamespace(
        session=Session(mode="search", run_dir="", script="train.py", min_gain=0.01, max_pairs=PAIRS),
        step_us=1000.0,
        stretch=1.0,
        machine=SimpleNamespace(renew=lambda: None),
        synchronize=lambda: None,
        note=lambda current: None,
    )
    course = TimedBlocks(loop, Limit(math.inf), times).run(switch, InTrial(transform="tf32", starts=1))
    with pytest.raises(StopIteration) as ended:
        next(course)
    assert ended.value.value.status == status
    assert loop.step_us == pytest.approx(step_us, rel=0.01)
