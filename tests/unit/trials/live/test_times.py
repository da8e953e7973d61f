"""What the blocks of a trial say: by which clock, how much memory, and when the first step is paid for."""

from __future__ import annotations

import math
import random
from statistics import median
from types import SimpleNamespace

import pytest

from advisor.core.findings import Interval
from advisor.loop.session import Session
from advisor.trials.live.blocks import TimedBlocks
from advisor.trials.live.limit import Limit
from advisor.trials.live.times import Arm, Times
from advisor.trials.records import InTrial
from advisor.trials.statistics import MOST_PARTS, Decision

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


def loop_of(max_pairs, noted=None):
    return SimpleNamespace(
        session=Session(mode="search", run_dir="", script="train.py", min_gain=0.01, max_pairs=max_pairs),
        step_us=1000.0,
        parts=1,
        machine=SimpleNamespace(renew=lambda: None),
        synchronize=lambda: None,
        note=lambda current: None if noted is None else noted.append(current),
    )


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

    monkeypatch.setattr(TimedBlocks, "block", block)
    switch = SimpleNamespace(is_on=True, on=lambda: None, off=lambda: None)
    loop = loop_of(PAIRS)
    course = TimedBlocks(loop, Limit(math.inf), times).run(switch, InTrial(transform="tf32", starts=1))
    with pytest.raises(StopIteration) as ended:
        next(course)
    assert ended.value.value.status == status
    assert loop.step_us == pytest.approx(step_us, rel=0.01)


@pytest.mark.parametrize(("step_us", "parts"), [(1000.0, MOST_PARTS), (60e3, 2), (1e6, 1)])
def test_a_noisy_first_stage_is_taken_anew_in_parts_as_far_as_time_allows(monkeypatch, step_us, parts):
    """Spells that make every other block a tenth slower leave a gain of a tenth open; later ones are without."""
    times, taken = Times(), []

    def block(self, on):
        arm = times.on if on else times.off
        spell = 1.1 if times.parts == 1 and len(taken) % 2 == 0 else 1.0
        taken.append((times.parts, on))
        for values in (arm.medians, arm.means, arm.walls):
            values.append(1000.0 * spell * (0.9 if on else 1.0) * (1 + 0.001 * (len(taken) % 3)))
        return ""
        yield

    monkeypatch.setattr(TimedBlocks, "block", block)
    switch = SimpleNamespace(is_on=True, on=lambda: None, off=lambda: None)
    noted = []
    loop = loop_of(20, noted)
    loop.step_us = step_us
    course = TimedBlocks(loop, Limit(math.inf), times).run(switch, InTrial(transform="tf32", starts=1))
    with pytest.raises(StopIteration) as ended:
        next(course)
    decision = ended.value.value
    if parts == 1:
        assert times.blocks.parts == 1
        return
    assert decision.status == "kept"
    assert decision.point == pytest.approx(0.1, abs=0.005)
    assert [count for count, _ in taken] == [1] * 12 + [parts] * 6 * 2 * parts
    assert [on for _, on in taken[12:20]] == ([True, False, False, True] * 3)[: len(taken) - 12][:8]
    assert len(times.pairs) == len(times.blocks.off_us) == 6
    assert times.blocks.parts == parts
    assert len(noted[-1].off_us) == 6 * parts
    assert len(noted[-1].pairs) == 6
    assert Times.resumed(noted[-1]).pairs == times.pairs
    assert loop.parts == 1  # the next trial begins with whole blocks again


class Wandering:
    """Step times of a loop that the host bounds: slow and fast spells of every length from ten steps to a few hundred."""

    def __init__(self, spread):
        self.chance, self.spread = random.Random(0), spread
        self.parts = {memory: self.chance.gauss(0, spread) for memory in (0.9, 0.98, 0.995)}

    def step_us(self):
        for memory, value in self.parts.items():
            self.parts[memory] = memory * value + self.chance.gauss(0, self.spread * math.sqrt(1 - memory**2))
        return 1000.0 * math.exp(math.fsum(self.parts.values()))


