from __future__ import annotations

import dataclasses
import sys
import time

import pytest
from synthetic_trace import BASE, Builder, resnet_like

from advisor.core.environment import Environment
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance
from advisor.profiling.after.aggregate import Aggregate, aggregate
from advisor.profiling.after.rows import MAX_NAME, Precision

MACHINE = Environment(device="cuda", copy_gbps=1000.0, matrix_tflops={"fp32": 50.0, "tf32": 400.0, "bf16": 800.0})
CONV = "[[2, 4, 9, 9], [8, 4, 3, 3], [], [], [], [], [], [], []]"
CONV_TYPES = "float,float,,,,,,,"
CONV_ARGUMENTS = "[null, null, null, [1, 1], [0, 0], [1, 1], false, [0, 0], 1]"
CONV_FLOPS = 2 * 2 * 8 * 49 * 36
CONV_BYTES = 4 * (648 + 288 + 784)


def row(found: Aggregate, name: str, **wanted: object) -> KernelRow:
    rows = [r for r in found.kernels if r.name == name and all(getattr(r, k) == v for k, v in wanted.items())]
    assert len(rows) == 1, [(r.name, r.op, r.module, r.phase, r.source) for r in found.kernels]
    return rows[0]


def forward_and_backward() -> Builder:
    """One step: a convolution in a module, its backward on the engine's thread, the optimizer, a functional loss."""
    b = Builder()
    b.steps(0, 500)
    b.note("module:Net.conv1|Conv2d", 10, 60)
    b.note("line:models/net.py:12", 12, 58)
    b.op("aten::conv2d", 14, 56, sequence=5)
    b.op("aten::convolution", 16, 54, sequence=5, shapes=CONV, dtypes=CONV_TYPES, arguments=CONV_ARGUMENTS)
    b.op("aten::_convolution", 18, 52)
    b.op("aten::contiguous", 19, 26)
    b.op("aten::clone", 20, 25)
    b.op("aten::copy_", 21, 24)
    b.launch("direct_copy_kernel", 22, 30, 40)
    b.op("aten::cudnn_convolution", 28, 50)
    b.launch("sm80_xmma_fprop_tf32f32", 30, 40, 70)
    b.note("line:train.py:40", 70, 100)
    b.op("aten::cross_entropy_loss", 72, 98, sequence=6)
    b.op("aten::log_softmax", 74, 84, sequence=6)
    b.op("aten::_log_softmax", 75, 83, sequence=6)
    b.launch("softmax_warp_forward", 76, 90, 95)
    b.op("aten::argmax", 102, 112, sequence=7)
    b.launch("reduce_kernel", 104, 115, 120)
    b.note("line:train.py:41", 120, 300)
    for name, sequence, start in (("LogSoftmaxBackward0", 6, 130), ("ConvolutionBackward0", 5, 180)):
        b.op(f"autograd::engine::evaluate_function: {name}", start, start + 40, thread=2, sequence=sequence,
             forward_thread=1)  # fmt: skip
        b.op(name, start + 1, start + 35, thread=2, sequence=sequence, forward_thread=1)
    b.op("aten::_log_softmax_backward_data", 133, 150, thread=2)
    b.launch("softmax_warp_backward", 135, 150, 160, thread=2)
    b.op("aten::convolution_backward", 183, 210, thread=2)
    b.launch("sgemm_for_wgrad", 185, 200, 240, thread=2)
    b.launch("sgemm_for_dgrad", 190, 240, 280, thread=2)
    b.op("Optimizer.step#SGD.step", 310, 390, annotation="user:Optimizer.step#SGD.step")
    b.op("aten::_foreach_add_", 320, 360)
    b.launch("multi_tensor_apply_kernel", 325, 340, 350)
    return b


def test_an_update_cut_off_from_torchs_own_range_is_the_optimizers_all_the_same() -> None:
    b = forward_and_backward()
    b.note("optimizer:SGD", 415, 440)  # the window's last update: torch's range around it was still open
    b.op("aten::_fused_sgd_", 416, 438)
    b.launch("fused_sgd_kernel", 420, 425, 430)
    found = aggregate(b.trace(), MACHINE)
    assert row(found, "fused_sgd_kernel").phase == "optimizer"


