"""Trials of scripts whose images differ in size from step to step."""

from __future__ import annotations

import dataclasses
import math
import random
from statistics import median
from types import SimpleNamespace

import pytest

from advisor.core.verdict import Status
from advisor.loop.session import Session
from advisor.trials.live import sizes
from advisor.trials.live.blocks import TimedBlocks
from advisor.trials.live.limit import Limit
from advisor.trials.live.sizes import BlockPart
from advisor.trials.live.times import Times
from advisor.trials.records import InTrial
from advisor.trials.statistics import Decision


class Detector:
    """A step every size of whose images is drawn for `run` steps; noise of a per cent.

    uneven: how far each size is off the power that steps grow by. floor: of the usual step, what the host needs for any. bursts: share of
    steps that take three times as long.
    """

    def __init__(
        self,
        seed: int,
        run: int = 10,
        grows: float = 0.9,
        told: bool = True,
        uneven: float = 0.0,
        floor: float = 0.0,
        bursts: float = 0.0,
    ) -> None:
        self.chance, self.run, self.grows, self.told = random.Random(seed), run, grows, told
        self.floor, self.bursts = floor, bursts
        off = random.Random(1000 + seed)
        self.own = {320 + 32 * i: math.exp(off.gauss(0, uneven)) for i in range(-2, 3)}
        self.step = 0
        self.side = 320

    def steps(self, count: int, factor: float) -> BlockPart:
        times, elements = [], []
        for _ in range(count):
            if self.step % self.run == 0:
                self.side = 320 + 32 * self.chance.randint(-2, 2)
            self.step += 1
            pixels = self.side**2
            device = (pixels / 320**2) ** self.grows * self.own[self.side] * factor
            burst = 3.0 if self.bursts and self.chance.random() < self.bursts else 1.0
            times.append(1e5 * max(device, self.floor) * burst * math.exp(self.chance.gauss(0, 0.01)))
            elements.append(pixels * 96 if self.told else 0)
        return BlockPart(tuple(times), tuple(elements), math.fsum(times) / count)


def trial(detector: Detector, gain: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Decision, Times]:
    times = Times()

    def block(self, on):
        detector.steps(1, 1.0)  # the one that pays for the switch
        times.add(times.on if on else times.off, detector.steps(times.steps, 1.0 - gain if on else 1.0))
        return ""
        yield

    monkeypatch.setattr(TimedBlocks, "block", block)
    loop = SimpleNamespace(
        session=Session(mode="search", run_dir="", script="t.py", min_gain=0.01, max_pairs=20),
        step_us=1e5, parts=1, machine=SimpleNamespace(renew=lambda: None), synchronize=lambda: None, note=lambda _: None,
    )  # fmt: skip
    switch = SimpleNamespace(is_on=False, on=lambda: None, off=lambda: None)
    course = TimedBlocks(loop, Limit(math.inf), times).run(switch, InTrial(transform="tf32", starts=1))
    with pytest.raises(StopIteration) as ended:
        next(course)
    return ended.value.value, times


def kept(gain: float, monkeypatch: pytest.MonkeyPatch, trials: int, **options) -> int:
    return sum(trial(Detector(seed, **options), gain, monkeypatch)[0].status == Status.KEPT for seed in range(trials))


@pytest.mark.parametrize("run", [1, 10])
def test_a_gain_is_found_beneath_what_sizes_hide(monkeypatch, run):
    assert kept(0.05, monkeypatch, 40, run=run) >= 38
    assert kept(0.05, monkeypatch, 40, run=run, told=False) <= 24


@pytest.mark.each_value
@pytest.mark.parametrize("run", [1, 10])
@pytest.mark.parametrize("odd", [{}, {"uneven": 0.06, "floor": 0.8}, {"uneven": 0.06, "bursts": 0.05}])
def test_nothing_is_kept_for_sizes_alone(monkeypatch, run, odd):
    assert kept(0.0, monkeypatch, 200, run=run, **odd) <= 2


