"""PmSampler over a simulated CUPTI: several groups one after the other, and how metrics are packed into them."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from emulation.cupti import FakeCupti

from advisor.profiling import cupti, pmsampling
from advisor.profiling.cupti import CountersUnavailable

METRICS = ("busy", "memory", "l2", "issue", "fma", "fmaheavy")


def series(count: int) -> list[tuple[float, ...]]:
    return [
        (10**9 + 20_000 * i, 10**9 + 20_000 * (i + 1), *(10.0 * m + i for m in range(len(METRICS))))
        for i in range(count)
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti(METRICS, series(3))
    monkeypatch.setattr(cupti, "load", lambda: fake)
    return fake


def apart(*pairs: Collection[str]):
    """Passes, where the metrics of a pair cannot be counted together."""
    return lambda names: 1 + any(set(pair) <= set(names) for pair in pairs)


def test_groups_are_counted_one_after_the_other_while_enabled_once(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    first, second = sampler.group(("memory", "busy")), sampler.group(("l2",))
    sampler.enable()
    found = []
    for group in (first, second, first):
        sampler.choose(group)
        sampler.start()
        found.append(sampler.stop().values)
    assert found == [
        {"memory": [10.0, 11.0, 12.0], "busy": [0.0, 1.0, 2.0]},
        {"l2": [20.0, 21.0, 22.0]},
        {"memory": [10.0, 11.0, 12.0], "busy": [0.0, 1.0, 2.0]},
    ]
    assert gpu.calls.count("cuptiPmSamplingEnable") == 1
    assert gpu.calls.count("cuptiPmSamplingSetConfig") == 3
    sampler.close()
    sampler.close()
    assert (gpu.enabled, gpu.hosts) == (False, {})


def test_what_is_disabled_can_be_enabled_again_with_its_groups(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    group = sampler.group(("memory",))
    for _ in range(2):
        sampler.enable()
        sampler.choose(group)
        sampler.start()
        assert sampler.stop().values == {"memory": [10.0, 11.0, 12.0]}
        sampler.disable()
        assert not gpu.enabled
    assert list(gpu.hosts.values()) == [("memory",)]


def test_a_first_sample_that_spans_the_time_before_the_start_is_dropped_from_every_column(gpu: FakeCupti) -> None:
    gpu.samples = [(10**6, 10**9, *(1e9 for _ in METRICS)), *series(3)]
    sampler = pmsampling.PmSampler()
    sampler.enable()
    sampler.choose(sampler.group(("memory", "l2")))
    sampler.start()
    found = sampler.stop()
    assert found.values == {"memory": [10.0, 11.0, 12.0], "l2": [20.0, 21.0, 22.0]}
    assert len(found.start) == len(found.end) == 3


def test_a_metric_that_the_chip_lacks_is_told_and_leaves_nothing(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    with pytest.raises(pmsampling.UnknownMetrics, match="no such metric for this GPU"):
        sampler.group(("memory", "sm__cycles_in_hell"))
    assert gpu.hosts == {}


def names(sampler: pmsampling.PmSampler, *wanted: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [group.names for group in pmsampling.packed(sampler, wanted, beside="busy")]


def test_metrics_are_packed_into_groups_of_one_pass(gpu: FakeCupti) -> None:
    gpu.passes = apart({"memory", "issue"}, {"l2", "fma"})
    sampler = pmsampling.PmSampler()
    assert names(sampler, ("memory",), ("l2",), ("issue",), ("fma",)) == [
        ("busy", "memory", "l2"),
        ("busy", "issue", "fma"),
    ]
    assert sorted(gpu.hosts.values()) == [("busy", "issue", "fma"), ("busy", "memory", "l2")]  # no attempt is left


def test_what_cannot_be_counted_is_left_out_and_the_second_choice_taken(gpu: FakeCupti) -> None:
    gpu.passes = apart({"busy", "fma"}, {"busy", "l2"})
    sampler = pmsampling.PmSampler()
    assert names(sampler, ("nothing",), ("memory",), ("l2",), ("fma", "fmaheavy")) == [("busy", "memory", "fmaheavy")]
    assert names(sampler, ("nothing",)) == [("busy",)]
    assert names(sampler, ("fmaheavy", "memory")) == [("busy", "fmaheavy")]
    assert names(sampler, ("memory",), ("busy",), ("memory",)) == [("busy", "memory")]  # nothing twice


def test_without_the_metric_beside_the_others_there_are_no_groups(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    with pytest.raises(CountersUnavailable, match="no unheard for this GPU"):
        pmsampling.packed(sampler, [("memory",)], beside="unheard")
    gpu.passes = lambda names: 2
    with pytest.raises(CountersUnavailable, match="busy needs 2 passes"):
        pmsampling.packed(sampler, [("memory",)], beside="busy")


def test_no_permission_is_told_and_leaves_nothing(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    sampler.group(("memory",))
    gpu.refuse["cuptiPmSamplingEnable"] = 35
    with pytest.raises(CountersUnavailable, match="administrators"):
        sampler.enable()
    sampler.close()
    assert (gpu.enabled, gpu.hosts) == (False, {})
