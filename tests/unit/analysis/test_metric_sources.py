"""No metric without a source: each has a place that sets it, from what collectors in fact record."""

from __future__ import annotations

from dataclasses import fields, replace

import profiles
import pytest

from advisor.analysis import metrics
from advisor.core.loading import LoaderWork, WorkLine
from advisor.core.metrics import BY_NAME, SPECS
from advisor.core.profile import Environment, LayoutBreak, MemoryStats, ModelFacts, Quantity, Spread, StepProfile
from advisor.core.provenance import Provenance
from advisor.loop.observed import Observations
from advisor.loop.records import StepsRecord
from advisor.profiling.after.aggregate import Aggregate
from advisor.profiling.after.assemble import from_steps, from_trace
from advisor.profiling.beside.sampler import SampledRecording, summarise
from advisor.profiling.inside import facts

ROW = profiles.resnet50().kernels[1]


def detailed() -> StepProfile:
    """Convolutions of every kind, counted bytes, a compiled model, a script that has set every flag."""
    base = profiles.resnet50()
    rows = (
        *base.kernels,
        replace(ROW, module="ResNet.dw", dram_bytes=4e9, dram_provenance=Provenance.MEASURED),
        replace(ROW, module="ResNet.grouped", dtype="bf16"),
        replace(ROW, kind="memset", op="aten::empty", dtype="fp64", flops=0.0),
        replace(ROW, kind="average", op="aten::mul_", phase="average", source="train.py:7", flops=0.0),
        replace(ROW, kind="optimizer", op="aten::mul_", phase="optimizer", flops=0.0),
        replace(ROW, kind="upsample", op="aten::upsample_bilinear2d", module="ResNet.up", flops=0.0),
    )
    convs = (
        *base.model.convs,
        profiles.conv("ResNet.dw", 3, (64, 64), groups=64),
        profiles.conv("ResNet.grouped", 3, (66, 66), groups=6),
    )
    names = ("cudnn_benchmark", "cudnn_deterministic", "deterministic_algorithms", "anomaly", "uses_cupy")
    model = replace(base.model, convs=convs, flags=dict.fromkeys(names, False), graph_breaks=0.5, recompiles=0)
    base = replace(base, window_step_us=120_000.0, environment=replace(base.environment, core_count=16))
    breaks = (LayoutBreak(module="ResNet.layer1.0.bn1", module_type="BatchNorm2d", what="BatchNorm2d"),)
    model = replace(model, layout_breaks=breaks, cpu_threads=16, flags={**model.flags, "cudnn_enabled": False})
    model = replace(model, optimizer_own=True)
    epochs = replace(
        base.input, loader="DataLoader", workers=4, iterators=3, loaders=3, epoch_make_us=9e4, epoch_batches=50.0
    )
    line = WorkLine(source="data.py:7", what="RandomHorizontalFlip", kind="flip", time_us=4e4)
    work = LoaderWork(each_us=(9e4, 9e4), samples=90, kinds={"decode": 5e4, "flip": 4e4}, lines=(line,))
    base = replace(base, input=replace(epochs, work=work))
    cured = {"anomaly": True, "deterministic_algorithms": True}
    model = replace(model, flags={**model.flags, **cured}, stack_us=40.0)
    base = replace(base, backward_nodes=200.0)
    memory = replace(base.memory, empty_cache_calls=1.0, growth_bytes=1.0, growth_steady=True, host_growth_bytes=1.0)
    memory = replace(memory, host_free_bytes=10**9, gc_calls=1.0, gc_us=900.0)
    return replace(base, kernels=rows, model=model, memory=memory, utilization={}, optimizer_host_us=500.0)


