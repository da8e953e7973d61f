"""What-if predictions against answers worked out by hand, and against Amdahl's bound on random steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import profiles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.analysis import metrics
from advisor.analysis.predict import predict
from advisor.analysis.view import View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.errors import AdvisorError
from advisor.core.findings import Interval
from advisor.core.profile import CopyRow, IdleCause, KernelRow, ModelFacts, ProfilerCost, Site, StepProfile
from advisor.core.transform_table import ROWS

PREDICTED = [name for name, row in ROWS.items() if row.predictor]
BUILDS = profiles.ALL


def gain(profile: StepProfile, transform: str, **parameters: str) -> Interval:
    found = predict(profile, transform, parameters)
    assert found is not None
    assert found.basis
    return found


def between(found: Interval, low: float, high: float) -> None:
    assert found.low == pytest.approx(low, abs=1e-6), found
    assert found.high == pytest.approx(high, abs=1e-6), found


# -- the step model ----------------------------------------------------------------------------------------------------


def test_no_change_leaves_the_step_as_it_is() -> None:
    for build in BUILDS.values():
        profile = build()
        step = Step.of(View.of(profile))
        assert step is not None
        for optimistic in (True, False):
            assert step.after(Saving(), optimistic=optimistic) == pytest.approx(step.step_us)


def test_a_host_bound_step_gains_nothing_from_faster_kernels_at_worst() -> None:
    step = Step.of(View.of(profiles.cifar()))
    assert step is not None
    faster = Saving(device_us=4000.0)
    assert step.after(faster, optimistic=False) == pytest.approx(13600.0)
    # At best the host needs only the idle it caused and its launch calls: 8,209 us and 3,000 us less the tracer's tenth.
    idle = 8600 * 10.5 / 11
    assert step.after(faster, optimistic=True) == pytest.approx(8600 * 0.5 / 11 + idle + 3000 / 1.1)


def test_a_device_bound_step_gains_what_its_kernels_gain() -> None:
    step = Step.of(View.of(profiles.resnet50()))
    assert step is not None
    found = step.gain(Change(worst=Saving(device_us=10000.0), best=Saving(device_us=20000.0), basis="x"))
    between(found, 10000 / 116600, 20000 / 116600)


def test_added_work_is_a_loss() -> None:
    step = Step.of(View.of(profiles.resnet50()))
    assert step is not None
    between(step.gain(Change(worst=Saving(device_us=-1166.0), best=Saving(), basis="x")), -0.01, 0.0)


def test_traced_rows_are_scaled_to_the_untraced_step() -> None:
    base = profiles.resnet50()
    slow = replace(base, kernels=tuple(replace(row, time_us=2 * row.time_us) for row in base.kernels), busy_us=226000.0)
    step = Step.of(View.of(slow))
    assert step is not None
    assert step.scale == pytest.approx(116600 / 226000)
    assert gain(slow, "channels_last").high <= 1.0


# -- single transforms, by hand ------------------------------------------------------------------------------------------


def test_loader_workers_share_one_workers_time() -> None:
    # Two starved workers make a batch in 100,000 us of one; 16 cores at best, 8 at worst: 6,250 and 12,500 us a batch.
    between(gain(profiles.starved(), "loader_workers"), 0.75, 0.76)
    between(gain(profiles.starved(), "loader_workers", workers="4"), 0.0, 0.5)
    without = replace(profiles.starved(), input=replace(profiles.starved().input, workers=0))
    # All of the loading is seen then: 38,500 us for one worker, hidden by two already up to the other 12,000 us.
    between(gain(without, "loader_workers", workers="2"), (50000 - 38500) / 50000, (50000 - 38500 / 2) / 50000)


def loading_itself(base: StepProfile) -> StepProfile:
    """The training thread makes its batches: what is saved elsewhere is not waited for instead."""
    return replace(base, input=replace(base.input, workers=0))


def test_behind_starving_workers_other_changes_may_gain_nothing() -> None:
    """A ResNet-18 on an H200 behind two workers: graphs, predicted to save 6.5 to 64 %, saved 5.7."""
    base = profiles.starved()
    assert gain(loading_itself(base), "tf32").low > 0.09
    for transform in ("tf32", "prefetch"):
        assert gain(base, transform).low == 0.0
        assert gain(base, transform).high == gain(loading_itself(base), transform).high > 0.0
    assert gain(base, "loader_workers").low > 0.7
    # Batches that are there, and take their time from one process to the other: a detector's on an H200, 6 ms of 110.
    there = replace(base, input=replace(base.input, late_us=100.0))
    assert gain(there, "tf32").low > 0.09
    assert gain(there, "loader_workers").high == pytest.approx(100 / 50_000)
    idle = tuple(
        IdleCause(cause=row.cause, time_us=2000.0 if row.cause == "data" else row.time_us) for row in base.idle
    )
    seldom = replace(
        base, idle=idle, step_us=replace(base.step_us, median=12_500.0), input=replace(base.input, next_us=500.0)
    )
    assert gain(seldom, "tf32").low > 0.3  # a wait now and then is no starvation


def test_prefetch_hides_copies_that_run_alone() -> None:
    base = loading_itself(profiles.starved())
    between(gain(base, "prefetch"), 0.015, 0.03)  # half of the copies at worst
    pageable = replace(base, copies=(replace(base.copies[0], pageable=True),))
    between(gain(pageable, "prefetch"), 0.0, 0.03)
    changed = replace(base, input=replace(base.input, moved_unchanged=False))
    between(gain(changed, "prefetch"), 0.0, 0.0)


def test_uint8_batches_take_waits_for_data_and_three_quarters_of_the_copies() -> None:
    base = profiles.starved()
    between(gain(base, "uint8_batches"), 0.0, (38000 + 0.75 * 1500) / 50000)
    assert "30.0 ms a step with 2 workers" in gain(base, "uint8_batches").basis
    for changes in ({"normalise": ""}, {"moved_unchanged": False}, {"workers": 0}, {"batch_dtype": "uint8"}):
        between(gain(replace(base, input=replace(base.input, **changes)), "uint8_batches"), 0.0, 0.0)


def test_tf32_at_the_measured_rate() -> None:
    # 10,000 us become 250/0.9 us at best and 250/0.35 + 500 us at worst; then the host is the limit.
    waits = 38000 + 1500
    best = waits + 500 + 1500 / 1.1
    worst = waits + 300 * 19.0
    between(gain(loading_itself(profiles.starved()), "tf32"), 1 - worst / 50000, 1 - best / 50000)
    assert gain(profiles.cifar(), "tf32").basis == "no convolution or product computes in strict fp32"


def test_depthwise_convolutions_gain_no_tensor_cores() -> None:
    base = profiles.starved()  # its convolutions compute in strict fp32
    convs = {row.module for row in base.kernels if row.kind == "conv" and row.module}
    facts = tuple(profiles.conv(module, 3, (64, 64), groups=64) for module in convs)
    assert facts
    depthwise = replace(base, model=replace(base.model, convs=facts))
    assert gain(base, "tf32").high > 0.0
    between(gain(depthwise, "tf32"), 0.0, 0.0)
    assert gain(depthwise, "amp_bf16").low <= gain(base, "amp_bf16").low


def test_cuda_graphs_remove_launch_gaps() -> None:
    found = gain(profiles.cifar(), "cuda_graphs")
    gaps, sync, copy = 8100 * 9.0 / 10.5, 8100 * 1.5 / 10.5, 500.0
    # 134 of 174 kernels are the model's; issuing one takes the host 9.3 us at least, replaying it 2: half of that, with the host in the way.
    worst = copy + 5000 + gaps - 134 * (9.3 - 2.0) / 2 + sync
    # The traced steps were idle for 2.4 ms more, of which kernels that vary explain 5 %.
    between(found, 1 - worst / 13600, (gaps + sync + 0.05 * 5000) / 13600)
    assert gain(profiles.starved(), "cuda_graphs").high < 0.02
    moving = replace(profiles.cifar(), model=replace(profiles.cifar().model, fixed_shapes=False))
    between(gain(moving, "cuda_graphs"), 0.0, 0.0)


def test_graphs_leave_what_the_device_takes_from_kernel_to_kernel() -> None:
    """ConvNeXt-T in bf16 on one H200: 2.62 ms idle in 38.5 ms at 642 kernels, of which graphs saved 0.6 to 1.2 ms."""
    rows = [
        profiles.row(name="conv", kind="conv", op="aten::convolution", module="Net.conv", phase="forward",
                     calls=610, time_us=34500, dtype="bf16", modelled_bytes=1e9),
        profiles.row(name="adam", kind="optimizer", op="aten::_foreach_add_", phase="optimizer",
                     calls=32, time_us=1380, modelled_bytes=1e8),
    ]  # fmt: skip
    profile = profiles.profile(
        rows, step_us=38500, environment=profiles.H200, busy_us=35880, launches=642, launch_us=642 * 4.0,
        idle=(IdleCause(cause="launch", time_us=2620.0),), model=ModelFacts(fixed_shapes=True),
    )  # fmt: skip
    found = gain(profile, "cuda_graphs")
    assert found.low == 0.0
    assert found.high > 0.032  # what it saved, at most


def test_gaps_that_clocks_may_explain_promise_nothing() -> None:
    """VGG-16 in bf16 on an H200: 24.2 ms a step, 22.4 of them in traced kernels, whose clock is higher; graphs saved nothing."""
    rows = [
        profiles.row(name="conv", kind="conv", op="aten::convolution", module="Net.conv", phase="forward",
                     calls=184, time_us=22372, dtype="bf16", modelled_bytes=1e9),
    ]  # fmt: skip

    def predicted(step_us: float) -> Interval:
        profile = profiles.profile(
            rows, step_us=step_us, environment=profiles.H200, busy_us=22372, launches=178, launch_us=178 * 4.0,
            idle=(IdleCause(cause="launch", time_us=1364.0),), model=ModelFacts(fixed_shapes=True),
        )  # fmt: skip
        return gain(profile, "cuda_graphs")

    assert predicted(23400).low == 0.0
    assert predicted(23400).high == pytest.approx(1364 / 23400)  # as in the traced steps
    assert predicted(26000).low > 0.01  # as much as that they do not


def test_graphs_may_save_what_the_traced_steps_were_idle_for() -> None:
    """UNet in fp32 on an H200: 1.3 ms of a step were not of kernels, 3.4 of the traced ones; graphs saved 2.6 % or more behind bf16."""
    rows = [
        profiles.row(name="conv", kind="conv", op="aten::convolution", module="Net.conv", phase="forward",
                     calls=410, time_us=86850, dtype="fp32", modelled_bytes=1e9),
    ]  # fmt: skip
    profile = profiles.profile(
        rows, step_us=88128, environment=profiles.H200, busy_us=86850, launches=420, launch_us=2847,
        idle=tuple(IdleCause(cause=cause, time_us=us) for cause, us in (("copy", 614.0), ("sync", 2125.0), ("other", 676.0))),
        model=ModelFacts(fixed_shapes=True),
    )  # fmt: skip
    assert gain(profile, "cuda_graphs").high == pytest.approx((2125 + 676) / 88128)


def test_norms_over_a_growing_concatenation_gain_what_the_bundled_kernels_do() -> None:
    """DenseNet-121 on one H200: fused_bn_act had failed, and fused_bn_concat saved 20 % with concatenations at 9 %."""
    layer, norm = "Net.block.layer1", "Net.block.layer1.norm1"
    rows = [
        profiles.row(name="CatArrayBatchedCopy", kind="concat", op="aten::cat", module=layer, module_type="_DenseLayer",
                     phase="forward", time_us=3000, modelled_bytes=4e9),
        profiles.row(name="bn_fw", kind="norm", op="aten::cudnn_batch_norm", module=norm, module_type="BatchNorm2d",
                     phase="forward", time_us=6000, modelled_bytes=8e9),
        profiles.row(name="conv", kind="conv", op="aten::convolution", module=layer + ".conv1", phase="forward",
                     time_us=20000, flops=1e12, modelled_bytes=1e9),
    ]  # fmt: skip
    base = profiles.profile(rows, step_us=30000, environment=profiles.H200, busy_us=29000)
    found = gain(base, "fused_bn_concat")
    # 8 GB in 1.5 passes, at 92 % of 4 TB/s.
    assert found.high == pytest.approx((3000 + 6000 - 8e9 * 1.5 / 4e6 / 0.92) / 30000, rel=0.01)
    assert found.low == 0.0
    elsewhere = replace(rows[1], module="Net.stem.norm0")
    assert gain(profiles.with_rows(base, rows[0], elsewhere, rows[2]), "fused_bn_concat").high == pytest.approx(
        0.1, rel=0.01
    )
    between(gain(profiles.with_rows(base, *rows[1:]), "fused_bn_concat"), 0.0, 0.0)


def test_on_a_cpu_compiled_loops_are_not_bound_by_memory() -> None:
    """A CIFAR ResNet of width 8 on 2 cores: these operators were 20 % of its step, and compiling saved 18 to 22 %."""
    base = profiles.laptop()
    touched = sum(row.time_us for row in base.kernels if row.kind in ("norm", "activation"))
    assert gain(base, "compile").high == pytest.approx(touched / 150000)


def test_defer_sync_only_where_scalars_are_read() -> None:
    between(gain(profiles.resnet50(), "defer_sync"), 900 / 116600, 3600 / 116600)
    other = Site(source="", what="cudaDeviceSynchronize", calls=1.0, time_us=90000.0)
    between(gain(replace(profiles.resnet50(), syncs=(other,)), "defer_sync"), 0.0, 0.0)


def test_fused_optimizer_keeps_five_passes_of_sgd() -> None:
    left = 25_557_032 * 4 * 5 / 4e6 / 0.9
    found = gain(profiles.resnet50(), "fused_optimizer")
    between(found, 0.0, (900 - left + 10 * 9.3) / 116600)
    # Host time is bounded by what was measured in the optimizer's step, where the trace tells it.
    base = profiles.resnet50()
    measured = 50.0 * (1 + max(0.0, base.cost.overhead_frac))
    found = gain(replace(base, optimizer_host_us=measured), "fused_optimizer")
    between(found, 0.0, (900 - left + 50) / 116600)
    assert "50 µs of host time" in found.basis
    facts = profiles.resnet50().model
    between(gain(replace(profiles.resnet50(), model=replace(facts, optimizer_fused=True)), "fused_optimizer"), 0.0, 0.0)
    rms = gain(replace(profiles.resnet50(), model=replace(facts, optimizers=("RMSprop",))), "fused_optimizer")
    assert (rms.high, rms.basis) == (0.0, "torch has no fused RMSprop")


@pytest.mark.parametrize(
    ("calls", "low", "high"),
    # 40 calls of 2.5 ms, or 1,000 of 0.1 ms, that a processor with units for bf16 multiplies three times as fast.
    [(20, -0.04, 0.5), (500, -0.8, 0.13)],
    ids=["long calls", "short calls"],
)
def test_on_a_cpu_short_calls_gain_nothing_from_bf16_and_pay_for_its_casts(calls: int, low: float, high: float) -> None:
    base = profiles.laptop()
    rates = {**base.environment.matrix_tflops, "bf16": 3 * base.environment.matrix_tflops["fp32"]}
    rows = (replace(row, calls=calls) if row.kind == "conv" else row for row in base.kernels)
    quick = profiles.with_rows(replace(base, environment=replace(base.environment, matrix_tflops=rates)), *rows)
    found = gain(quick, "amp_bf16")
    assert low < found.low < low / 2
    assert high * 0.6 < found.high < high * 1.2


def test_set_to_none_removes_the_zeroing() -> None:
    base = profiles.resnet50()
    zero = replace(
        base.kernels[-1], name="fill", op="aten::_foreach_zero_", phase="other", kind="memset", time_us=300.0
    )
    tested = replace(base, kernels=(*base.kernels, zero), busy_us=113300.0)
    between(gain(tested, "set_to_none"), 0.0, 0.0)
    zeroed = replace(tested, model=replace(base.model, zero_grad_to_none=False))
    found = gain(zeroed, "set_to_none")
    assert found.low == pytest.approx(300 / 116600)
    assert found.high > found.low
    # The script's own loop over gradients does the same; where nothing zeroes those that stay, nothing is told of it.
    by_hand = replace(tested, model=replace(base.model, gradients_stay=True))
    assert gain(by_hand, "set_to_none") == found
    assert metrics(by_hand)["zero_grad_to_none"].value is False
    assert metrics(replace(base, model=by_hand.model))["zero_grad_to_none"].value is True
    # Where a backward keeps its graph, gradients are added to the zeros into new tensors.
    added = replace(base.kernels[-1], name="add", op="aten::add", phase="backward", kind="elementwise", time_us=50.0)
    kept = replace(zeroed, kernels=(*zeroed.kernels, added))
    graphs = replace(kept, model=replace(kept.model, create_graph=True))
    assert gain(graphs, "set_to_none").high > gain(kept, "set_to_none").high + 30 / 116600


def test_conv_bias_counts_forward_surely_and_backward_at_best() -> None:
    base = profiles.resnet50()
    fact = profiles.conv("ResNet.layer1.0.conv2", 3, (64, 64), bias=True, followed_by_bn=True)
    add = replace(base.kernels[1], kind="elementwise", op="aten::add_", name="add", time_us=400.0, calls=0.0)
    reduce = replace(add, kind="reduce", op="aten::sum", phase="backward", time_us=600.0)
    tested = replace(
        base, kernels=(*base.kernels, add, reduce), busy_us=114000.0, model=replace(base.model, convs=(fact,))
    )
    # The parameter that is left out costs the host 19 us a step at best, of which this step shows what it waits for.
    between(gain(tested, "conv_bias"), 400 / 116600, (1000 + 19) / 116600)
    hosted = replace(tested, kernels=(*base.kernels, replace(add, calls=53.0), replace(reduce, calls=53.0)))
    assert gain(hosted, "conv_bias").high > gain(tested, "conv_bias").high + 500 / 116600, "106 launches less"
    plain = replace(tested, model=replace(base.model, convs=(replace(fact, followed_by_bn=False),)))
    between(gain(plain, "conv_bias"), 0.0, 0.0)


def test_fused_batch_norm_moves_its_passes() -> None:
    base = profiles.resnet50()
    nhwc = replace(base, model=replace(base.model, channels_last=True))
    # Forward 22 GB become 33, backward 33 become 55, the add's 8 become 8/3, the activations' none: at 4 TB/s and 92 %.
    moved = (22000 * 1.5 + 33000 * 5 / 3 + 8000 / 3) / 4.0
    found = gain(nhwc, "fused_bn_act")
    assert found.high == pytest.approx((35000 - moved / 0.92 + 65 * 9.3) / 116600, abs=6e-3)
    assert found.high >= (35000 - moved / 0.92) / 116600
    assert found.low == pytest.approx((35000 - moved / 0.44) / 116600, abs=1e-6)
    assert gain(base, "fused_bn_act").low == 0.0  # its kernels need channels_last


def test_half_precision_in_nchw_promises_less_than_in_nhwc() -> None:
    base = profiles.resnet50()
    nhwc = replace(base, model=replace(base.model, channels_last=True))
    for transform in ("amp_bf16", "amp_fp16"):
        plain, better = gain(base, transform), gain(nhwc, transform)
        assert 0 < plain.low < better.low
        assert plain.high < better.high
    # ResNet-50 fp32 to bf16 on one H200: 116.6 to 106.1 ms in NCHW.
    found = gain(base, "amp_bf16")
    assert found.low <= 0.09 <= found.high


def test_half_precision_may_lose_on_depthwise_nets_in_nchw() -> None:
    base = profiles.resnet50()
    fact = profiles.conv("ResNet.layer1.0.conv2", 3, (64, 64), groups=64)
    depthwise = replace(base, model=replace(base.model, convs=(fact,)))
    assert gain(depthwise, "amp_bf16").low < gain(base, "amp_bf16").low - 0.1


@pytest.mark.parametrize("transform", ["amp_bf16", "channels_last", "fused_bn_act"])
def test_what_runs_without_gradients_is_no_part_of_what_changes_of_the_model_save(transform: str) -> None:
    """The same ResNet twice, once as a teacher."""
    base = profiles.resnet50()
    teacher = tuple(
        replace(row, module=row.module.replace("ResNet", "Teacher", 1)) for row in base.kernels if row.module
    )
    assert teacher
    assert base.step_us is not None
    longer = sum(row.time_us for row in teacher)
    both = replace(
        base,
        kernels=(*base.kernels, *teacher),
        busy_us=base.busy_us + longer,
        step_us=profiles.spread(base.step_us.median + longer),
    )
    unaware = gain(both, transform)
    aware = gain(replace(both, model=replace(both.model, guides=("Teacher",))), transform)
    share = base.step_us.median / (base.step_us.median + longer)
    assert aware.high == pytest.approx(gain(base, transform).high * share, rel=0.1)
    assert aware.high < unaware.high


def test_half_precision_of_a_teacher_saves_of_the_teachers_part_alone() -> None:
    base = profiles.resnet50()
    between(gain(base, "guides_bf16"), 0.0, 0.0)
    taught = replace(base, model=replace(base.model, guides=("ResNet",), autocast="bf16"))
    found = gain(taught, "guides_bf16")
    products = sum(row.time_us for row in base.kernels if row.kind in ("conv", "gemm"))
    assert base.step_us is not None
    assert 0.3 < found.high < products / base.step_us.median + 0.2
    assert found.low >= 0.0
    # ResNet-50 fp32 to bf16 in NHWC with norms as they are, on one H200: 116.6 to about 58 ms, forward and backward.
    assert found.low < 0.5 < found.high


def test_flags_of_the_process_reach_what_runs_without_gradients() -> None:
    base = profiles.starved()
    assert gain(replace(base, model=replace(base.model, guides=("ResNet",))), "tf32") == gain(base, "tf32")


def test_half_precision_where_it_is_already_or_makes_no_sense() -> None:
    base = profiles.resnet50()
    assert "already" in gain(replace(base, model=replace(base.model, autocast="bf16")), "amp_bf16").basis
    # This laptop computes bf16 at half of fp32's rate: its products would take twice as long.
    found = gain(profiles.laptop(), "amp_bf16")
    assert found.low == pytest.approx(-100000 / 150000, abs=0.01)


def test_channels_last_removes_conversions_and_may_lose_on_grouped_convolutions() -> None:
    base = profiles.resnet50()
    found = gain(base, "channels_last")
    layout = sum(row.time_us for row in base.kernels if row.kind == "layout")
    assert 0.0 < found.low < layout / 116600  # the conversions go, the convolutions get no slower
    assert 8000 / 116600 < found.high < 0.6
    # ResNet-50 fp32 on one H200: 116.6 to 81.4 ms.
    assert found.low <= 0.30 <= found.high
    grouped = profiles.conv("ResNet.layer1.0.conv2", 3, (64, 64), groups=8)
    assert gain(replace(base, model=replace(base.model, convs=(grouped,))), "channels_last").low < -0.5
    images = replace(base, model=replace(base.model, channels_last=True))
    between(gain(images, "channels_last"), 0.0, layout / 116600)  # weights are converted still
    done = replace(base, model=replace(base.model, channels_last=True, weights_channels_last=True))
    between(gain(done, "channels_last"), 0.0, 0.0)


def test_channels_last_on_a_cpu_is_a_share_of_convolution_and_batch_norm_time() -> None:
    between(gain(profiles.laptop(), "channels_last"), (-10000 - 3750) / 150000, (40000 + 5250) / 150000)


def on_a_cpu(**fields: Any) -> KernelRow:
    return profiles.row(profiles.LAPTOP, **{"phase": "forward", "name": fields["op"], **fields})


def test_on_a_cpu_pools_and_upsampling_gain_by_channels_last_and_other_norms_lose() -> None:
    """A UNet of width 8 on 2 cores: convolutions were 13 % of its step, channels_last saved 27 to 51 % of it."""
    base = profiles.laptop()
    conv = on_a_cpu(kind="conv", op="aten::mkldnn_convolution", module="Net.conv1", time_us=20000)
    pool = on_a_cpu(kind="pool", op="aten::max_pool2d_with_indices", time_us=30000)
    up = on_a_cpu(kind="upsample", op="aten::upsample_bilinear2d_backward", time_us=90000)
    found = gain(profiles.with_rows(base, conv, pool, up), "channels_last")
    between(found, (-2000 + 18000 + 40500) / 150000, (8000 + 24000 + 72000) / 150000)
    assert "2 operators that take 80 % of the step pool" in found.basis
    alone = gain(profiles.with_rows(base, conv), "channels_last").low
    globally = on_a_cpu(kind="pool", op="aten::_adaptive_avg_pool2d", time_us=30000)
    assert gain(profiles.with_rows(base, conv, globally), "channels_last").low == alone
    norm = on_a_cpu(kind="norm", op="aten::native_batch_norm", time_us=10000, shapes="[[64, 8, 32, 32], [8]]")
    wide = replace(norm, shapes="[[64, 64, 32, 32], [64]]")
    groups = on_a_cpu(kind="norm", op="aten::native_group_norm", module_type="GroupNorm", time_us=10000)
    losses = [alone - gain(profiles.with_rows(base, conv, row), "channels_last").low for row in (wide, norm, groups)]
    assert losses == pytest.approx([2500 / 150000, 15000 / 150000, 40000 / 150000])


def test_compile_may_lose() -> None:
    assert gain(profiles.cifar(), "compile").low < 0
    busy = sum(row.time_us for row in profiles.resnet50().kernels)
    assert gain(profiles.resnet50(), "compile").low == pytest.approx(-0.1 * busy / 116600, rel=0.01)
    assert gain(profiles.cifar(), "compile_max_autotune").high > gain(profiles.cifar(), "compile").high


def test_kernel_families_go_from_nothing_to_the_bandwidth() -> None:
    base = profiles.resnet50()
    found = gain(base, "fused_pooling")
    assert found.low == 0.0
    pools = [row for row in base.kernels if row.kind == "pool"]
    limit = sum(row.modelled_bytes for row in pools) / base.environment.copy_gbps / 1e3 / 0.92
    assert 0 < found.high <= (sum(row.time_us for row in pools) - limit) / 116600 + 0.05
    assert gain(base, "fused_layer_norm").basis == "no layer normalisation in the step"
    block = replace(
        base.kernels[0], kind="elementwise", module="Net.se", module_type="SqueezeExcitation", op="aten::mul"
    )
    inner = replace(block, module="Net.se.fc1", module_type="Conv2d")
    assert gain(replace(base, kernels=(*base.kernels, block, inner)), "fused_squeeze_excite").high > 0


def cast(shape: str, phase: str, nbytes: float, **fields: object) -> KernelRow:
    name = "at::native::bfloat16_copy_kernel_cuda"
    return profiles.row(
        name=name, kind="copy", op="aten::_to_copy", phase=phase, shapes=shape, modelled_bytes=nbytes, **fields
    )


def test_casts_of_weights_keep_their_bytes() -> None:
    base = profiles.resnet50()
    assert gain(base, "fused_casts").basis == "no weight is cast by itself"
    weight = cast("[[512, 64, 3, 3], []]", "forward", 1.8e6, time_us=500.0, calls=50.0)
    gradient = cast("[[512, 64, 3, 3], []]", "backward", 1.8e6, time_us=700.0, calls=50.0)
    model = replace(base.model, batch_size=256)
    step = replace(base, model=model, kernels=(*base.kernels, weight, gradient))
    alone = Step.of(View.of(step))
    assert alone is not None
    found = gain(step, "fused_casts")
    least = 2 * 1.8e6 / 4000e3
    # 100 launches become one or two, at 9.3 us of the host's time each.
    worst = Saving(device_us=1200.0 - least / 0.7)
    best = Saving(device_us=1200.0 - least, host_us=100 * (1 - 1 / 128) * 9.3)
    expected = alone.gain(Change(worst=worst, best=best, basis="x"))
    between(found, expected.low, expected.high)
    assert expected.low > 0
    # In a replayed graph they are nodes, of 2 us each, though the traced steps launch them.
    nodes = replace(best, host_us=100 * (1 - 1 / 128) * 2.0)
    expected = alone.gain(Change(worst=worst, best=nodes, basis="x"))
    replayed = replace(
        base, model=replace(model, graphed=True), kernels=(*base.kernels, replace(weight, module="Net"), gradient)
    )
    between(gain(replayed, "fused_casts"), expected.low, expected.high)
    slow = replace(step, kernels=(*base.kernels, replace(weight, modelled_bytes=1e10)))  # at its limit already
    assert gain(slow, "fused_casts").low == 0.0
    activation = cast("[[256, 64, 3, 3], []]", "forward", 1.8e6, time_us=500.0, calls=50.0)
    between(gain(replace(step, kernels=(*base.kernels, activation)), "fused_casts"), 0.0, 0.0)
    between(gain(replace(step, model=replace(model, compiled=True)), "fused_casts"), 0.0, 0.0)


def test_what_transposes_for_grouped_convolutions_goes_with_them() -> None:
    """RegNetY in bf16 NHWC on one H200: 13 % of the step predicted without it, 65 % measured, squeeze-and-excite with it."""
    base = profiles.resnet50()
    grouped, dense = "[[256, 216, 28, 28], [216, 24, 3, 3], []]", "[[256, 216, 28, 28], [576, 216, 1, 1], []]"

    def launched(kind: str, shapes: str) -> KernelRow:
        fields = {"op": "aten::convolution", "module": "RegNet", "phase": "forward", "calls": 10.0, "dtype": "bf16"}
        return profiles.row(name=kind, kind=kind, shapes=shapes, time_us=20_000.0, modelled_bytes=1e9, **fields)

    def step(*rows: KernelRow, nhwc: bool = True) -> StepProfile:
        model = replace(base.model, convs=(), channels_last=nhwc)
        return profiles.profile((*base.kernels, *rows), step_us=170_000.0, model=model)

    conv, transposes = launched("conv", grouped), launched("layout", grouped)
    alone, both = (gain(step(*rows), "grouped_conv") for rows in ((conv,), (conv, transposes)))
    assert alone.low == both.low == 0.0
    assert both.high > alone.high + 0.1
    assert "slice and transpose" in both.basis
    other = gain(step(conv, launched("layout", dense)), "grouped_conv")  # for another convolution: stays
    assert "transpose" not in other.basis
    assert "transpose" not in gain(step(conv, transposes, nhwc=False), "grouped_conv").basis  # channels_last's


def test_of_short_strided_convolutions_two_fifths_go_at_best() -> None:
    """A ResNet-18's first shortcut at 128x32x32 in bf16, as it took on an H200."""
    x, y, weight = [128, 64, 32, 32], [128, 128, 16, 16], [128, 64, 1, 1]
    rows = tuple(
        profiles.row(
            name=op, kind="conv", op=op, module="Net", dtype="bf16", phase=phase, calls=1.0, time_us=time_us,
            modelled_bytes=12.6e6, flops=0.54e9, shapes=json.dumps(shapes),
        )
        for op, phase, time_us, shapes in (
            ("aten::convolution", "forward", 8.0, [x, weight, []]),
            ("aten::convolution_backward", "backward", 31.0, [y, x, weight]),
        )
    )  # fmt: skip
    facts = ModelFacts(convs=(profiles.conv("Net.shortcut", 1, (64, 128), stride=2),))
    step = profiles.profile(rows, step_us=39.0, model=facts)
    between(gain(step, "strided_conv"), 0.0, 0.4)
    unit = ModelFacts(convs=(profiles.conv("Net.shortcut", 1, (64, 128)),))
    assert "no 1x1 convolutions of stride 2" in gain(replace(step, model=unit), "strided_conv").basis


