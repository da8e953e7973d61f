"""Metrics of hand-built profiles against answers worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import profiles
import pytest

from advisor import rules
from advisor.analysis import metrics
from advisor.analysis.launch import extent
from advisor.analysis.predict import predict
from advisor.analysis.time import EPOCH_BEGINS
from advisor.analysis.view import View
from advisor.core import roofline
from advisor.core.findings import Outcome
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.core.profile import IdleCause, KernelRow, ModelFacts, Quantity, Site, Spread, StepProfile
from advisor.core.provenance import Provenance
from advisor.loop import interval
from advisor.reporting import wording
from advisor.resources import kernel_entries


def numbers(table: MetricTable, **expected: float | bool | str) -> None:
    for name, value in expected.items():
        got = table[name].value
        wanted = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert got == wanted, f"{name}: {got} ({table[name].reason})"


def test_resnet50_shares_are_of_device_time() -> None:
    table = metrics(profiles.resnet50())
    total = 113000.0
    numbers(
        table,
        conv_frac=64000 / total,
        first_conv_frac=2000 / total,
        norm_frac=25000 / total,
        batchnorm_frac=25000 / total,
        groupnorm_frac=0.0,
        activation_frac=7500 / total,
        elementwise_frac=10000 / total,
        layout_frac=8000 / total,
        pool_frac=4500 / total,
        loss_frac=100 / total,
        optimizer_frac=900 / total,
        backward_frac=64500 / total,
        bn_act_frac=35000 / total,
        bn_act_count=1.0,
        tensor_core_frac=64000 / 64500,
        tensor_eligible_frac=64500 / total,
        fp32_conv_frac=64500 / total,
        half_frac=0.0,
        conv3x3_fp32_frac=0.0,
    )


def test_resnet50_step_and_memory() -> None:
    table = metrics(profiles.resnet50())
    numbers(
        table,
        on_gpu=True,
        step_us=116600.0,
        step_spread_frac=0.04,
        steps_measured=5.0,
        step_outlier_frac=0.0,
        batch_size=256.0,
        samples_per_s=256 / 0.1166,
        busy_frac=113000 / 116600,
        idle_frac=3600 / 116600,
        idle_launch_frac=2700 / 116600,
        idle_sync_frac=900 / 116600,
        idle_data_frac=0.0,
        peak_memory_frac=0.3,
        reserved_ratio=1.05,
        parameter_bytes=25_557_032 * 4.0,
        state_bytes=25_557_032 * 12.0,
        activation_bytes=40 * 2.0**30 - 25_557_032 * 12,
        optimizer="SGD",
        optimizer_kernels=12.0,
        bf16_supported=True,
        launch_us=2500.0,
        sm_active_frac=0.81,
        torch_compile_available=True,
    )
    assert table["gpu_temperature"].reason == "NVML was refused"
    assert "no range" in table["optimizer_host_frac"].reason
    ranged = metrics(replace(profiles.resnet50(), optimizer_host_us=0.02 * profiles.resnet50().cost.traced_step_us))
    assert ranged["optimizer_host_frac"].value == pytest.approx(0.02)
    assert table["limit_us"].provenance is Provenance.MODELLED
    assert table["dram_frac"].reason == "needs hardware counters or NVML GPM"


def test_what_runs_in_backward_is_a_checkpoint_only_where_it_is_the_forward_again() -> None:
    base = profiles.resnet50()
    forward = KernelRow(
        name="k", kind="conv", op="aten::cudnn_convolution", module="net.a", phase="forward", time_us=1000.0
    )
    again = replace(forward, phase="backward", time_us=300.0)

    def checkpoints(*more: KernelRow, **facts: bool) -> bool:
        rows = (forward, replace(forward, op="aten::convolution_backward", phase="backward"), *more)
        return bool(metrics(replace(base, kernels=rows, model=replace(base.model, **facts)))["checkpointing"].value)

    assert not checkpoints()
    assert checkpoints(again)
    assert checkpoints(replace(again, kind="norm", op="aten::native_batch_norm"))
    assert not checkpoints(replace(again, op="aten::col2im")), "unfold's gradient"
    assert not checkpoints(again, create_graph=True), "a second derivative"
    assert not checkpoints(replace(again, time_us=20.0))


def test_doubtful_rates_give_no_share_and_no_finding() -> None:
    sound = profiles.resnet50()
    rows = tuple(replace(row, limit_us=0.0, dram_bytes=row.modelled_bytes) for row in sound.kernels)  # as assembled
    environment = replace(sound.environment, rates_doubt="the GPU throttled")
    doubted = replace(sound, environment=environment, kernels=rows, limit_us=0.0)
    table = metrics(doubted)
    for name in ("limit_us", "limit_frac", "conv_efficiency", "norm_efficiency", "copy_gbps", "dram_frac"):
        assert table[name].value is None, name
        assert table[name].reason == "the machine's rates are in doubt: the GPU throttled"
    shares = ("near-the-limit", "busy-but-far-from-the-limit", "memory-bandwidth-full", "memory-bound-inefficient")
    found = {f.rule: f.outcome for f in rules.evaluate(rules.load(), table, doubted)}
    assert {found[rule] for rule in shares} == {Outcome.UNKNOWN}
    told = wording.headline(doubted, None, None)
    assert told == "The distance to this GPU's limit is not known: the GPU throttled while its rates were measured."


def test_a_step_that_is_faster_than_the_rates_allow_is_at_no_share_of_its_limit() -> None:
    base = profiles.resnet50()
    table = metrics(replace(base, limit_us=1.2 * base.typical_us))
    assert "faster than" in table["limit_frac"].reason
    near = rules.evaluate([rule for rule in rules.load() if rule.id == "near-the-limit"], table)
    assert near[0].outcome is Outcome.UNKNOWN


def test_the_limit_of_half_precision_is_not_that_of_a_cpu_that_computes_it_in_software() -> None:
    slow = replace(profiles.LAPTOP, matrix_tflops={"fp32": 0.2, "bf16": 0.005})
    work = {"nbytes": 0.0, "flops": 1e9}
    assert roofline.limit_us(slow, dtype="bf16", **work) == roofline.limit_us(slow, dtype="fp32", **work)
    assert roofline.limit_us(profiles.H200, dtype="bf16", **work) == pytest.approx(1e9 / 800e6)
    assert roofline.limit_us(profiles.H200, dtype="fp32", **work) == pytest.approx(1e9 / 50e6), "bf16 is no fp32"
    assert roofline.limit_us(slow, dtype="fp16", **work) == 0.0, "an unmeasured dtype has no limit by its flops"


def test_short_epochs_are_told_by_the_steps_left_out() -> None:
    base = profiles.resnet50()
    left_out = {"new epoch": 1, "evaluation": 1, "another batch shape": 3}
    numbers(metrics(base), epoch_frac=0.0)
    numbers(metrics(replace(base, excluded=left_out)), epoch_frac=2 / (5 + 5))
    # The reasons are those that the steps are left out for.
    assert set(EPOCH_BEGINS) == {interval.EPOCH, interval.EVALUATION}


def test_shares_and_causes_of_the_step_add_up() -> None:
    for build in (profiles.resnet50, profiles.cifar, profiles.starved):
        table = metrics(build())
        causes = [table.number(f"idle_{cause}_frac") for cause in ("data", "launch", "copy", "sync", "other")]
        assert sum(value or 0.0 for value in causes) == pytest.approx(table.number("idle_frac"))
        assert (table.number("busy_frac") or 0) + (table.number("idle_frac") or 0) == pytest.approx(1.0)


def test_idle_is_scaled_to_the_untraced_step() -> None:
    # 11,000 us of gaps in the traced step, 8,600 us left in the untraced one, in which copies take no less.
    table = metrics(profiles.cifar())
    numbers(
        table,
        idle_frac=8600 / 13600,
        idle_launch_frac=8100 * 9 / 10.5 / 13600,
        idle_sync_frac=8100 * 1.5 / 10.5 / 13600,
        idle_copy_frac=500 / 13600,
    )


def test_a_copy_is_no_shorter_where_tracing_made_most_of_the_gaps() -> None:
    """UNet on an H200, bf16 in graphs: 18.4 ms a step, 17.2 of kernels, 0.6 of copies; 4.6 ms idle in the traced step."""
    causes = (("launch", 3607.0), ("copy", 615.0), ("other", 409.0))
    base = replace(profiles.cifar(), busy_us=17167.0, idle=tuple(IdleCause(cause=c, time_us=t) for c, t in causes))
    step = replace(base.step_us, median=18431.0)
    numbers(metrics(replace(base, step_us=step)), idle_copy_frac=615 / 18431, idle_frac=1264 / 18431)
    nearly = replace(base, step_us=replace(step, median=17400.0))  # less is idle than the copies took
    numbers(metrics(nearly), idle_copy_frac=233 / 17400, idle_launch_frac=0.0)


def starving(**changes: float) -> dict[str, float]:
    """Idle causes, us, of a ResNet-18 behind two workers on an H200: 9.1 ms in `next()` a step, 1.7 of that while it was traced."""
    causes = (("data", 1680.0), ("launch", 15168.0), ("copy", 119.0))
    given = {"step": 19054.0, "next": 9100.0, "traced_next": 1680.0, **changes}
    base = profiles.cifar()
    spread = Spread(median=given["step"], p10=given["step"], p90=given["step"], n=20)
    found = replace(
        base,
        busy_us=6676.0,
        step_us=spread,
        idle=tuple(IdleCause(cause=c, time_us=t) for c, t in causes),
        input=replace(base.input, next_us=given["next"]),
        cost=replace(base.cost, traced_next_us=given["traced_next"]),
    )
    table = metrics(found)
    assert table.number("idle_frac") == pytest.approx(1 - 6676 / given["step"])
    return {c: (table.number(f"idle_{c}_frac") or 0.0) * given["step"] for c in ("data", "launch", "copy")}


def test_waits_for_data_are_those_of_untraced_steps() -> None:
    assert starving() == pytest.approx({"data": 9100, "copy": 119, "launch": 19054 - 6676 - 119 - 9100})
    # Half of the time in next() something was left in the queue.
    assert starving(traced_next=2 * 1680.0)["data"] == pytest.approx(4550)
    # In the traced steps nobody waited: at most all of the step's work is hidden behind next().
    assert starving(traced_next=0.0)["data"] == pytest.approx(9100 - 6676)
    # No longer than the device is idle, and no longer than next() takes.
    assert starving(next=16000.0)["data"] == pytest.approx(19054 - 6676 - 119)
    assert starving(next=100.0)["data"] == pytest.approx(100)


@pytest.mark.parametrize("inside", [".act", ""])
def test_norms_that_hold_their_activation_are_paired_with_it(inside: str) -> None:
    """timm's BatchNormAct2d: half of an EfficientNet's step on an H200 was in 98 of them, and no kernel was recommended for any."""

    def row(kind: str, module: str, module_type: str, time_us: float, op: str) -> KernelRow:
        return KernelRow(
            name=op, kind=kind, op=op, module=module, module_type=module_type, phase="forward", calls=1.0, time_us=time_us
        )  # fmt: skip

    blocks = [
        work
        for block in ("net.blocks.0", "net.blocks.1")
        for work in (
            row("norm", f"{block}.bn1", "BatchNormAct2d", 30.0, "aten::cudnn_batch_norm"),
            row("elementwise", f"{block}.bn1", "BatchNormAct2d", 1.0, "aten::add_"),  # counts batches
            row("activation", f"{block}.bn1{inside}", "SiLU", 10.0, "aten::silu_"),
            row("norm", f"{block}.bn2", "BatchNormAct2d", 9.0, "aten::cudnn_batch_norm"),
        )
    ]
    table = metrics(profiles.with_rows(profiles.cifar(), *blocks))
    numbers(table, bn_act_count=2.0, bn_act_frac=1.0, unnormed_elementwise_frac=0.0)
    # One activation that all share, as in a YOLO, is under the path of the first.
    shared = [replace(work, module="net.blocks.0.act") if work.kind == "activation" else work for work in blocks]
    numbers(metrics(profiles.with_rows(profiles.cifar(), *shared)), bn_act_count=2.0, bn_act_frac=1.0)


def test_weights_that_are_standardised_by_a_batch_norm_are_no_batch_norm() -> None:
    rows = [
        KernelRow(
            name="batch_norm", kind="norm", op="aten::cudnn_batch_norm", module=f"net.{i}.conv", module_type=name, phase="forward", calls=1.0, time_us=5.0
        )
        for i, name in enumerate(("ScaledStdConv2d", "ScaledStdConv2dSame", "WSConv2d", "ConvBNReLU"))
    ]  # fmt: skip
    numbers(metrics(profiles.with_rows(profiles.cifar(), *rows)), norm_frac=1.0, batchnorm_frac=0.25)


def test_a_norm_written_out_is_one_and_no_layer_scale() -> None:
    def work(name: str, kind: str, module_type: str, time_us: float, phase: str = "forward") -> KernelRow:
        return KernelRow(
            name=name, kind=kind, op=f"aten::{name}", module="m", module_type=module_type, phase=phase, calls=1.0, time_us=time_us
        )  # fmt: skip

    rows = (
        work("mul", "elementwise", "RMSNorm", 30.0),
        work("div", "elementwise", "RMSNorm", 20.0, "backward"),
        work("linalg_vector_norm", "reduce", "RMSNorm", 10.0),
        work("mul", "elementwise", "RMSNorm", 5.0, "optimizer"),
        work("native_layer_norm", "norm", "LayerNorm2d", 10.0),
        work("mul", "elementwise", "LayerNorm2d", 5.0),  # what a norm of PyTorch's leaves beside it
        work("mul", "elementwise", "FrozenBatchNorm2d", 4.0),
        work("mv", "gemm", "SpectralNorm", 1.0),
        work("mul", "elementwise", "Block", 15.0),
    )
    table = metrics(profiles.with_rows(profiles.cifar(), *rows))
    numbers(table, written_norm_frac=0.6, unnormed_elementwise_frac=(5 + 4 + 15) / 100)


def test_a_step_works_where_it_does_not_wait() -> None:
    """On a CPU too: of a script that waited for its loader for 85 % of the step half precision was told to save 52 %."""
    numbers(metrics(profiles.starved()), work_frac=0.2, busy_frac=0.2)
    numbers(metrics(profiles.laptop()), work_frac=140_000 / 150_000)
    base = profiles.laptop()
    waiting = replace(base, input=replace(base.input, next_us=120_000.0))
    numbers(metrics(waiting), work_frac=0.2)
    # Of a small net tracing doubled the step: by the traced one its operators were told to take half of it, and their gains all.
    slowed = IdleCause(cause="other", time_us=150_000.0, sites=())
    numbers(metrics(replace(base, idle=(slowed,))), work_frac=140_000 / 150_000)

    def promised(profile: StepProfile) -> dict[str, float]:
        found = rules.evaluate(rules.load(()), metrics(profile), predict=partial(predict, profile))
        return {f.rule: f.gain.high for f in found if f.gain is not None}

    rule = "convolutions-in-nchw"
    assert promised(waiting)[rule] == pytest.approx(promised(base)[rule] * 0.2 / (1 - 5000 / 150000), rel=0.1)


def test_a_step_behind_a_loader_that_delivers_in_bursts_takes_its_mean() -> None:
    base = profiles.cifar()
    times = (40e3, 10e3, 10e3, 10e3)
    spread = Spread(median=10e3, p10=10e3, p90=40e3, n=4, raw=times)
    bursts = replace(base, step_us=spread, input=replace(base.input, next_us=7600.0, burst_us=7500.0))
    assert bursts.typical_us == 17.5e3
    numbers(metrics(bursts), loader_frac=7600 / 17500)
    steady = replace(bursts, input=replace(base.input, next_us=100.0, burst_us=10.0))
    assert steady.typical_us == 10e3
    assert replace(bursts, step_us=replace(spread, raw=())).typical_us == 10e3
    assert replace(bursts, step_us=None, wall_us=None).typical_us == 0.0


def test_a_trace_busier_than_the_step_is_clamped_and_told() -> None:
    table = metrics(replace(profiles.resnet50(), busy_us=140000.0))
    numbers(table, busy_frac=1.0, idle_frac=0.0)
    assert "longer than the untraced step" in table["idle_frac"].reason
    assert metrics(profiles.resnet50())["idle_frac"].reason == ""


def test_idle_without_a_traced_cause_is_other() -> None:
    table = metrics(replace(profiles.cifar(), idle=()))
    numbers(table, idle_other_frac=8600 / 13600, idle_launch_frac=0.0)
    odd = replace(profiles.cifar(), idle=(IdleCause(cause="gremlins", time_us=10.0),))
    numbers(metrics(odd), idle_other_frac=8600 / 13600)


def test_cifar_sync_copy_and_functional_activation() -> None:
    table = metrics(profiles.cifar())
    numbers(
        table,
        syncs_per_step=6.0,
        item_syncs=2.0,
        nonzero_syncs=1.0,
        explicit_syncs=1.0,
        pageable_syncs=0.0,
        sync_wait_frac=1000 / 13600,
        host_frac=1 - 1500 / 13600,
        h2d_frac=300 / 13600,
        h2d_pageable_frac=1.0,
        h2d_overlap_frac=0.0,
        h2d_gbps=5.0,
        h2d_copies=2.0,
        d2h_copies=2.0,
        data_parallel=True,
        bn_act_frac=1750 / 5000,
        workers=2.0,
        moved_unchanged=True,
        kernels_per_step=174.0,
        mean_kernel_us=5000 / 174,
        loader="DataLoader",
        input_fp32_bytes=1_572_864.0,
    )
    # Foreach kernels take 6.25 us each, activations 8.8 and 11.8 us: 40 + 17 of 174 kernels are shorter than 10 us.
    numbers(table, short_kernel_frac=57 / 174, short_kernel_time_frac=400 / 5000)


def test_geometry_from_facts_with_and_without_the_roots_name_and_from_shapes() -> None:
    view = View.of(profiles.cifar())  # its fact has no root name
    found = view.geometry(view.rows[0])
    assert found is not None
    assert (found.kernel, found.stride, found.unit_stride) == ((3, 3), (1, 1), True)

    shaped = profiles.row(
        name="dw", kind="conv", op="aten::convolution_backward", time_us=10.0,
        shapes="[[8, 32, 14, 14], [8, 32, 14, 14], [32, 1, 7, 7], []]",
    )  # fmt: skip
    grouped = replace(shaped, op="aten::convolution", shapes="[[8, 32, 14, 14], [64, 8, 3, 3], []]", time_us=30.0)
    broken = replace(shaped, shapes="[[8, 32", time_us=60.0)
    bare = replace(profiles.with_rows(profiles.resnet50(), shaped, grouped, broken), model=ModelFacts())
    table = metrics(bare)
    numbers(table, depthwise_frac=0.1, grouped_conv_frac=0.3, large_conv_frac=0.0)
    assert "60 % of convolution time" in table["depthwise_frac"].reason
    # A module of the same size tells the stride that shapes cannot.
    like = replace(bare, model=ModelFacts(convs=(profiles.conv("Net.a", 7, (32, 32), groups=32),)))
    numbers(metrics(like), large_conv_frac=0.1)


def test_gradients_of_convolutions_are_counted_where_a_library_makes_them() -> None:
    rows = [
        profiles.row(name="dgrad", kind="conv", op="aten::convolution_backward", phase="backward", calls=3.0, time_us=60.0),
        profiles.row(name="nvjet", kind="gemm", op="aten::convolution_backward", phase="backward", calls=1.0, time_us=40.0),
        profiles.row(name="copy", kind="copy", op="aten::convolution_backward", phase="backward", calls=9.0, time_us=50.0),
        profiles.row(name="grouped_backward_data", kind="conv", op="aten::convolution_backward", phase="backward", time_us=50.0),
        profiles.row(name="fprop", kind="conv", op="aten::convolution", phase="forward", time_us=200.0),
    ]  # fmt: skip
    table = metrics(profiles.profile(rows, step_us=500.0))
    assert table["conv_backward_frac"].value == pytest.approx(100 / 400)
    assert table["conv_backward_us"].value == pytest.approx(25.0)
    assert metrics(profiles.profile(rows[-1:], step_us=500.0))["conv_backward_us"].value is None


def test_1x1_convolutions_before_norms_are_those_of_stride_1_without_bias_forward() -> None:
    facts = (
        profiles.conv("Net.a", 1, (64, 256), followed_by_bn=True),
        profiles.conv("Net.bare", 1, (64, 32)),
        profiles.conv("Net.biased", 1, (64, 16), bias=True, followed_by_bn=True),
        profiles.conv("Net.strided", 1, (64, 128), stride=2, followed_by_bn=True),
        profiles.conv("Net.wide", 3, (64, 64), followed_by_bn=True),
        profiles.conv("Net.grouped", 1, (64, 64), groups=2, followed_by_bn=True),
    )
    rows = [
        profiles.row(
            name=fact.module, kind="conv", op="aten::convolution", module=fact.module, phase=phase, time_us=10.0
        )
        for fact in facts
        for phase in ("forward", "backward")
    ]
    found = replace(profiles.with_rows(profiles.resnet50(), *rows), model=ModelFacts(convs=facts))
    numbers(metrics(found), pointwise_bn_frac=1 / 12)


def test_1x1_convolutions_of_a_captured_forward_are_known_by_their_size() -> None:
    facts = (
        profiles.conv("Net.a", 1, (64, 256), followed_by_bn=True),
        profiles.conv("Net.b", 1, (64, 32), followed_by_bn=True),
        profiles.conv("Net.bare", 1, (64, 32)),  # as large as b, and not before a norm
    )
    shape = "[[8, 64, 56, 56], [{0}, 64, 1, 1], []]"
    rows = [
        profiles.row(
            name=f"k{channels}", kind="conv", op="aten::convolution", module="Net", phase="forward", time_us=10.0,
            shapes=shape.format(channels),
        )
        for channels in (256, 32, 96)
    ]  # fmt: skip
    found = replace(profiles.with_rows(profiles.resnet50(), *rows), model=ModelFacts(convs=facts))
    numbers(metrics(found), pointwise_bn_frac=1 / 3)


def test_narrow_3x3_convolutions_are_dense_ones_of_stride_1_forward_and_backward() -> None:
    narrow = [
        profiles.conv(f"Net.narrow{i}", 3, channels)
        for i, channels in enumerate(((64, 64), (64, 128), (128, 64), (128, 32), (32, 128)))
    ]
    others = [
        profiles.conv("Net.strided", 3, (64, 64), stride=2),
        profiles.conv("Net.grouped", 3, (64, 64), groups=2),
        profiles.conv("Net.transposed", 3, (64, 64), transposed=True),
        replace(profiles.conv("Net.dilated", 3, (64, 64)), dilation=(2, 2)),
        profiles.conv("Net.pointwise", 1, (64, 64)),
        *(
            profiles.conv(f"Net.other{i}", 3, channels)
            for i, channels in enumerate(((32, 32), (32, 64), (64, 32), (128, 128), (64, 256), (3, 64)))
        ),
    ]
    facts = (*narrow, *others)
    rows = [
        profiles.row(name=op, kind="conv", op=op, module=fact.module, time_us=10.0)
        for fact in facts
        for op in ("aten::convolution", "aten::convolution_backward")
    ]
    found = replace(profiles.with_rows(profiles.resnet50(), *rows), model=ModelFacts(convs=facts))
    numbers(metrics(found), narrow_3x3_frac=len(narrow) / len(facts))
    own = replace(rows[0], name="first_conv_forward")
    numbers(metrics(replace(found, kernels=(own, *rows[1:]))), narrow_3x3_frac=(2 * len(narrow) - 1) / (2 * len(facts)))


def test_wide_3x3_convolutions_are_dense_ones_of_stride_1_between_many_channels() -> None:
    wide = [
        profiles.conv(f"Net.wide{i}", 3, channels) for i, channels in enumerate(((192, 192), (256, 512), (1024, 512)))
    ]
    others = [
        profiles.conv("Net.strided", 3, (512, 512), stride=2),
        profiles.conv("Net.grouped", 3, (512, 512), groups=2),
        profiles.conv("Net.pointwise", 1, (512, 512)),
        *(profiles.conv(f"Net.o{i}", 3, channels) for i, channels in enumerate(((128, 256), (256, 128), (2048, 512)))),
    ]
    facts = (*wide, *others)
    rows = [
        profiles.row(name="fprop", kind="conv", op="aten::convolution", module=fact.module, time_us=10.0)
        for fact in facts
    ]
    found = replace(profiles.with_rows(profiles.resnet50(), *rows), model=ModelFacts(convs=facts))
    numbers(metrics(found), wide_3x3_frac=len(wide) / len(facts))


def test_narrow_3x3_convolutions_of_a_captured_forward_are_known_by_their_size() -> None:
    facts = (
        profiles.conv("Net.a", 3, (64, 64)),
        profiles.conv("Net.b", 3, (64, 64)),
        profiles.conv("Net.down", 3, (64, 128), stride=2),
        profiles.conv("Net.wide", 3, (256, 256)),
    )
    rows = []
    for inputs, outputs in ((64, 64), (64, 128), (256, 256)):
        x, y, weight = [8, inputs, 56, 56], [8, outputs, 56, 56], [outputs, inputs, 3, 3]
        for op, shapes in (("aten::convolution", [x, weight, []]), ("aten::convolution_backward", [y, x, weight])):
            rows.append(
                profiles.row(name=op, kind="conv", op=op, module="Net", time_us=10.0, shapes=json.dumps(shapes))
            )
    found = replace(profiles.with_rows(profiles.resnet50(), *rows), model=ModelFacts(convs=facts))
    numbers(metrics(found), narrow_3x3_frac=1 / 3)
    mixed = replace(found, model=ModelFacts(convs=(*facts, profiles.conv("Net.strided", 3, (64, 64), stride=2))))
    numbers(metrics(mixed), narrow_3x3_frac=0.0)  # which of them a row is cannot be told


def test_strided_pointwise_convolutions_are_short_ones_and_those_between_few_channels() -> None:
    """Of a ResNet-18's shortcuts at 32x32 all, of larger ones those of 64 to 128 channels; a backward's operations are shared out."""
    gflop = {"Net.short": 0.54, "Net.few": 13.2, "Net.long": 13.2, "Net.unit": 0.54, "Net.wide": 0.54}
    facts = (
        profiles.conv("Net.short", 1, (256, 512), stride=2),
        profiles.conv("Net.few", 1, (64, 128), stride=2),
        profiles.conv("Net.long", 1, (128, 256), stride=2),
        profiles.conv("Net.unit", 1, (256, 512)),
        profiles.conv("Net.wide", 3, (256, 512), stride=2),
    )
    rows = [
        profiles.row(
            name=op, kind="conv", op=op, module=fact.module, phase=phase, time_us=10.0, calls=2.0,
            flops=2e9 * share * gflop[fact.module],
        )
        for fact in facts
        for op, phase, share in (
            ("aten::convolution", "forward", 1.0),
            ("aten::convolution_backward", "backward", 1.3),  # the longer of its two kernels
            ("aten::convolution_backward", "backward", 0.7),
        )
    ]  # fmt: skip
    found = replace(profiles.with_rows(profiles.resnet50(), *rows), model=ModelFacts(convs=facts))
    numbers(metrics(found), strided_1x1_frac=2 / 5)


def test_a_gpu_before_ampere_has_no_fast_bf16() -> None:
    # A probe measures fp32 and fp16 there, and nothing else.
    turing = replace(profiles.H200, gpu_name="Tesla T4", sm_arch=75, matrix_tflops={"fp32": 4.0, "fp16": 25.0})
    table = metrics(replace(profiles.resnet50(), environment=turing))
    assert table["bf16_supported"].value is False
    assert "sm_75" in table["bf16_supported"].reason
    fired = [found.rule for found in rules.evaluate(rules.load(()), table) if found.outcome is Outcome.FIRED]
    assert "fp16-only-device" in fired
    unmeasured = metrics(replace(profiles.resnet50(), environment=replace(profiles.H200, matrix_tflops={})))
    assert unmeasured["bf16_supported"].value is None


def test_strict_fp32_and_unaligned_channels() -> None:
    base = profiles.resnet50()
    strict = [replace(row, tensor_core=False) for row in base.kernels]
    table = metrics(replace(base, kernels=tuple(strict)))
    numbers(table, winograd_eligible_frac=44000 / 113000, conv3x3_fp32_frac=44000 / 113000, tensor_core_frac=0.0)
    half = [replace(row, dtype="bf16") for row in base.kernels]
    table = metrics(replace(base, kernels=tuple(half)))
    # The first convolution's 3 input channels are the images'; the linear layer's shapes were not recorded.
    numbers(table, half_frac=1.0, fp32_conv_frac=0.0, unaligned_channel_frac=0.0)
    odd = [replace(fact, in_channels=60) if fact.in_channels == 3 else fact for fact in base.model.convs]
    table = metrics(replace(base, kernels=tuple(half), model=replace(base.model, convs=tuple(odd))))
    numbers(table, unaligned_channel_frac=2000 / 64000)


def test_efficiencies_are_limit_over_time() -> None:
    table = metrics(profiles.resnet50())
    # conv limits: by bytes 244 us, by 400 TFLOP/s 5,000 and 10,000 us, by bytes 3,000 and 6,000 us.
    numbers(
        table,
        conv_efficiency=(244 + 5000 + 10000 + 3000 + 6000) / 64000,
        conv_worst_efficiency=10000 / 30000,
        norm_efficiency=(5500 + 8250) / 25000,
        pool_efficiency=(350 + 400) / 4500,
    )
    assert table["norm_efficiency"].provenance is Provenance.MODELLED
    assert table["depthwise_efficiency"].reason == "the step has no such kernel"
    # 1x1 and first convolutions are bound by bytes at the TF32 rate, 3x3 ones and the fp32 product by flops.
    bound = 2000 + 6000 + 12000 + 25000 + 7500 + 2500 + 4500 + 100 + 900
    numbers(table, memory_bound_frac=bound / 113000)


def test_counted_bytes() -> None:
    base = profiles.resnet50()
    rows = [
        replace(row, dram_bytes=2 * row.modelled_bytes, dram_provenance=Provenance.MEASURED) for row in base.kernels
    ]
    table = metrics(replace(base, kernels=tuple(rows)))
    total = 2 * sum(row.modelled_bytes for row in base.kernels)
    numbers(table, dram_gb_per_step=total, dram_excess_ratio=2.0, dram_frac=total / (116600 * 4e6))
    assert table["dram_frac"].provenance is Provenance.MEASURED
    rows[0] = replace(rows[0], dram_provenance=Provenance.MODELLED)
    assert metrics(replace(base, kernels=tuple(rows)))["dram_frac"].provenance is Provenance.MODELLED


def test_launch_geometry() -> None:
    assert (extent("132x2x1"), extent(""), extent("axb")) == (264, 0, 0)
    base = profiles.resnet50()
    small = replace(base.kernels[0], grid="100x1x1", block="96x1x1", time_us=40.0)
    odd = replace(small, grid="200x1x1", block="100x1x1", time_us=10.0)
    # 8 blocks of 256 threads fit on an SM: 1,056 a wave; 1,584 blocks are 1.5 waves of 2, a quarter of the time is lost.
    tail = replace(small, grid="1584x1x1", block="256x1x1", time_us=50.0)
    table = metrics(profiles.with_rows(base, small, odd, tail))
    numbers(table, small_grid_frac=0.4, odd_block_frac=0.1, tail_wave_frac=0.5 * 0.25)
    assert table["tail_wave_frac"].provenance is Provenance.MODELLED
    # An SM of an RTX 4090 takes 1,536 threads: 6 such blocks, and 792 of them are one whole wave of 132.
    whole = profiles.with_rows(base, replace(tail, grid="792x1x1"))
    ada = replace(whole, environment=replace(base.environment, sm_arch=89))
    numbers(metrics(ada), tail_wave_frac=0.0)
    over = profiles.with_rows(ada, replace(tail, grid="1056x1x1"))  # a wave and a third of one
    numbers(metrics(over), tail_wave_frac=1 / 3)


def test_communication_is_hidden_only_when_measured() -> None:
    base = profiles.resnet50()
    numbers(metrics(base), comm_exposed_frac=0.0)
    comm = replace(base.kernels[1], name="ncclDevKernel_AllReduce", kind="comm", op="")
    table = metrics(profiles.with_rows(base, *base.kernels, comm))
    assert table["comm_exposed_frac"].value is None
    told = {"comm_exposed_frac": Quantity(value=0.07, provenance=Provenance.MEASURED)}
    numbers(metrics(replace(profiles.with_rows(base, comm), utilization=told)), comm_exposed_frac=0.07)


def test_a_measured_sample_takes_the_place_of_a_modelled_value() -> None:
    base = profiles.cifar()
    told = {"host_frac": Quantity(value=0.97, provenance=Provenance.MEASURED)}
    assert metrics(base)["host_frac"].provenance is Provenance.MODELLED
    numbers(metrics(replace(base, utilization=told)), host_frac=0.97)


def test_wrapped_modules_and_two_roots_with_the_same_paths() -> None:
    base = profiles.cifar()
    wrapped = [replace(row, module=row.module.replace("ResNet.", "ResNet.module.")) for row in base.kernels]
    view = View.of(replace(base, kernels=tuple(wrapped)))
    found = view.geometry(view.rows[0])
    assert found is not None
    assert found.kernel == (3, 3)

    facts = (profiles.conv("main.0", 4, (3, 64), stride=2), profiles.conv("main.0", 4, (100, 512)))
    first = replace(
        base.kernels[0], module="Discriminator.main.0", shapes="[[16, 3, 64, 64], [64, 3, 4, 4], []]", time_us=1.0
    )
    view = View.of(replace(base, kernels=(first, replace(first, shapes="")), model=ModelFacts(convs=facts)))
    found = view.geometry(view.rows[0])
    assert found is not None
    assert (found.in_channels, found.stride) == (3, (2, 2))
    assert view.geometry(view.rows[1]) is None


def test_host_copies_are_no_device_rows() -> None:
    base = profiles.resnet50()
    copy = replace(base.kernels[0], name="Memcpy HtoD (Pinned -> Device)", kind="copy", time_us=1e6)
    assert metrics(replace(base, kernels=(*base.kernels, copy))).number("conv_frac") == pytest.approx(64 / 113)


def test_casts_are_told_from_copies() -> None:
    base = profiles.resnet50()
    copy = replace(base.kernels[0], name="direct_copy_kernel_cuda", kind="copy", op="aten::copy_", time_us=30.0)
    cast = replace(copy, name="void at::native::bfloat16tofloat32_copy_kernel_cuda", time_us=70.0)
    numbers(metrics(profiles.with_rows(base, copy, cast)), cast_frac=0.7, device_copy_frac=0.3)
    together = replace(
        cast,
        op="aten::_foreach_copy_",
        name="multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<BFloat16, float>",
    )
    found = metrics(profiles.with_rows(base, copy, together))
    numbers(found, cast_frac=0.7, device_copy_frac=0.3, weight_casts=0.0)


def test_casts_of_weights_are_told_from_those_of_activations() -> None:
    base = profiles.resnet50()
    cast = replace(
        base.kernels[0],
        kind="copy",
        op="aten::_to_copy",
        phase="forward",
        time_us=10.0,
        calls=4.0,
        shapes="[[64, 9], []]",
    )
    activation = replace(cast, shapes="[[256, 64, 8, 8], []]", time_us=50.0)
    # A convolution with as many filters as the batch has images: its shape is known from its module.
    filters = replace(cast, shapes="[[256, 3, 7, 7], []]", phase="backward", time_us=20.0, calls=1.0)
    update = replace(cast, phase="optimizer", time_us=20.0)
    model = ModelFacts(batch_size=256, convs=(profiles.conv("Net.conv", 7, (3, 256)),))
    tested = replace(profiles.with_rows(base, cast, activation, filters, update), model=model)
    numbers(metrics(tested), weight_casts=5.0, weight_cast_frac=0.3)
    # Gradients that are gathered over four backward passes: each has a quarter of the step's images.
    micro = replace(
        profiles.with_rows(base, cast, replace(activation, shapes="[[64, 64, 8, 8], []]")),
        model=replace(model, backwards=4),
    )
    numbers(metrics(micro), weight_casts=0.0)
    numbers(metrics(replace(micro, model=replace(model, backwards=1))), weight_casts=8.0)
    unknown = replace(tested, model=ModelFacts(), input=replace(base.input, batch_size=0))
    numbers(metrics(unknown), weight_casts=0.0, weight_cast_frac=0.0)


def test_conv_bias_before_a_norm_is_found_with_its_kernels() -> None:
    base = profiles.resnet50()
    fact = profiles.conv("Net.conv", 3, (8, 8), bias=True)
    conv = replace(base.kernels[1], module="Net.conv", time_us=80.0)
    bias = replace(conv, kind="elementwise", op="aten::add_", name="add", time_us=5.0)
    relu = replace(conv, kind="activation", op="aten::relu", module="Net.relu", module_type="ReLU", time_us=15.0)
    tested = replace(profiles.with_rows(base, conv, bias, relu), model=ModelFacts(convs=(fact,)))
    numbers(metrics(tested), bias_act_frac=0.2, conv_bias_bn_count=0.0)
    followed = replace(tested, model=ModelFacts(convs=(replace(fact, followed_by_bn=True),)))
    numbers(metrics(followed), bias_act_frac=0.0, conv_bias_bn_count=1.0)


def test_probability_bce_is_refused_by_autocast() -> None:
    base = profiles.resnet50()
    loss = replace(base.kernels[0], kind="loss", op="aten::binary_cross_entropy")
    numbers(metrics(profiles.with_rows(base, loss)), amp_capable_loss=False)
    logits = replace(loss, op="aten::binary_cross_entropy_with_logits")
    numbers(metrics(profiles.with_rows(base, logits)), amp_capable_loss=True)


def test_squeeze_excite_by_class_name() -> None:
    base = profiles.resnet50()
    scale = replace(
        base.kernels[0], kind="elementwise", op="aten::mul", module="N.b.2", module_type="SqueezeExcitation"
    )
    inner = replace(scale, kind="conv", module="N.b.2.fc1", module_type="Conv2d")
    other = replace(scale, module="N.b.20", module_type="Hardswish")
    tested = replace(
        profiles.with_rows(base, scale, inner, other),
        model=ModelFacts(module_counts={"SqueezeExcitation": 8, "Sequential": 3, "SELayer": 1}),
    )
    numbers(metrics(tested), se_frac=2 / 3, se_count=9.0)


def captured_blocks(**model: object) -> StepProfile:
    """A captured forward of a net with four squeeze-and-excite blocks, as an EfficientNet's was traced: all rows are its root's."""
    base = profiles.resnet50()

    def made(op: str, phase: str, shapes: list[list[int]], kind: str = "elementwise") -> KernelRow:
        row = replace(base.kernels[0], kind=kind, op=op, phase=phase, module="Net", module_type="Net", name=op)
        return replace(row, shapes=json.dumps(shapes), time_us=1.0)

    whole, pooled = [256, 144, 56, 56], [256, 144, 1, 1]
    rows = (
        made("aten::mul", "forward", [pooled, whole]),
        made("aten::mul", "backward", [whole, pooled]),
        made("aten::mul", "backward", [whole, whole]),
        made("aten::add_", "backward", [whole, whole, []]),
        made("aten::sum", "backward", [whole, [], []], "reduce"),
        made("aten::sigmoid", "forward", [pooled], "activation"),
        # and what is none of theirs: a residual sum, an activation, the optimizer, a loss
        made("aten::add_", "forward", [whole, whole, []]),
        made("aten::relu_", "forward", [whole], "activation"),
        made("aten::_foreach_mul_", "optimizer", [whole]),
        made("aten::mul", "forward", [[256, 1000], [256, 1000]]),
    )
    facts = ModelFacts(module_counts={"SqueezeExcitation": 4, "ReLU": 9}, **model)
    return replace(profiles.with_rows(base, *rows), model=facts)


def test_squeeze_excite_in_a_captured_forward_is_known_by_what_it_does() -> None:
    """Else a second round, which profiles captured steps, never tries the kernels for it (25 % of an EfficientNet's step)."""
    tested = captured_blocks()
    numbers(metrics(tested), se_frac=0.6, se_count=4.0, unnormed_elementwise_frac=0.3)
    found = predict(tested, "fused_squeeze_excite", {})
    assert found is not None
    assert found.high > 0.0
    # Not where the model has no such block, no channel is gated, or modules tell.
    nameless = replace(tested, model=replace(tested.model, module_counts={"Gate": 4}))
    numbers(metrics(nameless), se_frac=0.0)
    numbers(metrics(replace(tested, kernels=tested.kernels[2:])), se_frac=0.0)
    seen = replace(tested, kernels=(*tested.kernels, replace(tested.kernels[6], module="Net.layer1.0")))
    numbers(metrics(seen), se_frac=0.0)


def test_a_cpu_profile_has_operators_and_no_gpu_metrics() -> None:
    table = metrics(profiles.laptop())
    numbers(
        table,
        on_gpu=False,
        conv_frac=100 / 140,
        batchnorm_frac=15 / 140,
        forward_frac=65 / 140,
        loader_frac=5 / 150,
        bf16_supported=False,
        cpu_util_frac=0.9,
        bn_act_frac=25 / 140,
        kernels_per_step=81.0,
    )
    gpu = [spec.name for spec in BY_NAME.values() if spec.needs == "a CUDA GPU"]
    assert gpu
    for name in gpu:
        assert table[name].value is None, name
        assert table[name].reason == "needs a CUDA GPU", name


@pytest.mark.parametrize(("phase", "outcome"), [("optimizer", Outcome.QUIET), ("forward", Outcome.FIRED)])
def test_what_an_optimizer_indexes_is_no_line_of_the_scripts(phase: str, outcome: Outcome) -> None:
    base = profiles.laptop()
    row = replace(base.kernels[0], op="aten::index_put_", kind="other", phase=phase, time_us=50_000.0)
    profile = replace(base, kernels=(*base.kernels, row))
    found = next(f for f in rules.evaluate(rules.load(()), metrics(profile)) if f.rule == "indexing-heavy")
    assert found.outcome is outcome


def test_an_empty_profile_says_why_each_metric_is_missing() -> None:
    base = profiles.resnet50()
    for environment in (profiles.H200, profiles.LAPTOP):
        empty = replace(
            base, environment=environment, step_us=None, wall_us=None, kernels=(), idle=(), syncs=(), copies=(), busy_us=0.0,
            limit_us=0.0, model=ModelFacts(), utilization={}, cost=replace(base.cost, traced_steps=0), launches=0.0,
        )  # fmt: skip
        for name, metric in metrics(empty):
            if metric.value is None:
                assert metric.reason, name
        assert metrics(empty)["step_us"].value is None
        assert metrics(empty)["conv_frac"].value is None


@pytest.mark.parametrize("name", profiles.ALL)
def test_every_value_is_of_the_registrys_kind_and_every_gap_has_a_reason(name: str) -> None:
    kinds = {"number": float, "text": str, "flag": bool}
    for metric_name, metric in metrics(profiles.ALL[name]()):
        spec = BY_NAME[metric_name]
        if metric.value is None:
            assert metric.provenance is Provenance.UNAVAILABLE
            assert metric.reason
        else:
            assert type(metric.value) is kinds[spec.kind], metric_name
            assert metric.provenance is not Provenance.UNAVAILABLE
            if spec.unit == "frac" and isinstance(metric.value, float):
                assert 0.0 <= metric.value <= 1.0 + 1e-9, metric_name


def test_samples_fill_gaps_but_do_not_replace_rows() -> None:
    base = profiles.resnet50()
    sampled = {
        "conv_frac": Quantity(value=0.5, provenance=Provenance.MEASURED),
        "item_syncs": Quantity(value=9.0, provenance=Provenance.MEASURED),
        "graph_breaks": Quantity(value=3.0, provenance=Provenance.MEASURED),
        "no_such_metric": Quantity(value=1.0, provenance=Provenance.MEASURED),
    }
    table = metrics(replace(base, utilization=sampled))
    numbers(table, conv_frac=64 / 113, item_syncs=1.0, graph_breaks=3.0)


def test_a_pageable_copy_and_its_synchronisation_are_one_wait() -> None:
    sites = (
        Site(source="t.py:5", what="cudaMemcpyAsync (pageable) from aten::to", calls=2.0, time_us=1.0),
        Site(source="t.py:5", what="cudaStreamSynchronize from aten::to", calls=2.0, time_us=1.0),
        Site(source="t.py:9", what="cudaMemcpyAsync (pageable) from aten::item", calls=1.0, time_us=1.0),
        Site(source="t.py:9", what="cudaStreamSynchronize from aten::item", calls=1.0, time_us=1.0),
    )
    table = metrics(replace(profiles.cifar(), syncs=sites))
    numbers(table, syncs_per_step=3.0, item_syncs=1.0, pageable_syncs=2.0, explicit_syncs=0.0)


def test_a_step_without_device_timing_uses_the_wall_clock() -> None:
    numbers(metrics(replace(profiles.laptop(), step_us=None)), step_us=150000.0, loader_frac=5 / 150)


def test_a_wait_named_after_no_operator_is_the_scripts_own() -> None:
    base = profiles.cifar()
    sites = (
        Site(source="", what="cudaDeviceSynchronize", calls=1.0, time_us=1.0),
        Site(source="", what="cudaStreamSynchronize from aten::copy_", calls=4.0, time_us=1.0),
        Site(source="", what="cudaStreamSynchronize from aten::is_nonzero", calls=2.0, time_us=1.0),
    )
    numbers(metrics(replace(base, syncs=sites)), explicit_syncs=1.0, item_syncs=2.0, nonzero_syncs=0.0)


def test_analysis_imports_without_torch() -> None:
    code = "import sys, advisor.analysis; sys.exit('torch' in sys.modules or 'cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_optimizers_implementation_is_read_from_its_operators() -> None:
    base = profiles.cifar()
    numbers(metrics(base), optimizer_foreach=True)
    single = tuple(replace(row, op="aten::add_") if row.phase == "optimizer" else row for row in base.kernels)
    numbers(metrics(replace(base, kernels=single)), optimizer_foreach=False)
    assert metrics(replace(base, kernels=base.kernels[:3]))["optimizer_foreach"].value is None


def test_forward_work_in_backward_is_checkpointing() -> None:
    base = profiles.resnet50()
    numbers(metrics(base), checkpointing=False)
    again = replace(base.kernels[1], phase="backward")
    numbers(metrics(replace(base, kernels=(*base.kernels, again))), checkpointing=True)
    assert metrics(profiles.starved())["checkpointing"].value is None


def test_cupy_kernels_show_that_cupy_is_used() -> None:
    base = profiles.resnet50()
    assert metrics(base)["uses_cupy"].value is None
    kernel = replace(base.kernels[0], name="cupy_multiply__float32", op="", kind="other", time_us=113000.0)
    table = metrics(replace(base, kernels=(*base.kernels, kernel)))
    numbers(table, uses_cupy=True, cupy_kernel_frac=0.5, custom_kernel_frac=0.5, advisor_kernel_frac=0.0)


def test_advisors_own_kernels_are_known_by_name() -> None:
    base = profiles.resnet50()
    kernel = replace(base.kernels[0], name="batchnorm_act_apply", kind="norm", time_us=113000.0)
    numbers(metrics(replace(base, kernels=(*base.kernels, kernel))), advisor_kernel_frac=0.5)


def test_copies_are_not_taken_from_busy_time_a_second_time() -> None:
    # busy_us holds no host copies; what they take beside no kernel is idle of cause "copy".
    base = profiles.cifar()
    longer = tuple(replace(copy, time_us=10 * copy.time_us) for copy in base.copies)
    table = metrics(replace(base, copies=longer))
    numbers(table, busy_frac=base.busy_us / 13600, mean_kernel_us=metrics(base).number("mean_kernel_us") or 0.0)
    for name in ("kernel_overlap_frac", "idle_copy_frac", "device_copy_frac", "host_frac"):
        assert table[name] == metrics(base)[name], name


def test_overlap_and_exposed_communication_are_the_traces_word() -> None:
    base = profiles.cifar()
    assert metrics(base)["kernel_overlap_frac"].value is None
    numbers(metrics(base), comm_exposed_frac=0.0)
    comm = replace(base.kernels[0], name="ncclAllReduce", kind="comm", op="")
    spread = replace(base, kernels=(*base.kernels, comm))
    assert metrics(spread)["comm_exposed_frac"].value is None
    told = {
        name: Quantity(value=0.25, provenance=Provenance.MEASURED)
        for name in ("kernel_overlap_frac", "comm_exposed_frac")
    }
    numbers(metrics(replace(spread, utilization=told)), kernel_overlap_frac=0.25, comm_exposed_frac=0.25)


def test_what_our_own_kernels_take_is_no_longer_there_to_be_saved() -> None:
    base = profiles.resnet50()
    norm = next(row for row in base.kernels if row.kind == "norm")
    ours = replace(norm, name=min(kernel_entries()), op="advisor::batch_norm_act", time_us=40.0)
    theirs = replace(norm, time_us=60.0)
    table = metrics(profiles.with_rows(base, ours, theirs))
    numbers(table, norm_frac=1.0, batchnorm_frac=0.6, bn_act_frac=0.6, advisor_kernel_frac=0.4)
    only_ours = predict(profiles.with_rows(base, ours), "fused_bn_act", {})
    assert only_ours is not None
    assert only_ours.high == 0.0


def test_scale_drop_and_add_are_counted_where_no_norm_stands() -> None:
    base = profiles.resnet50()
    norm = replace(next(row for row in base.kernels if row.kind == "norm"), module="N.b.bn", time_us=10.0)
    row = replace(norm, kind="elementwise", op="aten::add", name="add", phase="forward", module_type="Block")
    rows = (
        norm,
        replace(row, module="N.b", time_us=20.0),  # beside a batch norm
        replace(row, module="N.c", time_us=30.0),
        replace(row, module="N.c", op="aten::mul", phase="backward", time_us=20.0),
        replace(row, module="N.c", phase="backward", time_us=15.0),  # sums the gradients of a fork
        replace(row, module="N.s", module_type="SqueezeExcitation", op="aten::mul", time_us=5.0),
    )
    numbers(metrics(profiles.with_rows(base, *rows)), unnormed_elementwise_frac=0.5, bn_act_frac=0.3)
    # Merged, passes at their limit are still worth most of their time.
    found = predict(profiles.with_rows(base, *rows), "fused_bias_act", {})
    assert found is not None
    assert found.high > 0.0