def test_a_closure_inside_an_update_is_no_part_of_it() -> None:
    b = Builder()
    b.steps(0, 500)
    b.op("Optimizer.step#SGD.step", 10, 400, annotation="user:Optimizer.step#SGD.step")
    b.note("optimizer:SGD", 10, 400)
    b.note("closure", 20, 300)
    b.note("module:Net.conv1|Conv2d", 30, 60)
    b.op("aten::convolution", 32, 54, sequence=5, shapes=CONV, dtypes=CONV_TYPES, arguments=CONV_ARGUMENTS)
    b.launch("fprop", 34, 40, 70)
    b.op("aten::argmax", 102, 112)
    b.launch("reduce_kernel", 104, 115, 120)
    b.op("Optimizer.zero_grad#SGD.zero_grad", 150, 160, annotation="user:Optimizer.zero_grad#SGD.zero_grad")
    b.op("aten::_foreach_zero_", 151, 159)
    b.launch("zero_kernel", 152, 154, 158)
    b.op("aten::_foreach_add_", 320, 360)
    b.launch("multi_tensor_apply_kernel", 325, 340, 350)
    found = aggregate(b.trace(), MACHINE)
    phases = {r.name: r.phase for r in found.kernels}
    assert phases == {
        "fprop": "forward",
        "reduce_kernel": "other",
        "zero_kernel": "optimizer",
        "multi_tensor_apply_kernel": "optimizer",
    }
    assert found.optimizer_host_us == 10 + 100  # before the closure and behind it
    # Inside the closure the host was seen working only where it did: its idle time is no launch cost.
    waiting = {cause.cause: cause.time_us for cause in found.idle}
    assert waiting.get("other", 0.0) > 100


def test_forward_rows_have_operator_module_and_line() -> None:
    found = aggregate(forward_and_backward().trace(), MACHINE)
    conv = row(found, "sm80_xmma_fprop_tf32f32")
    assert (conv.op, conv.kind, conv.phase) == ("aten::convolution", "conv", "forward")
    assert (conv.module, conv.module_type, conv.source) == ("Net.conv1", "Conv2d", "models/net.py:12")
    assert (conv.time_us, conv.calls, conv.dtype, conv.tensor_core) == (30.0, 1.0, "fp32", True)
    conversion = row(found, "direct_copy_kernel")
    assert (conversion.op, conversion.kind, conversion.module) == ("aten::contiguous", "layout", "Net.conv1")


def test_cost_of_an_operator_is_shared_by_its_kernels_and_not_counted_twice() -> None:
    found = aggregate(forward_and_backward().trace(), MACHINE)
    conv, conversion = row(found, "sm80_xmma_fprop_tf32f32"), row(found, "direct_copy_kernel")
    assert conv.flops + conversion.flops == pytest.approx(CONV_FLOPS)
    assert conv.modelled_bytes + conversion.modelled_bytes == pytest.approx(CONV_BYTES)
    assert conv.modelled_bytes == pytest.approx(CONV_BYTES * 30 / 40)
    limit = max(CONV_BYTES / 1e6, CONV_FLOPS / 50e6)
    assert conv.limit_us + conversion.limit_us == pytest.approx(limit)
    assert found.limit_us == pytest.approx(limit)  # nothing else has shapes


def test_convolutions_of_one_module_are_told_apart_by_their_inputs_and_weights() -> None:
    """In a captured forward all have the root's name, and kernels serve several sizes; a pyramid's levels share a head."""
    b = Builder()
    b.steps(0, 400)
    b.note("module:Net|Net", 10, 380)
    dense = "[[2, 64, {0}, {0}], [64, 64, 3, 3], []]"
    wide, back = "[[2, 256, 9, 9], [256, 256, 3, 3], []]", "[[2, 64, 9, 9], [2, 64, 9, 9], [64, 64, 3, 3], []]"
    calls = [("aten::convolution", shapes) for shapes in (dense.format(9), dense.format(18), wide)]
    calls += [("aten::convolution_backward", back), ("aten::convolution_backward", back.replace("[64, 64,", "[64, 1,"))]
    for i, (op, shapes) in enumerate(calls):
        start = 20 + 60 * i
        b.op(op, start, start + 50, shapes=shapes)
        b.launch("one_kernel", start + 5, start + 10, start + 30 + i)
    found = {(r.op, r.shapes): (r.calls, r.time_us) for r in aggregate(b.trace(), MACHINE).kernels}
    assert found == {
        ("aten::convolution", dense.format(9)): (1.0, 20.0),
        ("aten::convolution", dense.format(18)): (1.0, 21.0),  # another image, the same weight
        ("aten::convolution", wide): (1.0, 22.0),
        ("aten::convolution_backward", back): (1.0, 23.0),
        ("aten::convolution_backward", calls[-1][1]): (1.0, 24.0),
    }


