"""PmSampler over a simulated CUPTI: one set of metrics, windows one after the other, and which metrics fit together."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from emulation.cupti import FakeCupti

from advisor.profiling.machine import cupti, pmsampling
from advisor.profiling.machine.cupti import CountersUnavailable

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


def test_windows_are_read_one_after_the_other_with_one_set_up(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    sampler.open(("memory", "busy"))
    for _ in range(2):
        sampler.start()
        assert sampler.stop().values == {"memory": [10.0, 11.0, 12.0], "busy": [0.0, 1.0, 2.0]}
    assert gpu.set_up == 1
    sampler.close()
    sampler.close()
    assert (gpu.enabled, gpu.hosts) == (False, {})


def test_a_first_sample_that_spans_the_time_before_the_start_is_dropped_from_every_column(gpu: FakeCupti) -> None:
    gpu.samples = [(10**6, 10**9, *(1e9 for _ in METRICS)), *series(3)]
    sampler = pmsampling.PmSampler()
    sampler.open(("memory", "l2"))
    sampler.start()
    found = sampler.stop()
    assert found.values == {"memory": [10.0, 11.0, 12.0], "l2": [20.0, 21.0, 22.0]}
    assert len(found.start) == len(found.end) == 3


def test_a_metric_that_the_chip_lacks_is_told_and_leaves_nothing(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    with pytest.raises(pmsampling.UnknownMetrics, match="no such metric for this GPU"):
        sampler.open(("memory", "sm__cycles_in_hell"))
    assert gpu.hosts == {}


def test_several_passes_are_refused_before_anything_is_held(gpu: FakeCupti) -> None:
    gpu.passes = apart({"memory", "issue"})
    sampler = pmsampling.PmSampler()
    assert sampler.passes(("memory", "issue")) == 2
    with pytest.raises(CountersUnavailable, match="memory, issue need 2 passes"):
        sampler.open(("memory", "issue"))
    assert "cuptiPmSamplingEnable" not in gpu.calls
    sampler.close()
    assert gpu.hosts == {}


def names(sampler: pmsampling.PmSampler, *wanted: tuple[str, ...]) -> tuple[str, ...]:
    return pmsampling.fitting(sampler, wanted, beside="busy")


def test_what_does_not_fit_is_left_out_and_the_second_choice_taken(gpu: FakeCupti) -> None:
    gpu.passes = apart({"busy", "fma"}, {"memory", "issue"})
    sampler = pmsampling.PmSampler()
    assert names(sampler, ("memory",), ("l2",), ("issue",), ("fma", "fmaheavy")) == ("busy", "memory", "l2", "fmaheavy")
    assert names(sampler, ("nothing",)) == ("busy",)
    assert names(sampler, ("nothing", "memory"), ("l2",)) == ("busy", "memory", "l2")
    assert names(sampler, ("memory",), ("busy",), ("memory",)) == ("busy", "memory")  # nothing twice
    assert gpu.hosts == {}  # no attempt is left


def test_without_the_metric_beside_the_others_nothing_is_counted(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    with pytest.raises(CountersUnavailable, match="no unheard for this GPU"):
        pmsampling.fitting(sampler, [("memory",)], beside="unheard")
    gpu.passes = lambda names: 2
    with pytest.raises(CountersUnavailable, match="busy needs 2 passes"):
        pmsampling.fitting(sampler, [("memory",)], beside="busy")


def test_no_permission_is_told_and_leaves_nothing(gpu: FakeCupti) -> None:
    sampler = pmsampling.PmSampler()
    gpu.refuse["cuptiPmSamplingEnable"] = 35
    with pytest.raises(CountersUnavailable, match="administrators"):
        sampler.open(("memory",))
    sampler.close()
    assert (gpu.enabled, gpu.hosts) == (False, {})