def test_of_narrow_convolutions_half_goes_at_best() -> None:
    """256x56x56 in bf16, as they took on an H200."""

    def launched(name: str, channels: int = 64) -> KernelRow:
        image, weight = [256, channels, 56, 56], [channels, channels, 3, 3]
        shapes, op = [image, weight, []], "aten::convolution"
        if name != "fprop":
            shapes, op = [image, image, weight], "aten::convolution_backward"
        return profiles.row(
            name=name, kind="conv", op=op, module="Net", dtype="bf16", calls=40.0, time_us=5000.0,
            modelled_bytes=40 * 206e6 / 4, flops=40 * 59e9, shapes=json.dumps(shapes),
        )  # fmt: skip

    narrow = [launched(name) for name in ("fprop", "dgrad", "wgrad")]
    of_128 = [launched(name, 128) for name in ("fprop", "dgrad", "wgrad")]
    facts = ModelFacts(convs=tuple(profiles.conv(f"Net.c{c}", 3, (c, c)) for c in (64, 128, 256)))
    wide = launched("wgrad", 256)
    step = profiles.profile((*narrow, *of_128, wide), step_us=35_000.0, model=facts)
    between(gain(step, "conv3x3"), 0.0, 0.5 * 4 * 5000 / 35_000)
    assert "160 kernels" in gain(step, "conv3x3").basis  # of 128 channels the weight's gradient alone
    near = replace(narrow[0], modelled_bytes=0.8 * 0.92 * 5000 * 4e6)  # 80 % of what memory allows
    between(
        gain(replace(step, kernels=(near, *narrow[1:], *of_128, wide)), "conv3x3"), 0.0, (0.2 + 1.5) * 5000 / 35_000
    )
    assert "no 3x3 convolutions" in gain(replace(step, kernels=(*of_128[:2], wide)), "conv3x3").basis