def sources() -> set[str]:
    """Metrics that the profiles' own fields give, and those that the sampler, the steps and the trace bring along."""
    built = [replace(build(), utilization={}) for build in profiles.ALL.values()]
    cupy = replace(detailed(), model=replace(detailed().model, flags={"uses_cupy": True, "cupy_alone": True}))
    whole = detailed()
    sampled = replace(whole, utilization={"cpu_util_frac": Quantity(value=0.5, provenance=Provenance.MEASURED)})
    teacher = replace(ROW, module="ResNet.dw", phase="backward")
    teaching = replace(
        sampled,
        kernels=(*profiles.resnet50().kernels, teacher),
        model=replace(whole.model, optimizer_own=False, untrained=("ResNet.dw",)),
    )
    laptop = profiles.laptop()
    threads = replace(laptop, model=replace(laptop.model, cpu_threads=2))
    known = {
        name
        for profile in (
            *built,
            whole,
            sampled,
            teaching,
            cupy,
            threads,
            replace(whole, input=replace(whole.input, loader="")),
        )
        for name, metric in metrics(profile)
        if metric.value is not None
    }
    spread = Spread(median=1.0, p10=1.0, p90=1.0, n=3)
    traced = Aggregate(
        steps=1, step_us=1.0, kernels=(ROW,), coverage_frac=1.0, dram_bytes=1.0, cupy_made=1.0, cupy_compiles=0.0
    )
    return {
        *known,
        *summarise(SampledRecording()),
        *from_steps(StepsRecord(kind="", wall_us=spread, first_step_us=2.0)),
        *from_trace(traced, 0.0),
    }


def test_every_metric_has_a_place_that_sets_it() -> None:
    assert {spec.name for spec in SPECS} - sources() == set()


def test_every_metric_says_how_it_is_gathered() -> None:
    assert [spec.name for spec in SPECS if not (spec.section and spec.gathered and spec.doc)] == []


def test_a_value_has_the_provenance_that_its_metric_names() -> None:
    built = [replace(build(), utilization={}) for build in profiles.ALL.values()]
    wrong = {
        (name, metric.provenance.value)
        for profile in (*built, detailed())
        for name, metric in metrics(profile)
        if metric.value is not None and metric.provenance not in BY_NAME[name].provenance
    }
    assert wrong == set()


def test_the_profile_alone_gives_what_the_sampler_does_not() -> None:
    """The flags and counts above are fields that the collectors fill, not names that only this test knows."""
    assert {"graph_breaks", "recompiles"} <= {field.name for field in fields(ModelFacts)}
    assert {"anomaly", "cudnn_deterministic", "deterministic_algorithms", "uses_cupy"} <= set(
        facts.flags_of([], Observations())
    )
    assert "empty_cache_calls" in {field.name for field in fields(MemoryStats)}
    assert "torch_compile" in {field.name for field in fields(Environment)}


@pytest.mark.parametrize(
    ("conv_tf32", "expected"),
    # Of 64,500 us of fp32 products 64,000 are convolutions: at the TF32 rate of 400, or all at the fp32 rate of 50.
    [(True, 800 * 64500 / (64000 * 400 + 500 * 50)), (False, 800 / 50)],
)
def test_half_rate_is_held_against_the_precision_in_use(conv_tf32: bool, expected: float) -> None:
    base = profiles.resnet50()
    profile = replace(base, model=replace(base.model, flags={"tf32_conv": conv_tf32, "tf32_matmul": False}))
    metric = metrics(profile)["half_rate_ratio"]
    assert metric.value == pytest.approx(expected)
    assert metric.provenance is Provenance.MODELLED


def test_half_rate_needs_rates_and_products() -> None:
    base = profiles.resnet50()
    unmeasured = replace(base, environment=replace(base.environment, matrix_tflops={}))
    assert "rates" in metrics(unmeasured)["half_rate_ratio"].reason
    halves = tuple(replace(row, dtype="bf16") for row in base.kernels)
    assert "no product in fp32" in metrics(replace(base, kernels=halves))["half_rate_ratio"].reason


def test_what_was_not_asked_or_counted_is_missing_and_said_so() -> None:
    base = profiles.resnet50()
    table = metrics(replace(base, environment=replace(base.environment, torch_compile=None)))
    assert "not asked" in table["torch_compile_available"].reason
    assert "not counted" in table["empty_cache_calls"].reason
    assert "compiled nothing" in table["graph_breaks"].reason
    counted = replace(base, memory=replace(base.memory, empty_cache_calls=2.0))
    assert metrics(counted)["empty_cache_calls"].value == 2.0