def test_tf32_raises_the_rate_that_convolutions_are_held_to() -> None:
    big = CONV.replace("[2, 4, 9, 9]", "[256, 512, 9, 9]").replace("[8, 4, 3, 3]", "[512, 512, 3, 3]")
    b = Builder()
    b.steps(0, 100)
    b.op("aten::convolution", 1, 20, shapes=big, dtypes=CONV_TYPES, arguments=CONV_ARGUMENTS)
    b.launch("k", 2, 10, 90)
    strict = aggregate(b.trace(), MACHINE).limit_us
    allowed = aggregate(b.trace(), MACHINE, precision=Precision(tf32_conv=True)).limit_us
    assert strict == pytest.approx(8 * allowed)
    doubtful = dataclasses.replace(MACHINE, rates_doubt="other processes took 60 % of the cores")
    found = aggregate(b.trace(), doubtful)
    assert found.limit_us == 0.0, "no limit from doubtful rates"
    assert [r.limit_us for r in found.kernels] == [0.0]
    assert found.kernels[0].flops > 0


def test_backward_inherits_module_and_line_by_thread_and_sequence() -> None:
    found = aggregate(forward_and_backward().trace(), MACHINE)
    for name in ("sgemm_for_wgrad", "sgemm_for_dgrad"):
        backward = row(found, name)
        assert (backward.phase, backward.kind, backward.op) == ("backward", "conv", "aten::convolution_backward")
        assert (backward.module, backward.source) == ("Net.conv1", "models/net.py:12")
    loss = row(found, "softmax_warp_backward")
    assert (loss.phase, loss.module, loss.source) == ("backward", "", "train.py:40")


def test_phases_come_from_ties_and_ranges() -> None:
    found = aggregate(forward_and_backward().trace(), MACHINE)
    assert row(found, "softmax_warp_forward").phase == "forward"  # outside any module, but a backward node came of it
    assert row(found, "reduce_kernel").phase == "other"  # an accuracy: has a sequence number, but no backward
    assert row(found, "multi_tensor_apply_kernel").phase == "optimizer"
    assert found.phase_us == {"forward": 45.0, "backward": 90.0, "optimizer": 10.0, "other": 5.0}
    assert found.optimizer_host_us == 80.0
    assert sum(found.phase_us.values()) == sum(r.time_us for r in found.kernels)


def test_another_threads_sequence_number_is_not_taken() -> None:
    b = Builder()
    b.steps(0, 100)
    b.note("module:Net.a|Conv2d", 1, 20, thread=3)
    b.op("aten::convolution", 2, 19, thread=3, sequence=5)
    b.op("ConvolutionBackward0", 30, 60, thread=2, sequence=5, forward_thread=1)
    b.launch("k", 35, 40, 50, thread=2)
    assert row(aggregate(b.trace(), MACHINE), "k").module == ""


def test_streams_that_overlap_are_busy_once() -> None:
    b = Builder()
    b.steps(0, 100)
    b.launch("a", 1, 10, 50, stream=7)
    b.launch("b", 3, 30, 60, stream=8)
    found = aggregate(b.trace(), MACHINE)
    assert found.busy_us == 50.0
    assert found.overlap_us == 20.0
    assert found.streams == 2
    assert found.busy_us + sum(i.time_us for i in found.idle) == pytest.approx(found.step_us)


def test_a_copy_between_layouts_is_a_change_of_layout() -> None:
    b = Builder()
    b.steps(0, 100)
    shape = "[[2, 3, 4, 5], [2, 3, 4, 5], []]"
    for start, strides in ((1, "[[60, 1, 15, 3], [60, 20, 5, 1], []]"), (40, "[[60, 20, 5, 1], [60, 20, 5, 1], []]")):
        b.op("aten::_to_copy", start, start + 20)
        b.op("aten::copy_", start + 1, start + 19, shapes=shape, strides=strides, dtypes="float,float,")
        b.launch(f"copy_at_{start}", start + 2, start + 5, start + 25)
    found = aggregate(b.trace(), MACHINE)
    assert row(found, "copy_at_1").kind == "layout"
    assert row(found, "copy_at_40").kind == "copy"


