"""Cures that only the user can make: the shares of the step that they are told to save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import profiles
import pytest

from advisor.analysis import metrics
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow, StepProfile


def saved(table: MetricTable, cure: str) -> tuple[float, float]:
    low, high = table.number(f"{cure}_saved_low"), table.number(f"{cure}_saved_high")
    assert low is not None
    assert high is not None
    return low, high


def looping(base: StepProfile, phase: str, **changes: object) -> StepProfile:
    """The profile with 480 operations of that phase, 2.4 ms of them on the device and 6 ms of the host's time."""
    one = profiles.row(
        name="mul",
        kind=phase,
        op="aten::mul_",
        phase=phase,
        source="train.py:7",
        calls=480,
        time_us=1200,
        modelled_bytes=1e6,
    )
    return replace(profiles.with_rows(base, *base.kernels, one), **changes)


def test_a_loop_that_averages_weights_costs_the_host_where_the_host_is_the_limit() -> None:
    found = metrics(looping(profiles.cifar(), "average", average_host_us=6000.0, average_calls_us=4000.0))
    low, high = saved(found, "average")
    assert 0.05 < low < 3600 / 13600 < high < 0.6
    assert found.number("average_calls") == 480
    assert found["ema"].value is True
    # None of it is the optimizer's, nor an elementwise pass of the model's.
    plain = metrics(profiles.cifar())
    for name in ("optimizer_kernels", "elementwise_frac"):
        before, now = plain.number(name), found.number(name)
        assert (now or 0.0) <= (before or 0.0)


def test_on_a_cpu_it_costs_what_its_lines_take() -> None:
    base = looping(profiles.laptop(), "average", average_host_us=9000.0, average_calls_us=7000.0)
    low, high = saved(metrics(base), "average")
    assert low < 9000 / 150_000 < high


def test_a_multi_tensor_average_is_nothing_to_cure() -> None:
    one = profiles.row(
        name="lerp",
        kind="average",
        op="aten::_foreach_lerp_",
        phase="average",
        source="train.py:7",
        calls=4,
        time_us=90,
    )
    base = profiles.cifar()
    found = metrics(profiles.with_rows(base, *base.kernels, one))
    assert found["ema"].value is True
    assert found.number("average_calls") == 0


def test_without_the_scripts_lines_an_average_is_not_evaluated_rather_than_absent() -> None:
    base = profiles.cifar()
    found = metrics(replace(base, kernels=tuple(replace(row, source="") for row in base.kernels)))
    assert found["ema"].value is None
    assert "compiled" in found["ema"].reason


@pytest.mark.parametrize("optimizers", [(), ("Lion",)], ids=["by hand", "an optimizer of its own"])
def test_an_update_of_the_scripts_own_is_told_with_what_a_fused_one_saves(optimizers: tuple[str, ...]) -> None:
    base = profiles.cifar()
    model = replace(base.model, optimizers=optimizers, optimizer_own=bool(optimizers))
    found = metrics(looping(base, "optimizer", model=model, optimizer_host_us=6000.0))
    assert found.number("own_optimizer_calls") == 480
    low, high = saved(found, "own_optimizer")
    assert 0.03 < low < 3600 / 13600 < high < 0.6


def test_an_update_by_hand_beside_an_optimizer_of_torchs_is_told() -> None:
    base = profiles.cifar()
    theirs = profiles.row(
        name="multi",
        kind="optimizer",
        op="aten::_foreach_mul_",
        phase="optimizer",
        calls=4,
        time_us=9,
        source="train.py:1",
    )
    found = metrics(looping(profiles.with_rows(base, *base.kernels, theirs), "optimizer", optimizer_host_us=6000.0))
    assert found.number("own_optimizer_calls") == 480


def test_what_a_multi_tensor_update_does_tensor_by_tensor_on_its_own_line_is_torchs() -> None:
    """Fused Adam on a CPU adds to each parameter's count of steps by itself."""
    base = profiles.cifar()
    by_hand = metrics(looping(base, "optimizer", model=replace(base.model, optimizers=())))
    theirs = profiles.row(
        name="fused",
        kind="optimizer",
        op="aten::_fused_adamw_",
        phase="optimizer",
        calls=1,
        time_us=9,
        source="train.py:7",
    )
    found = metrics(looping(profiles.with_rows(base, *base.kernels, theirs), "optimizer"))
    assert by_hand.number("own_optimizer_calls") == 480
    assert found.number("own_optimizer_calls") == 0