def test_a_change_that_leaves_small_images_to_the_host_is_found(monkeypatch):
    """With it steps grow otherwise with size than without it, and no power of the size puts both at one."""
    odd = {"uneven": 0.06, "floor": 0.8, "run": 3}
    assert kept(0.3, monkeypatch, 40, **odd) >= 38
    by_size = kept(0.05, monkeypatch, 40, **odd)
    monkeypatch.setattr(sizes, "by_size", lambda arms, scaled: scaled)
    assert kept(0.05, monkeypatch, 40, **odd) <= by_size - 10


def test_times_are_those_at_one_size_and_say_so(monkeypatch):
    decision, times = trial(Detector(1), 0.05, monkeypatch)
    assert decision.point == pytest.approx(0.05, abs=0.01)
    assert times.blocks.exponent == pytest.approx(0.9, abs=0.02)
    off = times.off.medians
    assert max(off) / min(off) < 1.05  # 0.69 to 1.39 of the usual image's as they were
    wall = [wall / mean for wall, mean in zip(times.off.walls, times.off.means, strict=True)]
    assert wall == pytest.approx([1.0] * len(wall))


def test_one_size_changes_nothing():
    times, parts = Times(), [BlockPart((10.0, 11.0, 12.0), (5, 5, 5), 11.5), BlockPart((9.0, 9.5, 30.0), (5, 5, 5))]
    for arm, part in zip((times.off, times.on), parts, strict=True):
        times.add(arm, part)
    assert (times.exponent, times.off.medians, times.on.medians) == (0.0, [11.0], [9.5])
    assert times.off.walls == [11.5]
    assert math.isnan(times.on.walls[0])


def test_what_an_earlier_process_noted_stays():
    noted = dataclasses.replace(
        InTrial(transform="tf32"), off_us=(7.0,), on_us=(6.0,), off_mean_us=(7.0,), on_mean_us=(6.0,),
        off_wall_us=(7.0,), on_wall_us=(6.0,), steps_per_block=30,
    )  # fmt: skip
    times, detector = Times.resumed(noted), Detector(2, run=1)
    for arm in (times.off, times.on, times.on, times.off):
        times.add(arm, detector.steps(30, 1.0))
    assert times.exponent > 0.8
    assert (times.off.medians[0], times.on.medians[0]) == (7.0, 6.0)
    assert len(times.pairs) == 3


def test_a_step_of_unknown_size_leaves_all_times_as_they_were():
    times, detector = Times(), Detector(4, run=1)
    parts = [detector.steps(30, 1.0) for _ in range(3)]
    times.add(times.off, parts[0])
    times.add(times.on, parts[1])
    assert times.exponent > 0.8
    times.add(times.on, dataclasses.replace(parts[2], elements=(0,) * 30))
    assert times.exponent == 0.0
    assert times.off.medians == [median(parts[0].step_us)]
    assert times.on.medians == [median(part.step_us) for part in parts[1:]]


def test_sizes_that_tell_nothing_are_left_alone():
    def arms(*parts: BlockPart) -> list[list[BlockPart]]:
        return [list(parts), []]

    chance = random.Random(3)
    many = tuple(1000 * chance.randint(1, 9) for _ in range(60))
    assert sizes.exponent(arms(BlockPart(tuple(5.0 for _ in many), many))) == 0.0  # the host bounds the step
    assert sizes.exponent(arms(BlockPart(tuple(1e9 / e for e in many), many))) == 0.0  # nothing is faster for more work
    assert sizes.exponent(arms(BlockPart(tuple(float(e**3) for e in many), many))) == sizes.STEEPEST
    assert sizes.exponent(arms(BlockPart((1.0, 2.0), (1, 2)))) == 0.0  # too few
    assert sizes.exponent(arms(BlockPart((1.0,) * 60, (0, *many[1:])))) == 0.0  # unknown
    assert sizes.exponent([[], []]) == 0.0


def test_what_the_change_saves_is_no_part_of_how_steps_grow():
    """One arm happened to get the larger images."""
    small = BlockPart(tuple(100.0 * e for e in (8, 9, 10, 11) * 6), (8, 9, 10, 11) * 6)
    large = BlockPart(tuple(50.0 * e for e in (12, 13, 14, 15) * 6), (12, 13, 14, 15) * 6)
    assert sizes.exponent([[small], [large]]) == pytest.approx(1.0)