def test_gpus_work_side_by_side_and_the_limit_is_that_of_one() -> None:
    """nn.DataParallel: each GPU takes half of the batch, on a stream of the same number."""

    def step(devices: tuple[int, ...]) -> Aggregate:
        b = Builder()
        b.steps(0, 100)
        b.sample(0, 100, 1e6, 0.0)
        for number, device in enumerate(devices):
            at = 40 * number
            b.op("aten::convolution", at, at + 20, shapes=CONV, dtypes=CONV_TYPES, arguments=CONV_ARGUMENTS)
            b.launch("conv", at + 1, 50, 80, device=device)
        return aggregate(b.trace(), MACHINE)

    one, two = step((0,)), step((0, 1))
    assert one.limit_us > 0
    assert two.limit_us == pytest.approx(one.limit_us)
    assert sum(r.limit_us for r in two.kernels) == pytest.approx(2 * one.limit_us)
    assert (two.busy_us, two.streams) == (30.0, 2)
    assert any("2 GPUs" in note for note in two.notes)
    assert (one.dram_bytes, two.dram_bytes) == (1e6, None)  # counted on one GPU


def test_means_over_steps() -> None:
    b = Builder()
    b.steps(0, 100, 200)
    for start in (10, 110):
        b.launch("a", start, start + 5, start + 25)
    b.launch("outside", 250, 255, 300)
    found = aggregate(b.trace(), MACHINE)
    assert found.steps == 2
    assert row(found, "a").calls == 1.0
    assert row(found, "a").time_us == 20.0
    assert [r.name for r in found.kernels] == ["a"]
    assert (found.launches, found.launch_us) == (1.0, 2.0)


def test_a_kernel_belongs_to_the_step_that_launched_it_and_stretches_the_window() -> None:
    b = Builder()
    b.steps(0, 100)
    b.launch("late", 90, 150, 250)
    found = aggregate(b.trace(), MACHINE)
    assert row(found, "late").time_us == 100.0
    assert found.step_us == 250.0


def test_when_the_host_runs_ahead_the_device_window_opens_after_earlier_work() -> None:
    b = Builder()
    b.steps(100, 200)
    b.launch("earlier", 50, 60, 400)
    b.launch("mine", 120, 400, 500)
    b.launch("later", 210, 500, 900)
    found = aggregate(b.trace(), MACHINE)
    assert [r.name for r in found.kernels] == ["mine"]
    assert found.step_us == 100.0
    assert found.busy_us == 100.0
    assert sum(i.time_us for i in found.idle) == 0.0


def test_low_coverage_is_told() -> None:
    b = Builder()
    b.steps(0, 1000)
    for i in range(10):
        if i == 3:
            b.call("cudaLaunchKernel", i * 10, i * 10 + 2)
        else:
            b.launch("k", i * 10, i * 10 + 4, i * 10 + 8)
    found = aggregate(b.trace(), MACHINE)
    assert found.coverage_frac == 0.9
    assert any("90 %" in note for note in found.notes)


def test_a_replayed_graph_is_one_launch_of_many_kernels_and_said_to_be_opaque() -> None:
    b = Builder()
    b.steps(0, 100)
    call = b.call("cudaGraphLaunch", 5, 9)
    b.record("sm90_xmma_fprop", 10, 40, call=call)
    b.record("bn_fw_tr", 40, 60, call=call)
    found = aggregate(b.trace(), MACHINE)
    assert found.launches == 1.0
    assert {(r.name, r.op, r.kind) for r in found.kernels} == {
        ("sm90_xmma_fprop", "", "conv"),
        ("bn_fw_tr", "", "norm"),
    }
    assert any("CUDA graph replays" in note for note in found.notes)


def test_no_device_records_are_a_failure_and_not_idleness() -> None:
    b = Builder()
    b.steps(0, 100)
    b.op("aten::add", 1, 20)
    b.call("cudaLaunchKernel", 5, 7)
    found = aggregate(b.trace(), MACHINE)
    assert found.coverage_frac == 0.0
    assert found.idle == ()
    assert found.kernels == ()
    assert found.launches == 1.0


def test_long_kernel_names_are_cut() -> None:
    b = Builder()
    b.steps(0, 100)
    b.launch("k" * 10_000, 1, 10, 20)
    assert len(aggregate(b.trace(), MACHINE).kernels[0].name) == MAX_NAME


