import dataclasses
import json
from pathlib import Path

import pytest

from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Interval, Recommendation
from advisor.core.profile import IdleCause, MemoryStats, Spread, StepProfile
from advisor.trials import planner, whole

ORDERS = Path(__file__).with_name("orders.json")


def item(name, *, gain=0.1, low=None, **parameters):
    predicted = Interval(low=gain if low is None else low, high=gain)
    return Recommendation(transform=name, parameters=parameters, predicted=predicted)


def profile(**idle):
    return StepProfile(
        script="t.py", argv=(), created="", environment=Environment(), step_kind="optimizer", wall_us=None,
        step_us=Spread(median=1000.0, p10=900.0, p90=1100.0, n=9),
        idle=tuple(IdleCause(cause=c, time_us=t) for c, t in idle.items()),
    )  # fmt: skip


def names(items):
    return [i.transform for i in items]


ALL = [
    item(n)
    for n in ("cuda_graphs", "compile", "channels_last", "amp_bf16", "prefetch", "fused_optimizer", "fused_bn_act")
]


def test_a_step_bound_by_the_gpu_goes_from_input_over_layout_to_graphs():
    assert names(planner.order(ALL, profile(launch=50.0))) == [
        "prefetch", "channels_last", "fused_bn_act", "amp_bf16", "cuda_graphs", "fused_optimizer", "compile",
    ]  # fmt: skip


def test_what_bounds_the_step_comes_first():
    # Mixed precision alone is slower on a launch-bound step and would be dropped, although it pays once launches are gone.
    launch_bound = [item("cuda_graphs"), item("amp_bf16"), item("channels_last")]
    assert names(planner.order(launch_bound, profile(launch=600.0))) == ["cuda_graphs", "channels_last", "amp_bf16"]
    starved = [item("amp_bf16"), item("loader_workers"), item("prefetch")]
    # What takes fresh processes never holds up what the running loop can tell, however long the step waits for data.
    assert names(planner.order(starved, profile(data=500.0, launch=100.0))) == [
        "prefetch",
        "amp_bf16",
        "loader_workers",
    ]
    assert names(planner.order([item("tf32"), item("defer_sync")], profile(sync=300.0)))[0] == "defer_sync"


def test_waiting_for_launches_that_only_a_trace_shows_bounds_nothing():
    found = [item("cuda_graphs"), item("channels_last")]
    for busy, expected in ((700.0, ["cuda_graphs", "channels_last"]), (950.0, ["channels_last", "cuda_graphs"])):
        measured = dataclasses.replace(profile(launch=600.0), busy_us=busy, environment=Environment(device="cuda"))
        assert names(planner.order(found, measured)) == expected


def test_casts_are_put_together_once_kernels_are_settled_and_both_on_graphs():
    found = [item("cuda_graphs"), item("fused_casts"), item("first_conv"), item("amp_bf16")]
    assert names(planner.order(found, profile(launch=50.0))) == ["amp_bf16", "cuda_graphs", "first_conv", "fused_casts"]


def test_graphs_come_behind_the_kernels_where_memory_is_short():
    found = [item("first_conv"), item("cuda_graphs"), item("fused_casts"), item("amp_bf16")]
    for peak, expected in (
        (30, ["amp_bf16", "cuda_graphs", "first_conv", "fused_casts"]),
        (40, ["amp_bf16", "first_conv", "fused_casts", "cuda_graphs"]),
    ):
        memory = MemoryStats(peak_allocated_bytes=peak, total_bytes=100)
        assert names(planner.order(found, dataclasses.replace(profile(launch=50.0), memory=memory))) == expected


def test_graphs_come_behind_kernels_for_a_large_share_of_the_step():
    """As in a UNet, whose graphs were left open after twenty pairs, while no time was left for a third of its step."""
    graphs, stream = item("cuda_graphs", low=0.0, gain=0.05), item("gradient_stream")
    for high, expected in (
        (0.09, ["amp_bf16", "cuda_graphs", "fused_upsample", "fused_casts", "gradient_stream"]),
        (0.13, ["amp_bf16", "fused_upsample", "fused_casts", "cuda_graphs", "gradient_stream"]),
    ):
        found = [graphs, stream, item("fused_upsample", low=0.0, gain=high), item("fused_casts"), item("amp_bf16")]
        assert names(planner.order(found, profile(launch=50.0))) == expected
    more = [item("cuda_graphs", low=0.1, gain=0.2), item("fused_upsample", low=0.0, gain=0.13)]
    assert names(planner.order(more, profile(launch=50.0))) == ["cuda_graphs", "fused_upsample"]