def test_a_second_stream_saves_microseconds_a_weight_gradient() -> None:
    base = profiles.resnet50()
    others = tuple(row for row in base.kernels if row.phase == "forward")
    assert "no library's kernel" in gain(replace(base, kernels=others), "gradient_stream").basis
    gradients = profiles.row(
        name="wgrad", kind="conv", op="aten::convolution_backward", phase="backward", calls=40.0, time_us=1000.0
    )
    step = replace(base, kernels=(*others, gradients))
    alone = Step.of(View.of(step))
    assert alone is not None
    expected = alone.gain(Change(worst=Saving(device_us=-0.02 * 1000.0), best=Saving(device_us=20 * 8.0), basis="x"))
    between(gain(step, "gradient_stream"), expected.low, expected.high)
    short = replace(step, kernels=(*others, replace(gradients, time_us=200.0)))  # no more than the weights' half
    assert gain(short, "gradient_stream").high < expected.high
    own = replace(step, kernels=(*others, replace(gradients, name="grouped_backward_data")))
    between(gain(own, "gradient_stream"), 0.0, 0.0)


def test_passing_by_data_parallel_saves_its_walk_where_the_host_is_the_limit() -> None:
    small, large = profiles.cifar(), profiles.resnet50()
    assert gain(small, "single_device").high == pytest.approx(3 * 260.0 / small.step_us.median)
    assert gain(small, "single_device").low == 0.0
    assert "no model is wrapped" in gain(large, "single_device").basis