def test_a_kernel_without_operator_is_kept() -> None:
    b = Builder()
    b.steps(0, 100)
    b.note("module:Net.custom|Custom", 1, 30)
    b.launch("my_cupy_kernel", 5, 10, 20)
    found = row(aggregate(b.trace(), MACHINE), "my_cupy_kernel")
    assert (found.op, found.kind, found.module) == ("", "other", "Net.custom")


def test_kinetos_own_link_is_used_where_the_launch_call_is_missing() -> None:
    b = Builder()
    b.steps(0, 100)
    op = b.op("aten::add", 1, 20)
    b.record("elementwise_kernel", 10, 15, call=999, op=op)
    assert row(aggregate(b.trace(), MACHINE), "elementwise_kernel").op == "aten::add"


def test_dram_samples_are_shared_by_overlap() -> None:
    b = Builder()
    b.steps(0, 100)
    b.launch("a", 1, 10, 30)
    b.launch("b", 3, 30, 40)
    b.sample(10, 30, 2000, 1000)
    b.sample(20, 40, 0, 900)  # half beside a, half beside b
    b.sample(60, 80, 70, 0)  # nothing runs: belongs to no kernel
    b.sample(0, 0, 1e9, 1e9)
    b.dram.start_ns[-1] = b.dram.end_ns[-1] = 0
    found = aggregate(b.trace(), MACHINE)
    assert row(found, "a").dram_bytes == pytest.approx(3450)
    assert row(found, "b").dram_bytes == pytest.approx(450)
    assert row(found, "a").dram_provenance is Provenance.MEASURED
    assert found.dram_bytes == pytest.approx(3970)


def test_without_samples_dram_bytes_are_unknown_not_zero() -> None:
    found = aggregate(forward_and_backward().trace(), MACHINE)
    assert found.dram_bytes is None
    assert all(r.dram_bytes is None and r.dram_provenance is Provenance.UNAVAILABLE for r in found.kernels)


def test_copies_by_kind_with_overlap_and_source() -> None:
    b = Builder()
    b.steps(0, 200)
    b.note("line:train.py:7", 1, 30)
    b.op("aten::copy_", 2, 29)
    call = b.call("cudaMemcpyAsync", 5, 25)
    b.record("Memcpy HtoD (Pageable -> Device)", 10, 30, call=call, nbytes=4096)
    b.launch("k", 31, 40, 60)
    call = b.call("cudaMemcpyAsync", 35, 37)
    b.record("Memcpy HtoD (Pinned -> Device)", 50, 70, call=call, nbytes=1000, stream=9)
    call = b.call("cudaMemcpyAsync", 71, 72)
    b.record("Memcpy DtoD (Device -> Device)", 80, 90, call=call, nbytes=64)
    found = aggregate(b.trace(), MACHINE)
    copies = {(c.kind, c.pageable): c for c in found.copies}
    assert copies["h2d", True].source == "train.py:7"
    assert copies["h2d", True].bytes == 4096
    assert copies["h2d", True].overlapped_frac == 0.0
    assert copies["h2d", False].overlapped_frac == 0.5
    assert copies["d2d", False].time_us == 10.0
    assert {r.name for r in found.kernels} == {"k", "Memcpy DtoD (Device -> Device)"}
    assert any("(pageable)" in site.what and site.source == "train.py:7" for site in found.syncs)


def test_waits_name_the_call_the_operator_and_the_line() -> None:
    b = Builder()
    b.steps(0, 200)
    b.launch("k", 1, 5, 50)
    b.note("line:train.py:44", 10, 70)
    b.op("aten::item", 12, 68)
    b.op("aten::_local_scalar_dense", 14, 66)
    b.call("cudaMemcpyAsync", 16, 18)
    b.call("cudaStreamSynchronize", 20, 60)
    b.note("line:train.py:50", 80, 100)
    b.call("cudaDeviceSynchronize", 81, 99)
    sites = {s.what: s for s in aggregate(b.trace(), MACHINE).syncs}
    item = sites["cudaStreamSynchronize from aten::item"]
    assert (item.source, item.calls, item.time_us) == ("train.py:44", 1.0, 40.0)
    assert sites["cudaDeviceSynchronize"].source == "train.py:50"