def test_neighbouring_kernels_are_tried_as_one_up_to_the_next_other_change():
    found = [
        item("fused_pooling"),
        item("cudnn_benchmark"),
        item("first_conv"),
        item("fused_optimizer"),
        item("compile"),
        item("fused_casts"),
    ]
    members = planner.bundle(found)
    assert names(members) == ["fused_pooling", "first_conv", "fused_optimizer"]
    assert planner.as_one(members).transform == "fused_pooling + first_conv + fused_optimizer"
    assert planner.bundle(found[3:]) == planner.bundle(found[4:]) == planner.bundle([]) == ()
    assert planner.bundle([item("fused_pooling", parameters={"a": "b"}), item("first_conv")]) == ()


def test_after_is_honoured_and_a_circle_ends(declare):
    declare("channels_last", after=("cudnn_benchmark",))
    items = [item("channels_last"), item("cudnn_benchmark")]
    assert names(planner.order(items)) == ["cudnn_benchmark", "channels_last"]
    for name, after in (("a", ("b",)), ("b", ("a",)), ("c", ("absent",))):
        declare(name, after=after)
    assert sorted(names(planner.order([item("a"), item("b"), item("c")]))) == ["a", "b", "c"]


def test_a_change_that_nobody_declared_has_no_turn():
    with pytest.raises(AdvisorError, match="no transform 'a_change_of_somebody'"):
        planner.order([item("tf32"), item("a_change_of_somebody")])


@pytest.mark.parametrize("case", json.loads(ORDERS.read_text(encoding="utf-8")), ids=lambda case: case["profile"])
def test_orders_stay_as_they_were(case):
    """Drawn at random: what rules asked for, as predicted, on profiles of each bound; and what came of it."""
    memory = MemoryStats(total_bytes=80, peak_allocated_bytes=40 if case["profile"] == "crowded" else 0)
    idle = {"launch": {"launch": 600.0}, "copy": {"copy": 500.0, "launch": 100.0}, "sync": {"sync": 300.0}}
    measured = dataclasses.replace(profile(**idle.get(case["profile"], {"launch": 50.0})), memory=memory)
    found = [
        Recommendation(transform=name, predicted=None if gain is None else Interval(low=gain[0], high=gain[1]))
        for name, gain in case["candidates"].items()
    ]
    ordered = planner.order(found, measured if case["profile"] else None)
    assert names(ordered) == case["order"]
    assert names(planner.worth(ordered, 0.02)) == case["worth"]
    assert names(planner.bundle(ordered)) == case["bundle"]
    assert [names(attempt) for attempt in whole.attempts(ordered)] == case["attempts"]


def test_each_change_once_and_larger_promises_first():
    items = [
        item("loader_workers", workers="2"),
        item("loader_workers", workers="2"),
        item("loader_workers", workers="4", gain=0.3),
    ]
    ordered = planner.order(items)
    assert [r.parameters["workers"] for r in ordered] == ["4", "2"] or len(ordered) == 2
    assert names(planner.order([item("first_conv", gain=0.1), item("conv3x3", gain=0.4)])) == ["conv3x3", "first_conv"]


def test_conflicts_are_seen_from_either_side():
    assert planner.conflicting("compile", ["fused_bn_act"], [("fused_bn_act", ()), ("tf32", ())]) == ("fused_bn_act",)
    assert planner.conflicting("compile", [], [("fused_bn_act", ["compile"])]) == ("fused_bn_act",)
    assert planner.conflicting("compile", [], [("tf32", [])]) == ()


def test_what_is_predicted_to_find_nothing_comes_last_and_nothing_waits_for_it(declare):
    declare("fused_bn_act", after=("conv_bias",))
    nothing = Recommendation(transform="conv_bias", predicted=Interval(low=0.0, high=0.0))
    waits = Recommendation(transform="fused_bn_act", predicted=Interval(low=0.1, high=0.2))
    late = Recommendation(transform="compile", predicted=Interval(low=0.0, high=0.1))
    assert [r.transform for r in planner.order((nothing, late, waits))] == ["fused_bn_act", "compile", "conv_bias"]


def test_kernels_wait_for_the_dtype_that_they_are_dispatched_by() -> None:
    names = ("depthwise_conv", "fused_layer_norm", "amp_bf16", "fused_bn_act", "channels_last")
    found = [r.transform for r in planner.order([Recommendation(transform=name) for name in names])]
    assert found == ["channels_last", "fused_bn_act", "amp_bf16", "depthwise_conv", "fused_layer_norm"]


def test_a_kernel_that_runs_in_nhwc_alone_is_tried_with_it_unless_the_model_is_in_it():
    norm, layout = item("fused_bn_act"), item("channels_last", low=0.1, gain=0.2)
    assert names(planner.with_layout((norm,), [norm], nhwc=False)) == ["channels_last", "fused_bn_act"]
    assert planner.with_layout((norm,), [layout, norm], nhwc=False)[0] is layout  # with its own prediction
    assert planner.with_layout((norm,), [layout, norm], nhwc=True) == (norm,)
    for alone in ("fused_layer_norm", "amp_bf16", "fused_optimizer"):
        assert names(planner.with_layout((item(alone),), [layout], nhwc=False)) == [alone]
