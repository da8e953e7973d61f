"""Cures that only the user can make: the shares of the step that they are told to save."""

from __future__ import annotations

from dataclasses import replace

import profiles
import pytest

from advisor.analysis import metrics
from advisor.core.metrics import MetricTable
from advisor.core.profile import StepProfile


def saved(table: MetricTable, cure: str) -> tuple[float, float]:
    low, high = table.number(f"{cure}_saved_low"), table.number(f"{cure}_saved_high")
    assert low is not None
    assert high is not None
    return low, high


def looping(base: StepProfile, phase: str, **changes: object) -> StepProfile:
    """The profile with 480 operations of that phase, 2.4 ms of them on the device and 6 ms of the host's time."""
    one = profiles.row(
        name="mul", kind=phase, op="aten::mul_", phase=phase, calls=480, time_us=1200, modelled_bytes=1e6
    )
    return replace(profiles.with_rows(base, *base.kernels, one), **changes)  # type: ignore[arg-type]


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
    one = profiles.row(name="lerp", kind="average", op="aten::_foreach_lerp_", phase="average", calls=4, time_us=90)
    base = profiles.cifar()
    found = metrics(profiles.with_rows(base, *base.kernels, one))
    assert found["ema"].value is True
    assert found.number("average_calls") == 0


@pytest.mark.parametrize("optimizers", [(), ("Lion",)], ids=["by hand", "an optimizer of its own"])
def test_an_update_of_the_scripts_own_is_told_with_what_a_fused_one_saves(optimizers: tuple[str, ...]) -> None:
    base = profiles.cifar()
    model = replace(base.model, optimizers=optimizers, optimizer_own=bool(optimizers))
    found = metrics(looping(base, "optimizer", model=model, optimizer_host_us=6000.0))
    assert found.number("own_optimizer_calls") == 480
    low, high = saved(found, "own_optimizer")
    assert 0.03 < low < 3600 / 13600 < high < 0.6


def test_torchs_own_optimizers_are_other_rules_matter() -> None:
    found = metrics(looping(profiles.cifar(), "optimizer", optimizer_host_us=6000.0))
    assert found.number("own_optimizer_calls") == 0
    assert found.number("own_optimizer_saved_high") is None