def test_host_rows_are_own_times_and_sum_to_no_more_than_the_step() -> None:
    b = Builder("cpu")
    b.steps(0, 100)
    b.note("module:Net.fc|Linear", 5, 60)
    b.op("aten::linear", 10, 50, sequence=1)
    b.op("aten::t", 12, 15)
    b.op("aten::addmm", 20, 45, shapes="[[10], [4, 8], [8, 10]]", dtypes="float,float,float")
    b.op("outside", -20, -10)
    found = aggregate(b.trace(), Environment(copy_gbps=10.0))
    times = {r.name: r.time_us for r in found.kernels}
    assert times == {"aten::linear": 12.0, "aten::t": 3.0, "aten::addmm": 25.0}
    assert found.busy_us == 40.0
    assert row(found, "aten::addmm").module == "Net.fc"
    # `linear` only passes on to `addmm`: one product, counted once
    assert sum(r.modelled_bytes for r in found.kernels) == row(found, "aten::addmm").modelled_bytes
    assert {i.cause: i.time_us for i in found.idle} == {"data": 0.0, "other": 60.0}


def test_no_bounds_is_a_note() -> None:
    b = Builder()
    b.launch("k", 1, 5, 9)
    b.bounds = [BASE]
    found = aggregate(b.trace(), MACHINE)
    assert found.steps == 0
    assert "no step was traced" in found.notes


def test_events_out_of_order_give_the_same_rows() -> None:
    straight, shuffled = forward_and_backward().trace(), forward_and_backward().trace()
    for table in (shuffled.ops, shuffled.runtime, shuffled.kernels):
        for name in table.__dataclass_fields__:
            getattr(table, name).reverse()
    assert aggregate(shuffled, MACHINE).kernels == aggregate(straight, MACHINE).kernels