def test_benchmark_is_capped_and_needs_fixed_shapes() -> None:
    between(gain(profiles.resnet50(), "cudnn_benchmark"), -0.05, 0.15)
    model = profiles.resnet50().model
    for other in (replace(model, fixed_shapes=False), replace(model, flags={"cudnn_benchmark": True})):
        between(gain(replace(profiles.resnet50(), model=other), "cudnn_benchmark"), 0.0, 0.0)


def test_a_choice_for_each_convolution_costs_the_host_and_needs_fixed_shapes() -> None:
    assert gain(profiles.resnet50(), "conv_choice").high > 0.0
    model = replace(profiles.resnet50().model, fixed_shapes=False)
    between(gain(replace(profiles.resnet50(), model=model), "conv_choice"), 0.0, 0.0)


def test_what_cannot_be_told_is_none() -> None:
    base = profiles.resnet50()
    with pytest.raises(AdvisorError, match="no transform 'no_such_transform'"):
        predict(base, "no_such_transform", {})
    assert predict(replace(base, step_us=None, wall_us=None), "amp_bf16", {}) is None
    assert predict(replace(base, kernels=()), "amp_bf16", {}) is None
    unknown = replace(base, environment=replace(base.environment, matrix_tflops={}))
    assert predict(unknown, "amp_bf16", {}) is None


