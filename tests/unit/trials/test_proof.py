"""What fresh runs say of the whole, where the plain script waits for its loader and where not."""

import random
from dataclasses import replace

from advisor.core.plan import PlanItem
from advisor.core.verdict import Status
from advisor.trials import proof
from advisor.trials.records import Measurement

STILL_WAITING = (100_000.0, 40_000.0), (99_000.0, 20_000.0)  # step and device, of the plain script and with a plan
LOSSES = tuple(1.0 / (1 + i) for i in range(30))


def run(step_us, device_us, *, noise, seed):
    chance = random.Random(seed)
    steps = [step_us * (1 + chance.uniform(-noise, noise)) for _ in range(60)]
    return Measurement(
        step_us=tuple(steps),
        every_us=tuple(steps),
        device_us=tuple(device_us * (1 + chance.uniform(-0.002, 0.002)) for _ in steps),
        losses=LOSSES,
        batch_size=8,
    )


def launched(step_us, kernel_us, *, seed):
    """A run whose steps wander with the host's launches, with the kernels' time of a few."""
    chance = random.Random(seed)
    found = run(step_us, step_us, noise=0.3, seed=seed)
    return replace(found, kernel_us=tuple(kernel_us * (1 + chance.uniform(-0.003, 0.003)) for _ in range(6)))


def judged(plain, stack, *, noise=0.3, flow=False):
    """(step, device) of both kinds, µs."""
    arms = [
        [run(*times, noise=noise, seed=10 * kind + i) for i in range(2)] for kind, times in enumerate((plain, stack))
    ]
    return proof.judge(*arms, (), flow=flow)


def test_a_gain_of_the_devices_time_holds_where_the_loader_hides_it():
    found = judged((100_000.0, 40_000.0), (99_000.0, 20_000.0))
    assert found.passed is True
    assert 1.9 < found.device_speedup_low < found.device_speedup < found.device_speedup_high < 2.1
    assert "waits for its loader" in found.detail
    assert found.speedup < 1.2  # what the step itself gains is told as well


def test_it_does_not_where_the_step_is_certainly_slower():
    found = judged((100_000.0, 40_000.0), (180_000.0, 20_000.0), noise=0.02)
    assert found.passed is False


def test_a_step_that_looks_slower_is_left_open_whatever_the_device_saves():
    """0.86 times as fast on the wall, with an interval that holds 1: seen in a training that waits for its loader."""
    found = judged((100_000.0, 40_000.0), (116_000.0, 20_000.0), noise=0.6)
    assert found.speedup < proof.NOT_SLOWER < 1.0 < found.speedup_high
    assert found.passed is None
    assert "too noisy to confirm" in found.detail


def test_a_step_that_hardly_waits_is_judged_by_itself():
    found = judged((100_000.0, 95_000.0), (99_900.0, 93_000.0))
    assert found.passed is not True
    assert found.device_speedup is None


def test_a_plan_that_leaves_the_step_waiting_for_its_loader_is_judged_by_the_devices_time():
    """DeepLabV3+ with two workers on an H200: 155 ms on the device, and 42 with a plan, behind a loader that takes 140."""
    found = judged((150_000.0, 145_000.0), (140_000.0, 42_000.0))
    assert found.passed is True
    assert found.waits_for == proof.LOADER
    assert found.device_speedup > 3.0


def test_a_change_of_the_loader_is_judged_by_the_step():
    assert judged((100_000.0, 40_000.0), (99_000.0, 20_000.0), flow=True).device_speedup is None


def test_beside_a_change_of_the_loader_the_others_are_judged_by_the_device_too():
    arms = [[run(*us, noise=0.3, seed=10 * kind + i) for i in range(2)] for kind, us in enumerate(STILL_WAITING)]
    kept = [PlanItem(transform=name, status=Status.KEPT) for name in ("channels_last", "loader_workers")]
    found = proof.judge(*arms, kept, flow=True)
    assert found.passed is True
    assert "waits for its loader" in found.detail
    assert proof.judge(*arms, kept[1:], flow=True).device_speedup is None


def test_runs_wait_together_where_one_of_them_found_batches_ready():
    plain = [run(150_000.0, 145_000.0, noise=0.02, seed=i) for i in range(2)]
    ready, waiting = (run(us, 42_000.0, noise=0.02, seed=i) for i, us in enumerate((45_000.0, 140_000.0)))
    assert proof.waits_for(plain, [ready, waiting]) == proof.LOADER
    assert not proof.waits_for(plain, [ready])


def test_a_gain_of_the_kernels_time_holds_where_the_hosts_launches_hide_it():
    plain, stack = ([launched(us, own, seed=s) for s in (1, 2)] for us, own in ((100.0, 60.0), (99.0, 40.0)))
    found = proof.judge(plain, stack, (), flow=False)
    assert found.passed is True
    assert 1.4 < found.device_speedup_low < found.device_speedup < found.device_speedup_high < 1.6
    assert found.waits_for == proof.HOST
    assert "the step waits for the host's launches" in found.detail
    unknown = [replace(m, kernel_us=()) for m in stack]
    assert proof.judge(plain, unknown, (), flow=False).passed is not True


def test_kernels_that_fill_the_step_say_no_more_than_it_does():
    plain, stack = ([launched(us, own, seed=s) for s in (1, 2)] for us, own in ((100.0, 96.0), (99.0, 40.0)))
    assert proof.judge(plain, stack, (), flow=False).device_speedup is None


def test_no_devices_time_that_nobody_saw():
    blind = [Measurement(step_us=(1.0,) * 30, every_us=(1.0,) * 30) for _ in range(2)]
    assert not proof.waits_for(blind, blind)


def test_one_process_of_each_kind_tells_less_surely_than_two():
    runs = {
        n: [[run(us, us, noise=0.01, seed=10 * k + i) for i in range(n)] for k, us in enumerate((100.0, 80.0))]
        for n in (1, 2)
    }
    one, two = (proof.judge(*runs[n], (), flow=False) for n in (1, 2))
    assert one.speedup_low < two.speedup_low < 1.25 < two.speedup_high < one.speedup_high
    assert one.speedup_low < 1.25 * 0.97
    assert proof.clear(one)
    nearly = [[run(us, us, noise=0.01, seed=k)] for k, us in enumerate((100.0, 90.0))]
    assert not proof.clear(proof.judge(*nearly, (), flow=False))
