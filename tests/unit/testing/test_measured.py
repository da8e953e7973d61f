"""Every assertion of a measured step on a hand-built GPU profile: it passes where it should, and names who is at fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gpu_profile import ADD, CONV, H200, PROFILE, changed

from advisor.core.errors import AdvisorError
from advisor.core.profile import InputStats, ProfilerCost, Site, Spread, StepProfile
from advisor.core.provenance import Provenance
from advisor.testing import section
from advisor.testing.baselines import BaselineEntry, Machine, Stored
from advisor.testing.judged import CannotJudge, JudgedBudget
from advisor.testing.measured import Measured
from advisor.testing.quantities import BY_KEY, QUANTITIES, Beyond, HeldTo
from advisor.testing.records import Record, Tested

BEYOND = Beyond(
    growing=(HeldTo(source="train.py:9", what="aten::empty", bytes=2**20),),
    peak=(HeldTo(source="model.py:31", what="aten::add", bytes=2**30),),
    breaks=(Site(source="model.py:50", what="graph break: print", calls=1, time_us=0),),
    recompiles=(Site(source="model.py:40", what="compilation of f: k == 7", calls=2, time_us=0),),
    compiled=True,
)


def measured(profile: StepProfile = PROFILE, beyond: Beyond = BEYOND, label: str = "") -> Measured:
    return Measured(profile, beyond=beyond, label=label)


Assertion = Callable[[Measured], None]

# what passes, what fails, and what the failure has to name
CASES: dict[str, tuple[Assertion, Assertion, tuple[str, ...]]] = {
    "step": (
        lambda m: m.assert_step_time(max="1 ms"),
        lambda m: m.assert_step_time(max="900 us"),
        ("step time: 1.00 ms, at most 900 µs", "sm90_xmma_fprop_tensorop", "ResNet.layer1.0.conv1", "model.py:10"),
    ),
    "kernels": (
        lambda m: m.assert_kernel_count(max=40, min=40),
        lambda m: m.assert_kernel_count(max=39),
        ("kernel count: 40 a step, at most 39", "16 × vectorized_elementwise_kernel from aten::add_", "model.py:31"),
    ),
    "launches": (
        lambda m: m.assert_launches(max=40),
        lambda m: m.assert_launches(max=10),
        ("launches: 40 a step", "20 × sm90", "model.py:10"),
    ),
    "syncs": (
        lambda m: m.assert_no_host_sync(allow=["aten::nonzero", "train.py:7"]),
        lambda m: m.assert_no_host_sync(allow=["aten::nonzero"]),
        ("host synchronisations: 1 a step", "aten::item", "train.py:7"),
    ),
    "h2d": (
        lambda m: m.assert_copies("h2d", max=2, max_bytes="4 MB"),
        lambda m: m.assert_copies("h2d", max=1),
        ("copies host to device: 2 a step", "h2d copy (pageable)", "train.py:3"),
    ),
    "h2d_bytes": (
        lambda m: m.assert_copies("d2d", max=0),
        lambda m: m.assert_copies("h2d", max_bytes="1 MB"),
        ("bytes copied host to device: 3.81 MiB a step", "train.py:3"),
    ),
    "dram": (
        lambda m: m.assert_dram_bytes(max="1.2 GB"),
        lambda m: m.assert_dram_bytes(max="1 GB"),
        ("DRAM traffic: 1.02 GiB a step", "572 MiB  sm90_xmma_fprop_tensorop", "model.py:10"),
    ),
    "memory": (
        lambda m: m.assert_memory(max="3 GiB"),
        lambda m: m.assert_memory(max="2 GiB"),
        ("peak memory: 3.00 GiB, at most 2.00 GiB", "1.00 GiB  aten::add  model.py:31"),
    ),
    "growth": (
        lambda m: m.assert_memory_growth(max="1 MiB"),
        lambda m: m.assert_no_memory_growth(),
        ("memory growth: 1.00 MiB a step, at most 64.0 KiB", "aten::empty  train.py:9"),
    ),
    "tensor_cores": (
        lambda m: m.assert_tensor_cores(min="70 %"),
        lambda m: m.assert_tensor_cores(min="95 %"),
        ("tensor-core share", "75 %, at least 95 %", "25 %  implicit_convolve_sgemm", "layer2.0.conv1", "model.py:22"),
    ),
    "half": (
        lambda m: m.assert_half_precision(min=0.9),
        lambda m: m.assert_half_precision(min=1),
        ("half-precision share", "90 %", "10 %  implicit_convolve_sgemm", "model.py:22"),
    ),
    "busy": (
        lambda m: m.assert_gpu_busy(min="90 %"),
        lambda m: m.assert_gpu_busy(min="95 %"),
        ("GPU busy share: 90 %", "10 %  idle: sync", "train.py:7"),
    ),
    "limit": (
        lambda m: m.assert_speed_of_light(min="50 %"),
        lambda m: m.assert_speed_of_light(min="60 %"),
        ("share of the speed of light: 50 %", "modelled", "sm90_xmma_fprop_tensorop", "model.py:10"),
    ),
    "layouts": (
        lambda m: m.assert_layout_conversions(max=3),
        lambda m: m.assert_no_layout_conversion(),
        ("layout conversions: 3 a step", "nchwToNhwcKernel", "ResNet.layer3.0.conv1", "model.py:44"),
    ),
    "kernel present": (
        lambda m: m.assert_kernel("xmma.*tensorop", min=20, max=20),
        lambda m: m.assert_kernel("advisor_batchnorm"),
        ("calls of 'advisor_batchnorm': 0 a step, at least 1", "there are:", "model.py:10"),
    ),
    "kernel absent": (
        lambda m: m.assert_no_kernel("sdpa"),
        lambda m: m.assert_no_kernel("sgemm"),
        ("calls of 'sgemm': 1 a step, at most 0", "implicit_convolve_sgemm", "model.py:22"),
    ),
    "recompiles": (
        lambda m: Measured(m.profile, beyond=Beyond()).assert_no_recompile(),
        lambda m: m.assert_no_recompile(),
        ("compilations after warm-up: 2", "k == 7", "model.py:40"),
    ),
    "graph breaks": (
        lambda m: m.assert_graph_breaks(max=1),
        lambda m: m.assert_no_graph_break(),
        ("graph breaks: 1", "print", "model.py:50"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_assertion_passes_within_its_budget(case: str) -> None:
    found = measured()
    CASES[case][0](found)
    assert all(budget.passed for budget in found.budgets)


@pytest.mark.parametrize("case", CASES)
def test_an_assertion_fails_past_its_budget_and_names_who_is_at_fault(case: str) -> None:
    found = measured()
    with pytest.raises(AssertionError) as raised:
        CASES[case][1](found)
    assert not isinstance(raised.value, CannotJudge)
    assert [text for text in CASES[case][2] if text not in str(raised.value)] == []
    assert found.budgets[-1].passed is False


def test_every_quantity_has_a_case() -> None:
    covered = {*CASES} | {"d2h", "d2d", "d2h_bytes", "d2d_bytes", "graph_breaks"}
    assert {quantity.key for quantity in QUANTITIES} <= covered


@pytest.mark.parametrize("method", ["assert_step_time", "assert_kernel_count", "assert_memory", "assert_host_syncs"])
def test_an_assertion_without_a_bound_is_an_error(method: str) -> None:
    with pytest.raises(AdvisorError, match="nothing to hold it to"):
        getattr(measured(), method)()
    with pytest.raises(AdvisorError, match="nothing to hold it to"):
        getattr(measured(), method)(max=None, baseline=None)


def test_an_unknown_bound_is_an_error() -> None:
    with pytest.raises(TypeError, match="maximum"):
        measured().assert_kernel_count(maximum=3)
    with pytest.raises(AdvisorError, match="h2d, d2h or d2d"):
        measured().assert_copies("sideways", max=1)
    with pytest.raises(AdvisorError, match="a list of texts"):
        measured().assert_no_host_sync(allow="aten::item")


def test_modelled_traffic_is_refused_unless_allowed() -> None:
    rows = (replace(CONV, dram_bytes=None, dram_provenance=Provenance.UNAVAILABLE, modelled_bytes=5e8), ADD)
    found = measured(changed(kernels=rows))
    with pytest.raises(CannotJudge, match=r"modelled.*allow_modelled=True"):
        found.assert_dram_bytes(max="10 GB")
    found.assert_dram_bytes(max="10 GB", allow_modelled=True)
    with pytest.raises(AssertionError, match="modelled"):
        found.assert_dram_bytes(max="1 MB", allow_modelled=True)


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.assert_launches(max=1000),
        lambda m: m.assert_copies("h2d", max=1000),
        lambda m: m.assert_host_syncs(max=1000),  # of a script: a callable's are watched
        lambda m: m.assert_tensor_cores(min=0),
        lambda m: m.assert_gpu_busy(min=0),
    ],
)
def test_what_a_cpu_cannot_tell_is_no_pass(ask: Assertion) -> None:
    cpu = changed(environment=replace(H200, device="cpu", gpu_name="", gpu_uuid="", sm_arch=0))
    with pytest.raises(CannotJudge, match="not known"):
        ask(measured(cpu))


def test_what_was_not_traced_is_no_pass() -> None:
    empty = changed(
        kernels=(), syncs=(), copies=(), cost=ProfilerCost(), notes=("no trace: the profiler did not start",)
    )
    for ask in (
        lambda m: m.assert_kernel_count(max=1000),
        lambda m: m.assert_no_host_sync(),
        lambda m: m.assert_no_kernel("sgemm"),
        lambda m: m.assert_no_layout_conversion(),
        lambda m: m.assert_dram_bytes(max="1 TiB"),
    ):
        with pytest.raises(AssertionError, match=r"not known|not measured"):
            ask(measured(empty))


def test_graph_breaks_are_no_pass_when_nothing_was_compiled() -> None:
    with pytest.raises(CannotJudge, match="nothing was compiled"):
        measured(beyond=Beyond()).assert_no_graph_break()


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.assert_deterministic(),
        lambda m: m.assert_close_to(lambda: None),
        lambda m: m.assert_in_effect("channels_last"),
    ],
)
def test_what_needs_the_live_step_cannot_be_judged_of_a_script(ask: Assertion) -> None:
    with pytest.raises(CannotJudge, match="script"):
        ask(measured())


def test_budgets_say_how_much_is_used() -> None:
    assert JudgedBudget(title="x", unit="count", value=90, limit=180, bound="max", passed=True).used == 0.5
    assert JudgedBudget(title="x", unit="frac", value=0.8, limit=0.4, bound="min", passed=True).used == 0.5
    assert JudgedBudget(title="x", unit="count", value=0, limit=0, bound="max", passed=True).used is None


# -- baselines --------------------------------------------------------------------------------------------------------


def stored(profile: StepProfile = PROFILE, machine: Machine | None = None, **values: float) -> Stored:
    found = measured(profile)
    entry = found.entry
    return Stored(
        name="main",
        machine=machine or found.machine,
        entries=(replace(entry, values={**entry.values, **values}),),
    )


def test_a_step_time_where_batches_come_in_bursts_is_the_mean() -> None:
    raw = (1000.0,) * 7 + (9000.0,)
    bursts = Spread(median=1000.0, p10=1000.0, p90=3400.0, n=8, raw=raw)
    found = measured(changed(step_us=bursts, input=InputStats(workers=8, burst_us=1000.0)))
    found.assert_step_time(max="2.1 ms")
    with pytest.raises(AssertionError, match="step time"):
        found.assert_step_time(max="1.9 ms")


def test_a_step_is_within_its_own_baseline() -> None:
    found = measured()
    found.assert_kernel_count(baseline=stored())
    assert found.hold_to_baseline(stored()) == []


def test_more_than_the_baseline_names_what_is_more() -> None:
    more = changed(kernels=(CONV, replace(ADD, calls=18.0, source="model.py:33")))
    with pytest.raises(AssertionError) as raised:
        measured(more).assert_kernel_count(baseline=stored(changed(kernels=(CONV, ADD))))
    text = str(raised.value)
    assert "kernel count: 38 a step, 36 in baseline 'main'" in text
    assert "2 × vectorized_elementwise_kernel from aten::add_  ResNet.layer1.0  model.py:33" in text
    assert "tensorop" not in text  # has not changed


def test_tolerance_is_a_share_of_the_baseline() -> None:
    found = measured()
    found.assert_memory(baseline=stored(memory=3 * 2**30 / 1.04), tolerance="5 %")
    with pytest.raises(AssertionError, match="peak memory"):
        found.assert_memory(baseline=stored(memory=3 * 2**30 / 1.06), tolerance="5 %")


def test_where_more_is_better_a_fall_is_worse() -> None:
    found = measured()
    half = found.reading("half").value
    found.assert_half_precision(baseline=stored(half=0.5 * half))
    with pytest.raises(AssertionError, match="half-precision share"):
        found.assert_half_precision(baseline=stored(half=1.1 * half))


@pytest.mark.parametrize("host", ["this one", "elsewhere"])
def test_a_baseline_is_for_counts_and_bytes_only(host: str) -> None:
    """Times of another day are no better than those of another machine: 2 of 6 runs of one step failed by them."""
    found = measured()
    there = replace(found.machine, host=host) if host == "elsewhere" else found.machine
    faster = stored(machine=there, step=1.0, busy=1.0, limit=1.0)
    assert found.hold_to_baseline(faster) == []
    assert not [budget for budget in found.budgets if budget.title == "step time"]
    (problem,) = found.hold_to_baseline(stored(machine=there, kernels=30.0, step=1.0))
    assert problem.startswith("kernel count: 40 a step, 30 in baseline")
    for judged in (found.assert_step_time, found.assert_gpu_busy, found.assert_speed_of_light):
        with pytest.raises(CannotJudge, match=r"held to no baseline: .* perf.compare\(old, new\)"):
            judged(baseline=faster)
    assert [q.key for q in QUANTITIES if q.timed] == ["step", "busy", "limit"]


def test_a_bound_that_is_asked_about_twice_is_told_once() -> None:
    found = measured()
    for _ in range(3):
        found.assert_kernel_count(max=100)
    found.assert_kernel_count(max=200)
    found.hold_to_baseline(stored())
    limits = [(b.limit, b.note) for b in found.budgets if b.title == "kernel count"]
    assert limits == [(100, ""), (200, ""), (40, "baseline 'main'")]


def test_operators_of_a_cpu_are_not_held_to_kernels_of_a_gpu() -> None:
    cpu = measured(changed(environment=replace(H200, device="cpu")))
    (problem,) = cpu.hold_to_baseline(stored())
    assert "of a step on cuda, this one ran on cpu" in problem
    with pytest.raises(CannotJudge, match="cannot be compared"):
        cpu.assert_kernel_count(baseline=stored())


def test_measured_and_modelled_traffic_are_not_compared() -> None:
    modelled = replace(stored().entries[0], provenance={**stored().entries[0].provenance, "dram": "modelled"})
    with pytest.raises(CannotJudge, match="cannot be compared"):
        measured().assert_dram_bytes(baseline=replace(stored(), entries=(modelled,)))


def test_a_count_that_is_wanted_exactly_is_one_line() -> None:
    calls = [
        JudgedBudget(title="calls of 'stats'", unit="count", value=1, limit=1, bound=b, passed=True)
        for b in ("max", "min")
    ]
    other = JudgedBudget(title="kernels", unit="count", value=3, limit=8, bound="max", passed=True)
    record = Record(label="", entry=None, budgets=(*calls, other))
    _, *told = (line for line, _ in section.lines([Tested(test="test", outcome="passed", records=(record,))], {}))
    assert told == ["    calls of 'stats': 1, as wanted", "    kernels: 3 of at most 8, 38 % used"]


def test_traffic_that_is_modelled_is_passed_over_where_everything_is_held_to_a_baseline() -> None:
    rows = tuple(
        replace(row, dram_bytes=None, dram_provenance=Provenance.UNAVAILABLE, modelled_bytes=1e9)
        for row in PROFILE.kernels
    )
    modelled = measured(changed(kernels=rows))
    modelled.assert_dram_bytes(max="900 GiB", allow_modelled=True)
    record = Record(label="", entry=modelled.entry, budgets=tuple(modelled.budgets))
    _, told = (line for line, _ in section.lines([Tested(test="test", outcome="passed", records=(record,))], {}))
    assert told.strip().startswith("DRAM traffic (modelled): ")
    assert modelled.hold_to_baseline(stored()) == []  # measured there
    less = replace(modelled.entry, values={**modelled.entry.values, "dram": 1.0})
    assert modelled.hold_to_baseline(replace(stored(), entries=(less,))) == []
    (problem,) = measured().hold_to_baseline(stored(dram=1.0))  # measured here and there
    assert problem.startswith("DRAM traffic")


def test_a_baseline_without_this_test_is_an_error_unless_it_is_being_written() -> None:
    found = measured()
    with pytest.raises(AdvisorError, match="--perf-update"):
        found.assert_kernel_count(baseline=Stored(name="main", machine=found.machine))
    with pytest.raises(AdvisorError, match="measurement 'eval'"):
        measured(label="eval").assert_kernel_count(baseline=stored())
    found.assert_kernel_count(baseline=Stored(name="main", recording=True))
    with pytest.raises(AdvisorError, match="perf_baseline"):
        found.assert_kernel_count(baseline="main")


def test_an_entry_holds_every_known_quantity_with_its_provenance() -> None:
    entry: Any = measured().entry
    assert isinstance(entry, BaselineEntry)
    assert set(entry.values) == set(BY_KEY)
    assert entry.provenance["limit"] == "modelled"
    assert entry.provenance["kernels"] == "measured"