@pytest.mark.parametrize("transform", PREDICTED)
@pytest.mark.parametrize("name", BUILDS)
def test_every_transform_of_the_registry_has_a_prediction(name: str, transform: str) -> None:
    found = gain(BUILDS[name](), transform)
    assert found.low <= found.high < 1.0


# -- Amdahl's bound --------------------------------------------------------------------------------------------------------

_MATRIX, _OPTIMIZER = ("conv", "gemm"), "optimizer"
_NOT_OPTIMIZER: Callable[[KernelRow], bool] = lambda row: row.phase != _OPTIMIZER  # noqa: E731 – as short as what it stands for
# What a transform touches: rows, and causes of idle. Nothing else can become shorter by it.
TOUCHES: dict[str, tuple[Callable[[KernelRow], bool], tuple[str, ...]]] = {
    "amp_bf16": (_NOT_OPTIMIZER, ()),
    "amp_fp16": (_NOT_OPTIMIZER, ()),
    "tf32": (lambda row: row.kind in _MATRIX, ()),
    "channels_last": (
        lambda row: row.kind in ("conv", "layout", "norm", "upsample", "pool", "elementwise", "reduce"),
        (),
    ),
    "cudnn_benchmark": (lambda row: row.kind == "conv", ()),
    "conv_choice": (lambda row: row.kind == "conv", ("launch", "other")),
    "conv_choice_precision": (lambda row: row.kind == "conv", ("launch", "other")),
    "fused_optimizer": (lambda row: row.phase == _OPTIMIZER, ("launch", "other")),
    "fused_casts": (lambda row: row.op == "aten::_to_copy", ("launch", "other")),
    "set_to_none": (lambda row: row.op in ("aten::zero_", "aten::add_"), ("launch", "other")),
    "conv_bias": (lambda row: row.kind in ("conv", "elementwise", "reduce"), ("launch", "other")),
    "prefetch": (lambda row: False, ("copy",)),
    "loader_workers": (lambda row: False, ("data",)),
    "uint8_batches": (lambda row: False, ("data", "copy")),
    "defer_sync": (lambda row: False, ("sync", "launch", "other")),
    "fused_bn_act": (lambda row: row.kind in ("norm", "activation", "elementwise"), ("launch", "other")),
    "fused_bn_concat": (
        lambda row: row.kind in ("concat", "elementwise", "norm", "activation"),
        ("launch", "other"),
    ),
    "fused_bn_max_pool": (lambda row: row.kind == "pool", ("launch", "other")),
    "fused_pooling": (lambda row: row.kind == "pool", ("launch", "other")),
    "fused_upsample": (lambda row: row.kind in ("upsample", "concat"), ("launch", "other")),
    "few_channels_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "fused_prelu": (lambda row: "prelu" in row.op, ("launch", "other")),
    "fused_bias_add": (lambda row: row.kind in ("conv", "elementwise", "reduce"), ("launch", "other")),
    "fused_padding": (lambda row: row.op.startswith("aten::reflection_pad"), ("launch", "other")),
    "fused_volume_pooling": (lambda row: row.kind == "pool", ("launch", "other")),
    "fused_layer_norm": (lambda row: row.kind == "norm", ("launch", "other")),
    "fused_group_norm": (lambda row: row.kind == "norm", ("launch", "other")),
    "fused_squeeze_excite": (lambda row: bool(row.module), ("launch", "other")),
    "fused_bias_act": (lambda row: row.kind in ("activation", "elementwise"), ("launch", "other")),
    "large_depthwise_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "exact_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "fft_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "depthwise_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "first_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "grouped_conv": (lambda row: row.kind in ("conv", "layout"), ("launch", "other")),
    "conv3x3": (lambda row: row.kind == "conv", ("launch", "other")),
    "winograd_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "pointwise_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "strided_conv": (lambda row: row.kind == "conv", ("launch", "other")),
    "compile": (lambda row: row.kind not in _MATRIX and row.phase != _OPTIMIZER, ("launch", "other")),
    "compile_max_autotune": (lambda row: row.kind not in _MATRIX and row.phase != _OPTIMIZER, ("launch", "other")),
    "cuda_graphs": (lambda row: False, ("launch", "other", "sync")),
    "guides_bf16": (lambda row: row.module.startswith("Teacher"), ()),
    "gradient_stream": (lambda row: row.op == "aten::convolution_backward", ()),
    "single_device": (lambda row: False, ("launch", "other", "sync")),
}