def test_torchs_own_optimizers_are_other_rules_matter() -> None:
    base = profiles.cifar()
    without = [row for row in base.kernels if row.phase != "optimizer"]
    found = metrics(looping(profiles.with_rows(base, *without), "optimizer", optimizer_host_us=6000.0))
    assert found.number("own_optimizer_calls") == 0
    assert found.number("own_optimizer_saved_high") is None


UNHELD = ("Teacher.conv", "Teacher.norm", "Teacher.*")


def backward_of(module: str, time_us: float, **more: Any) -> KernelRow:
    return profiles.row(name="b", op="aten::b", kind="conv", phase="backward", module=module, time_us=time_us, **more)


def test_gradients_for_parameters_that_no_optimizer_holds_are_told() -> None:
    base = profiles.laptop()
    rows = [backward_of("Teacher.conv", 30_000), backward_of("Teacher.relu", 5_000), backward_of("Net.conv1", 20_000)]
    base = profiles.with_rows(base, *base.kernels, *rows)
    found = metrics(replace(base, model=replace(base.model, untrained=UNHELD)))
    assert found.number("untrained_frac") == pytest.approx(35 / 195)
    low, high = saved(found, "untrained")
    # The weights' own gradients at least; at most all of it, what lies between these modules too.
    assert 0 < low < 30 / 195 < high
    assert low / high == pytest.approx(0.3 * 30 / 35)


def test_a_forward_that_records_no_graph_is_shorter_on_a_cpu() -> None:
    base = profiles.laptop()
    forward = profiles.row(name="f", op="aten::f", kind="conv", phase="forward", module="Teacher.conv", time_us=20_000)
    base = profiles.with_rows(base, *base.kernels, backward_of("Teacher.conv", 30_000), forward)
    low, high = saved(metrics(replace(base, model=replace(base.model, untrained=UNHELD))), "untrained")
    assert low / high == pytest.approx(0.3 * 30_000 / (30_000 + 0.3 * 20_000))


def test_steps_that_others_have_made_longer_than_the_traced_ones_keep_the_rows_shares() -> None:
    base = profiles.laptop()
    base = profiles.with_rows(base, *base.kernels, backward_of("Teacher.conv", 30_000))
    quiet = replace(base, idle=(), model=replace(base.model, untrained=UNHELD))
    quiet = replace(quiet, input=replace(quiet.input, next_us=0.0), busy_us=sum(row.time_us for row in quiet.kernels))
    assert quiet.step_us is not None
    step = replace(quiet.step_us, median=4 * quiet.busy_us)
    busy = replace(quiet, step_us=step, wall_us=step, cost=replace(quiet.cost, overhead_frac=-0.75))
    _, high = saved(metrics(busy), "untrained")
    assert high == pytest.approx(30_000 / quiet.busy_us)


def test_of_a_model_that_is_trained_in_part_only_the_modules_without_an_optimizer_are_told() -> None:
    base = profiles.laptop()
    rows = [backward_of("Net.backbone", 30_000), backward_of("Net.relu", 5_000), backward_of("Net.head", 20_000)]
    base = profiles.with_rows(base, *base.kernels, *rows)
    found = metrics(replace(base, model=replace(base.model, untrained=("Net.backbone",))))
    assert found.number("untrained_frac") == pytest.approx(30 / 195)
    low, high = saved(found, "untrained")
    # Where a head alone is trained nothing of backward is needed but the head's.
    passes = {"backward": 0.0, "forward": 0.0}
    for row in base.kernels:
        if row.module.startswith("Net") and row.phase in passes:
            passes[row.phase] += row.time_us
    assert low / high == pytest.approx(0.3 * 30_000 / (passes["backward"] + 0.3 * passes["forward"]))


def test_gradients_that_an_update_by_hand_reads_are_none_for_nobody() -> None:
    base = profiles.cifar()
    model = replace(base.model, optimizers=(), untrained=("Net.conv1",))
    found = metrics(looping(profiles.with_rows(base, *base.kernels), "optimizer", model=model, optimizer_host_us=6e3))
    assert found.number("untrained_saved_high") is None