def test_twice_the_events_are_twice_the_work() -> None:
    def calls(events: int) -> tuple[int, Aggregate]:
        """Of functions, Python's and C's: what it costs, on any machine."""
        trace, count = resnet_like(events).trace(), 0

        def counting(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(counting)
        try:
            found = aggregate(trace, MACHINE)
        finally:
            sys.setprofile(None)
        return count, found

    for_half, _ = calls(5_000)
    for_all, found = calls(10_000)
    assert for_all < 2.3 * for_half
    assert found.events > 9_800
    assert {r.phase for r in found.kernels} == {"forward", "backward"}
    assert all(r.module.startswith("ResNet.layer") and r.source for r in found.kernels)


@pytest.mark.long
def test_a_million_events_take_under_twenty_seconds() -> None:
    trace = resnet_like(1_000_000).trace()
    began = time.process_time()
    found = aggregate(trace, MACHINE)
    assert time.process_time() - began < 20
    assert found.events > 990_000


def written_by_lines() -> Builder:
    """One step: a module, views of a state dict, two calls at a line that averages, one at a line that updates, a loss's operator."""
    b = Builder()
    b.steps(0, 500)
    b.note("module:Net|Net", 10, 60)
    b.op("aten::relu", 20, 30)
    b.launch("relu_kernel", 22, 30, 40)
    b.note("line:train.py:6", 90, 100)
    b.op("aten::detach", 92, 98)
    for start in (110, 150):
        b.note("line:train.py:7", start, start + 20)
        b.op("aten::mul_", start + 5, start + 15)
        b.launch("mul_kernel", start + 6, start + 10, start + 14)
    b.note("line:train.py:9", 200, 230)
    b.op("aten::add_", 205, 225)
    b.launch("add_kernel", 210, 220, 228)
    b.note("line:train.py:11", 300, 330)
    b.op("aten::mul_", 305, 325)
    b.launch("mul_kernel", 310, 320, 328)
    return b


def test_lines_that_write_weights_have_phases_of_their_own() -> None:
    trace = written_by_lines().trace()
    trace.roles.update({"train.py:7": "average", "train.py:9": "optimizer"})
    found = aggregate(trace, MACHINE)
    assert [(r.source, r.phase, r.kind) for r in sorted(found.kernels, key=lambda r: r.source) if r.source] == [
        ("train.py:11", "other", "elementwise"),
        ("train.py:7", "average", "average"),
        ("train.py:9", "optimizer", "optimizer"),
    ]
    assert found.phase_us["average"] == 8
    # From the first view before it to the end of its last call; the update by hand is the optimizer's time.
    assert (found.average_host_us, found.average_calls_us, found.optimizer_host_us) == (170 - 92, 40, 30)


def test_a_line_inside_a_module_or_an_optimizer_keeps_their_phase() -> None:
    b = Builder()
    b.steps(0, 100)
    b.note("module:Net|Net", 10, 40)
    b.note("line:net.py:3", 12, 38)
    b.op("aten::mul_", 15, 30)
    b.launch("mul_kernel", 18, 20, 30)
    trace = b.trace()
    trace.roles["net.py:3"] = "average"
    found = aggregate(trace, MACHINE)
    assert row(found, "mul_kernel").phase == "forward"
    assert found.average_host_us == 0


def drawn_into_fp64(*more: str) -> Builder:
    """A loss on a CPU whose weights are in fp64: it is multiplied by them, and what follows is fp64 alone."""
    b = Builder("cpu")
    b.steps(0, 500)
    two = "[[2, 8, 8], [2, 8, 8]]"
    b.note("line:train.py:5", 10, 40)
    b.op("aten::mul", 12, 38, sequence=1, shapes=two, dtypes="float,double")
    b.note("line:train.py:6", 50, 90)
    b.op("aten::mul", 52, 60, sequence=2, shapes=two, dtypes="double,double")
    b.op("aten::add", 62, 70, sequence=3, shapes="[[2, 8, 8], [], []]", dtypes="float,double,Scalar")
    b.op("aten::copy_", 72, 80, shapes=two, dtypes="float,double")
    b.op("autograd::engine::evaluate_function: MulBackward0", 100, 140, sequence=1, forward_thread=1)
    b.op("aten::mul", 102, 130, shapes=two, dtypes="float,double")
    for name in more:
        b.op(name, 200, 220)
        b.op("aten::_to_copy", 202, 218, shapes="[[2, 8, 8], [], []]", dtypes="float,,", arguments="[null, 7, null]")
    return b


def test_fp64_is_told_where_it_enters_and_not_what_follows_from_it() -> None:
    found = aggregate(drawn_into_fp64().trace(), MACHINE)
    assert [(site.source, site.what, site.calls) for site in found.promotions] == [
        ("train.py:5", "aten::mul of fp64 with fewer bits", 1.0)
    ]
    # All of the product is fp64 then, whichever operand stands first; a number of no dimension draws nothing in.
    assert row(found, "aten::mul", source="train.py:5", phase="forward").dtype == "fp64"
    assert row(found, "aten::add").dtype == "fp32"


@pytest.mark.parametrize("name", ["aten::to", "aten::double"])
def test_a_step_that_converts_to_fp64_itself_means_it(name: str) -> None:
    assert aggregate(drawn_into_fp64(name).trace(), MACHINE).promotions == ()


def test_a_promotion_inside_an_operator_is_no_conversion_of_the_scripts() -> None:
    assert aggregate(drawn_into_fp64("aten::mul").trace(), MACHINE).promotions


def test_fills_of_fresh_memory_are_told_as_fills_of_their_allocation() -> None:
    b = Builder("cpu")
    b.steps(0, 100)
    b.note("module:Net|Net", 5, 60)
    b.op("aten::empty", 10, 30)
    b.op("aten::fill_", 12, 28, shapes="[[64, 64], []]", dtypes="float,Scalar")
    b.op("aten::zeros", 40, 50)
    b.op("aten::zero_", 41, 49)
    b.op("aten::fill_", 42, 48, shapes="[[64, 64], []]", dtypes="float,Scalar")
    found = aggregate(b.trace(), MACHINE)
    filled = [r for r in found.kernels if r.kind == "memset" and r.op == "aten::empty"]
    assert [(r.name, r.calls, r.time_us) for r in filled] == [("aten::fill_", 1.0, 16.0)]


def test_time_in_the_drivers_allocations_is_told_with_the_part_in_which_the_device_is_idle() -> None:
    b = Builder()
    b.steps(0, 300)
    b.op("aten::relu", 10, 30)
    b.launch("relu_kernel", 20, 40, 100)
    b.call("cudaFree", 60, 130)  # waits for the kernel, then frees
    b.call("cudaMalloc", 140, 160)
    b.op("aten::relu", 165, 180)
    b.launch("relu_kernel", 170, 180, 200)
    b.op("autograd::engine::evaluate_function: ReluBackward0", 210, 230, thread=2)
    found = aggregate(b.trace(), MACHINE)
    assert (found.allocating_us, found.allocating_idle_us) == (90, 50)
    assert found.backward_nodes == 1