_times = st.floats(min_value=0.0, max_value=20000.0)
_rows = st.lists(
    st.builds(
        profiles.row,
        name=st.sampled_from(("kernel", "bn_fw", "nchwToNhwc")),
        kind=st.sampled_from(("conv", "gemm", "norm", "activation", "elementwise", "layout", "reduce", "memset", "pool")),
        op=st.sampled_from(("aten::convolution", "aten::convolution_backward", "aten::cudnn_batch_norm", "aten::add_", "aten::zero_", "")),
        module=st.sampled_from(("Net.conv", "Net.bn", "Net", "Teacher.conv", "")),
        phase=st.sampled_from(("forward", "backward", "optimizer", "other")),
        calls=st.floats(min_value=1.0, max_value=200.0),
        time_us=_times,
        dtype=st.sampled_from(("fp32", "bf16", "")),
        tensor_core=st.booleans(),
        layout=st.sampled_from(("", "nchw", "nhwc")),
        flops=st.floats(min_value=0.0, max_value=1e13),
        modelled_bytes=st.floats(min_value=0.0, max_value=1e11),
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip
_idle = st.lists(
    st.builds(IdleCause, cause=st.sampled_from(("data", "launch", "copy", "sync", "other")), time_us=_times), max_size=5
)


@settings(max_examples=150)
@given(
    rows=_rows,
    idle=_idle,
    step_us=st.floats(min_value=10.0, max_value=100000.0),
    overlap=st.floats(min_value=0.3, max_value=1.0),
    launches=st.floats(min_value=0.0, max_value=2000.0),
    bias=st.booleans(),
    groups=st.sampled_from((1, 8, 64)),
    on_gpu=st.booleans(),
)
def test_no_prediction_exceeds_the_share_of_what_it_touches(
    rows: list[KernelRow],
    idle: list[IdleCause],
    step_us: float,
    overlap: float,
    launches: float,
    bias: bool,
    groups: int,
    on_gpu: bool,
) -> None:
    fact = profiles.conv("Net.conv", 3, (64, 64), bias=bias, followed_by_bn=bias, groups=groups)
    profile = profiles.profile(
        rows,
        step_us=step_us,
        environment=profiles.H200 if on_gpu else profiles.LAPTOP,
        busy_us=sum(row.time_us for row in rows) * overlap,
        idle=tuple(idle),
        launches=launches,
        launch_us=launches * 4.0,
        syncs=(Site(source="", what="cudaStreamSynchronize from aten::item", calls=1.0, time_us=100.0),),
        copies=(CopyRow(kind="h2d", bytes=1e6, time_us=100.0, calls=1.0),),
        input=replace(profiles.starved().input, next_us=100.0),
        model=ModelFacts(
            convs=(fact,), guides=("Teacher",), optimizers=("SGD",), parameters=10_000_000, zero_grad_to_none=False
        ),
        cost=ProfilerCost(traced_steps=1),
    )
    step = Step.of(View.of(profile))
    for transform, (wanted, causes) in TOUCHES.items():
        found = predict(profile, transform, {})
        if found is None or step is None:
            continue
        device = sum(row.time_us for row in rows if wanted(row)) * step.scale
        parts = {
            "launch": step.gaps_us + step.longer_us,
            "sync": step.sync_us,
            "data": step.data_us,
            "copy": step.copy_us,
        }
        bound = (device + sum(parts.get(cause, 0.0) for cause in causes)) / step_us
        assert found.low <= found.high <= min(1.0, bound) + 1e-6, (transform, found, bound)


def test_every_transform_states_what_it_touches() -> None:
    assert set(TOUCHES) == set(PREDICTED)


def test_passing_by_data_parallel_of_one_process_saves_its_buckets() -> None:
    plain = profiles.resnet50()
    of_one = replace(plain, model=replace(plain.model, distributed="ddp", world_size=1))
    moved_us = 16 * plain.model.parameters / plain.environment.copy_gbps / 1e3
    assert gain(of_one, "single_device").low == 0.0
    assert gain(of_one, "single_device").high == pytest.approx(moved_us / plain.step_us.median, rel=0.05)
    of_two = replace(plain, model=replace(plain.model, distributed="ddp", world_size=2))
    assert "no model is wrapped" in gain(of_two, "single_device").basis