def kept_of(trials, gain, monkeypatch):
    machine, kept = Wandering(0.03), 0
    for _ in range(trials):
        times = Times()

        def block(self, on, times=times):
            machine.step_us()  # the one that pays for the switch
            steps = [machine.step_us() * (1.0 - gain if on else 1.0) for _ in range(times.steps)]
            arm = times.on if on else times.off
            arm.medians.append(median(steps))
            arm.means.append(math.fsum(steps) / len(steps))
            arm.walls.append(math.fsum(steps) / len(steps))
            return ""
            yield

        monkeypatch.setattr(TimedBlocks, "block", block)
        switch = SimpleNamespace(is_on=False, on=lambda: None, off=lambda: None)
        course = TimedBlocks(loop_of(20), Limit(math.inf), times).run(switch, InTrial(transform="tf32", starts=1))
        with pytest.raises(StopIteration) as ended:
            next(course)
        kept += ended.value.value.status == "kept"
    return kept


@pytest.mark.long
def test_on_a_machine_whose_speed_wanders_gains_are_found_and_nothing_is_not_kept(monkeypatch):
    """Blocks in one piece find 3 % there in a fifth of the trials."""
    assert kept_of(300, 0.0, monkeypatch) <= 3
    assert kept_of(40, 0.03, monkeypatch) >= 30


@pytest.mark.parametrize(
    ("medians", "lags", "bound"),
    [
        ([1000.0] * 6, [0.02, 0.01, 0.05, 0.0, 0.3, 0.02], True),
        ([1000.0, 1004.0, 998.0, 1001.0, 1000.0, 1002.0], [0.5, 0.6, 0.4, 0.5, 0.7, 0.5], False),
        ([1000.0, 1100.0, 1010.0, 1200.0, 1050.0, 1000.0], [0.5, 0.1, 0.4, 0.1, 0.2, 0.5], True),
        ([1000.0, 1100.0, 1010.0, 1200.0, 1050.0, 1000.0], [], False),
    ],
    ids=["the device waits", "the host waits", "now and then", "nobody saw"],
)
def test_the_host_bounds_a_step_whose_device_has_nothing_to_do_or_that_wanders(
    medians: list[float], lags: list[float], bound: bool
) -> None:
    arm = Arm(medians=medians, lags=lags)
    assert arm.host_bound is bound
    times = Times(on=arm)
    assert times.host_bound(KEPT) is bound
    assert times.host_bound(Decision("reverted", None, None, "")) is False


def waiting(*, step_on: float, device_on: float) -> Times:
    """Steps of 100 ms, 60 of them waits for the loader."""
    wander = [1.0, 1.2, 0.9, 1.1, 0.85, 1.05]

    def arm(step_us: float, device_us: float) -> Arm:
        steps = [step_us * w for w in wander]
        return Arm(medians=steps, means=steps, devices=[device_us * (1 + 0.001 * i) for i in range(PAIRS)])

    return Times(off=arm(100_000.0, 40_000.0), on=arm(step_on, device_on))


def test_where_the_step_waits_for_its_loader_the_devices_time_decides() -> None:
    times = waiting(step_on=99_000.0, device_on=20_000.0)
    assert times.by_device
    assert [round(on / off, 3) for off, on in times.pairs] == [0.5] * PAIRS
    found = times.against_the_wall(KEPT)
    assert found.status == "kept"
    assert found.reason.startswith("device time")
    assert found.step_point == pytest.approx(0.01, abs=1e-6)


def test_what_saves_the_devices_time_and_makes_the_step_slower_is_not_kept() -> None:
    found = waiting(step_on=150_000.0, device_on=20_000.0).against_the_wall(KEPT)
    assert found.status == "inconclusive"
    assert "makes the step slower" in found.reason


def test_the_step_decides_where_it_hardly_waits_or_nobody_saw_for_how_long() -> None:
    times = waiting(step_on=99_000.0, device_on=94_000.0)
    times.off.devices = [95_000.0] * PAIRS
    assert not times.by_device
    times.on.devices = [20_000.0] * PAIRS  # with the change it waits
    assert times.by_device
    times.off.devices = [0.0] * PAIRS
    assert not times.by_device
    assert times.pairs == times.steps_in_pairs


def test_the_devices_time_outlives_the_process() -> None:
    times = waiting(step_on=99_000.0, device_on=20_000.0)
    again = Times.resumed(times.noted(InTrial(transform="t")))
    assert again.by_device
    assert again.pairs == times.pairs
