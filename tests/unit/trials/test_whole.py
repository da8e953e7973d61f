"""What is put on together first of all, and what is left out of it where that does not hold."""

import pytest

from advisor.core.findings import Interval, Recommendation
from advisor.core.verdict import Check, Verdict
from advisor.trials import whole


def item(name, gain=0.1, **parameters):
    return Recommendation(transform=name, parameters=parameters, predicted=Interval(low=0.0, high=gain))


def names(items):
    return [i.transform for i in items]


NET = [item(n) for n in ("prefetch", "channels_last", "fused_bn_act", "amp_bf16", "cuda_graphs", "fused_optimizer")]


def test_all_that_fits_is_put_on_together_and_a_class_at_a_time_is_left_out_of_it():
    tried = [names(attempt) for attempt in whole.attempts(NET)]
    assert tried[0] == names(NET)
    assert tried[1:] == [
        ["prefetch", "channels_last", "fused_bn_act", "cuda_graphs", "fused_optimizer"],
        ["prefetch", "channels_last", "cuda_graphs"],  # two may be to blame
        ["prefetch", "channels_last", "amp_bf16", "cuda_graphs"],
        ["prefetch", "channels_last"],
        ["prefetch", "channels_last", "fused_bn_act", "amp_bf16", "fused_optimizer"],
        ["prefetch", "fused_bn_act", "amp_bf16", "cuda_graphs", "fused_optimizer"],
    ]


@pytest.mark.parametrize("left", ["loader_workers", "cudnn_benchmark", "compile", "guides_bf16", "single_device"])
def test_what_takes_fresh_processes_or_a_compiler_comes_later(left):
    assert names(whole.members([item(left), *NET])) == names(NET)


def test_what_is_predicted_to_find_nothing_and_what_has_parameters_comes_later():
    assert names(whole.members([item("fused_casts", 0.0), item("tf32", mode="high"), *NET])) == names(NET)


def test_of_half_precisions_bf16_goes_and_tf32_is_not_needed_beside_it():
    assert names(whole.members([item("tf32"), item("amp_fp16", 0.9), item("amp_bf16")])) == ["amp_bf16"]
    assert names(whole.members([item("tf32"), item("amp_fp16")])) == ["amp_fp16"]
    assert names(whole.members([item("tf32"), item("channels_last")])) == ["tf32", "channels_last"]


def test_of_rivals_the_one_that_promises_more_is_put_on(declare):
    declare("cuda_graphs", conflicts=("defer_sync",))
    rivals = [item("cuda_graphs", 0.1), item("defer_sync", 0.3), item("channels_last")]
    assert names(whole.members(rivals)) == ["defer_sync", "channels_last"]


def test_graphs_wait_where_memory_does_not_hold_them():
    assert "cuda_graphs" not in names(whole.members(NET, graphs_fit=False))


def test_one_change_is_no_whole():
    assert list(whole.attempts([item("amp_bf16")])) == []


def test_kernels_in_a_model_in_nchw_bring_the_layout_that_they_run_in_and_are_left_out_with_it():
    bare = [c for c in NET if c.transform != "channels_last"]
    tried = [names(attempt) for attempt in whole.attempts(bare, nhwc=False)]
    assert tried[0] == ["channels_last", *names(bare)]
    assert [
        "prefetch",
        "amp_bf16",
        "cuda_graphs",
        "fused_optimizer",
    ] in tried  # by themselves they would be in place and never run
    assert all("channels_last" in attempt for attempt in tried if "fused_bn_act" in attempt)
    assert names(next(whole.attempts(bare, nhwc=True))) == names(bare)


def test_what_works_in_any_layout_brings_none():
    assert names(whole.members([item("fused_layer_norm"), item("fused_optimizer")], nhwc=False)) == [
        "fused_layer_norm",
        "fused_optimizer",
    ]


def refused(names, of_bound):
    check = Check(passed=False, detail="off", numbers={"of_bound": of_bound})
    return Verdict(transform=" + ".join(names), status="reverted", reason="off", numerics=check)


def test_numbers_that_are_far_off_are_no_roundings_and_graphs_are_left_out_first():
    assert not whole.gross(refused(["amp_bf16", "cuda_graphs"], 1.1))
    assert whole.gross(refused(["amp_bf16", "cuda_graphs"], 10.0))
    assert not whole.gross(refused(["amp_bf16"], 10.0))  # by itself: it says nothing of a whole
    without = whole.to_leave_out([refused(["amp_bf16", "cuda_graphs"], 10.0)])
    tried = [names(attempt) for attempt in whole.attempts(NET, without=without)]
    assert tried[1] == ["prefetch", "channels_last", "fused_bn_act", "amp_bf16", "fused_optimizer"]


@pytest.mark.parametrize(
    "told", ["out of memory: tried to allocate 2 MiB", "AcceleratorError: CUDA error: out of memory"]
)
def test_a_whole_that_finds_no_memory_is_tried_without_graphs_and_keeps_half_precision(told):
    """RepLKNet on an H200: bf16, which takes half the memory, was left out and never came back."""
    full = Verdict(transform="amp_bf16 + cuda_graphs", status="failed", reason=told)
    tried = [names(attempt) for attempt in whole.attempts(NET, without=whole.to_leave_out([full]))]
    assert tried[1] == ["prefetch", "channels_last", "fused_bn_act", "amp_bf16", "fused_optimizer"]
    alone = Verdict(transform="cuda_graphs", status="failed", reason=told)
    assert whole.to_leave_out([alone]) is whole.WITHOUT
