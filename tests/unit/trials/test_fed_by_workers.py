"""A loop fed by workers that deliver in turn, by a planted clock: what fresh runs say of plans that leave the loader alone, and of those that do not."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

import pytest

from advisor.core.plan import PlanItem
from advisor.core.verdict import Status
from advisor.trials import flow, proof
from advisor.trials.records import Measurement

WORKERS, AHEAD = 6, 2
LOSSES = tuple(1.0 / (1 + i) for i in range(30))
NHWC, MORE_WORKERS = (PlanItem(transform=name, status=Status.KEPT) for name in ("channels_last", "loader_workers"))


def fed(own_us, batch_us, *, seed, noise=0.3, cpu_us=None, steps=30, warmup=12, workers=WORKERS):
    """A run whose batches take a worker `batch_us`, and whose step takes `own_us` once its batch is there.

    Workers deliver in turn, and begin a batch when they are done with their last one and no more than `AHEAD` of theirs wait to be drawn.
    """
    chance = random.Random(seed)
    free, ready, drawn, boundaries, waited = [0.0] * workers, [], [], [0.0], []
    for batch in range(warmup + steps + 1):
        worker, asked = batch % workers, batch - AHEAD * workers
        began = max(free[worker], drawn[asked] if asked >= 0 else 0.0)
        free[worker] = began + batch_us * chance.uniform(1 - noise, 1 + noise)
        ready.append(free[worker])
        drawn.append(max(boundaries[-1], ready[batch]))
        waited.append(drawn[-1] - boundaries[-1])
        boundaries.append(drawn[-1] + own_us * chance.uniform(0.995, 1.005))
    every = [after - before for before, after in pairwise(boundaries)][-steps:]
    waited = waited[-steps:]
    return Measurement(
        step_us=tuple(every),
        every_us=tuple(every),
        device_us=tuple(step - wait for step, wait in zip(every, waited, strict=True)),
        waited_us=tuple(waited),
        cpu_us=(own_us if cpu_us is None else cpu_us,) * steps,
        workers=workers,
        losses=LOSSES,
        batch_size=64,
    )


def arms(plain, stack, *, seed=0, **more):
    """Two runs of each kind; (own, batch) times or (own, batch, cpu)."""
    return [
        [
            fed(
                *us[:2],
                seed=1000 * seed + 10 * kind + i,
                warmup=12 + (5 * kind + 3 * i) % 7,
                cpu_us=(*us, None)[2],
                **more,
            )
            for i in range(2)
        ]
        for kind, us in enumerate((plain, stack))
    ]


def test_a_whole_turn_of_the_workers_tells_the_rate_where_single_steps_do_not():
    """3-D ResNet, six workers, steps of 45 and 600 ms, told as 0.58 to 1.89."""
    for seed in range(5):
        plain, stack = arms((71.0, 1200.0), (50.0, 1200.0), noise=0.1, seed=seed)
        low, point, high = proof.ratio(plain, stack, flow=True).bounds
        blind = [[replace(run, workers=0) for run in arm] for arm in (plain, stack)]
        single = proof.ratio(*blind, flow=True).bounds
        assert low < 1.0 < high < 1.3
        assert point == pytest.approx(1.0, abs=0.08)
        assert high / low < 0.75 * single[2] / single[0]


def test_what_was_made_ahead_of_the_first_wait_is_no_rate():
    """A first step that takes a minute lets the workers fill their queues, of which the timed steps live for a while."""
    ahead = fed(50.0, 600.0, seed=1, noise=0.0)
    early = replace(ahead, every_us=(50.0,) * 6 + ahead.every_us[6:], waited_us=(0.0,) * 6 + ahead.waited_us[6:])
    (turns,), (same,) = flow.in_turns(((early,), (ahead,)))
    assert fmean(turns) == pytest.approx(100.0, rel=0.03) == fmean(same)
    assert fmean(early.every_us) < 95.0


def test_without_enough_turns_steps_count_one_by_one():
    short = fed(50.0, 600.0, seed=1, steps=11)
    assert flow.in_turns(((short,), (short,))) is None
    alone = replace(fed(50.0, 600.0, seed=1), workers=1)
    assert flow.in_turns(((alone,), (alone,))) is None


def test_a_loader_that_was_slower_in_the_plans_runs_does_not_hide_what_the_device_saves():
    """Nothing but chance made these processes' workers slower by a quarter; no pair of processes would tell."""
    plain = [fed(71.0, us, seed=i) for i, us in enumerate((1000.0, 1500.0))]
    stack = [fed(50.0, us, seed=9 + i) for i, us in enumerate((1400.0, 1500.0))]
    found = proof.judge(plain, stack, (NHWC,), flow=False)
    assert found.speedup < proof.NOT_SLOWER < 1.0 < found.speedup_high
    assert found.passed is True
    assert "waits for its loader, whose rate these changes leave as it is" in found.detail


def test_nor_does_a_loader_that_the_plain_step_did_not_wait_for():
    """DeepLabV3+ with two workers: 155 ms on the device, 45 with a plan, and a loader of 120 to 150 ms a batch."""
    plain = [fed(155.0, us, seed=i, workers=2, noise=0.1) for i, us in enumerate((240.0, 290.0))]
    stack = [fed(45.0, us, seed=9 + i, workers=2, noise=0.1) for i, us in enumerate((240.0, 330.0))]
    assert proof.judge(plain, stack, (NHWC,), flow=False).passed is True


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_that_takes_the_workers_processors_is_not_kept(seed):
    """It computes a fifth of a step more in threads of its own, and the workers are slower by a tenth for it."""
    found = proof.judge(*arms((71.0, 1200.0), (50.0, 1320.0, 111.0), seed=seed), (NHWC,), flow=False)
    assert found.device_speedup_low > 1.0
    assert found.passed is not True


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_with_another_loader_that_is_slower_is_not_kept_for_the_devices_time(seed):
    kept = (NHWC, MORE_WORKERS)
    plain, stack = arms((71.0, 1200.0), (50.0, 1320.0), seed=seed, noise=0.05)
    assert proof.judge(plain, stack, kept, flow=True).passed is not True


def test_a_plan_whose_runs_are_certainly_slower_is_not_kept_whatever_its_process_computes():
    found = proof.judge(*arms((71.0, 1200.0), (50.0, 1800.0), noise=0.02), (NHWC,), flow=False)
    assert found.passed is False


@pytest.mark.parametrize("seed", range(20))
def test_one_run_of_each_kind_shows_that_a_plan_with_twice_the_workers_is_not_slower(seed):
    """3-D ResNet on an H200: 2.29 times as fast by one run of each, told as 0.00 to above 100: of 23 steps of the plain run there were no whole
    turns of the twelve workers of the plan, and single steps come in bursts."""
    plain = [fed(71.0, 1200.0, seed=seed, steps=23, noise=0.2)]
    stack = [fed(50.0, 1200.0, seed=100 + seed, steps=60, noise=0.2, workers=12)]
    found = proof.judge(plain, stack, (NHWC, MORE_WORKERS), flow=True)
    assert found.passed is True
    assert 1.4 < found.speedup < 2.6


def test_processors_that_nobody_watched_prove_nothing():
    plain, stack = arms((71.0, 1200.0), (50.0, 1200.0))
    assert proof.takes_no_more(plain, stack)
    assert not proof.takes_no_more(plain, [replace(run, cpu_us=()) for run in stack])
    assert not proof.takes_no_more(plain, [stack[0], replace(stack[1], cpu_us=(90.0,) * 30)])