def test_what_grows_is_told_with_the_time_until_memory_is_full() -> None:
    base = profiles.resnet50()
    grown = replace(base.memory, growth_bytes=10.0 * 2**20, growth_steady=True, host_growth_bytes=0.0)
    found = metrics(replace(base, memory=grown))
    assert found.number("memory_full_us") == pytest.approx((140 - 40) * 2**30 / (10 * 2**20) * 116_600)
    assert found.number("host_full_us") is None
    unsteady = metrics(replace(base, memory=replace(grown, growth_steady=False)))
    assert unsteady.number("memory_full_us") is None
    unknown = metrics(replace(base, memory=replace(grown, growth_bytes=None)))
    assert unknown["memory_growth_bytes"].value is None


def test_on_a_cpu_the_hosts_free_memory_is_what_fills() -> None:
    base = profiles.laptop()
    memory = replace(
        base.memory, growth_bytes=2e6, growth_steady=True, host_growth_bytes=2e6, host_free_bytes=8 * 10**9
    )
    found = metrics(replace(base, memory=memory))
    assert found.number("memory_full_us") == found.number("host_full_us") == pytest.approx(4000 * 150_000)


def searching(base: StepProfile, **changes: object) -> StepProfile:
    """Under anomaly detection: 100 nodes, 90 of them searched for NaN in 4 us each."""
    rows = [
        profiles.row(
            name=name, kind="reduce", op=f"aten::{name}", phase="backward", calls=90, time_us=180, modelled_bytes=1e6
        )
        for name in ("isnan", "any")
    ]
    model = replace(base.model, flags={**base.model.flags, "anomaly": True}, stack_us=60.0)
    profile = profiles.with_rows(base, *base.kernels, *rows)
    return replace(profile, model=model, backward_nodes=100.0, **changes)


def test_anomaly_detection_costs_the_stacks_it_notes_and_the_searches() -> None:
    low, high = saved(metrics(searching(profiles.laptop())), "anomaly")
    assert low < (100 * 60 + 360) / 150_000 < high
    low, high = saved(metrics(searching(profiles.cifar())), "anomaly")
    assert 0.05 < low < 100 * 60 / 13_600 < high


def test_determinism_costs_the_fills_at_least_and_slower_sums_at_most() -> None:
    base = profiles.resnet50()
    fill = profiles.row(
        name="FillFunctor",
        kind="memset",
        op="aten::empty",
        phase="forward",
        calls=300,
        time_us=6000,
        modelled_bytes=1e9,
    )
    flags = {**base.model.flags, "deterministic_algorithms": True}
    profile = replace(profiles.with_rows(base, *base.kernels, fill), model=replace(base.model, flags=flags))
    found = metrics(profile)
    low, high = saved(found, "deterministic")
    assert found.number("fresh_fill_frac") == pytest.approx(6000 / sum(r.time_us for r in profile.kernels))
    assert 0.01 < low < 6000 / 116_600 < high
    assert metrics(replace(profile, model=base.model)).number("deterministic_saved_high") is None


def test_an_emptied_cache_costs_the_idle_time_in_which_memory_is_taken_again() -> None:
    base = profiles.cifar()
    memory = replace(base.memory, empty_cache_calls=1.0, empty_cache_us=4000.0)
    profile = replace(base, memory=memory, allocating_us=3000.0, allocating_idle_us=2500.0)
    low, high = saved(metrics(profile), "empty_cache")
    assert low < 2500 / 13_600 < high <= 7000 / 13_600
    assert metrics(base).number("empty_cache_saved_high") is None


def test_collected_garbage_costs_its_time() -> None:
    base = profiles.laptop()
    memory = replace(base.memory, gc_calls=1.0, gc_us=30_000.0)
    low, high = saved(metrics(replace(base, memory=memory)), "gc")
    assert low < 0.2 < high < 0.3
    base = profiles.resnet50()  # whose host is ahead of the device
    memory = replace(base.memory, gc_calls=1.0, gc_us=30_000.0)
    assert saved(metrics(replace(base, memory=memory)), "gc")[0] < 0.02


def test_fp64_costs_from_a_quarter_to_nearly_all_of_its_time() -> None:
    base = profiles.resnet50()
    one = profiles.row(name="mul", kind="elementwise", op="aten::mul", phase="forward", dtype="fp64", time_us=3000)
    low, high = saved(metrics(profiles.with_rows(base, *base.kernels, one)), "fp64")
    assert 0 < low < 1500 / 116_600 < high
