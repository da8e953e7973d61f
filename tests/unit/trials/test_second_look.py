"""What is tried a second time after a later change was kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from advisor.core.findings import Interval, Recommendation
from advisor.core.verdict import Check, Verdict
from advisor.trials import planner

GOOD = Check(passed=True, detail="")
SLOW = Verdict(
    transform="amp_bf16",
    status="inconclusive",
    reason="",
    effect=GOOD,
    numerics=GOOD,
    timing=Check(passed=False, detail=""),
)
GRAPHS = Verdict(transform="cuda_graphs", status="kept", reason="", effect=GOOD, numerics=GOOD, timing=GOOD)
CANDIDATES = [Recommendation(transform="amp_bf16"), Recommendation(transform="cuda_graphs")]


def again(*verdicts: Verdict) -> list[str]:
    return [c.transform for c in planner.second_look(verdicts, CANDIDATES)]


def test_not_faster_before_a_kept_change_is_tried_again() -> None:
    assert again(SLOW, GRAPHS) == ["amp_bf16"]
    assert again(dataclasses.replace(SLOW, status="reverted"), GRAPHS) == ["amp_bf16"]


def test_nothing_kept_later_means_nothing_new() -> None:
    assert again(GRAPHS, SLOW) == []
    assert again(SLOW) == []


def test_what_a_later_profile_expects_much_of_is_tried_once_more() -> None:
    """Something else bound the step at its trial, and graphs were kept before it."""
    much = Recommendation(transform="amp_bf16", predicted=Interval(low=-0.1, high=0.5), round=2)
    little = dataclasses.replace(much, predicted=Interval(low=-0.1, high=0.35))
    known = dataclasses.replace(much, round=1)  # the prediction that it was tried on
    tried = dataclasses.replace(SLOW, predicted=Interval(low=-0.1, high=0.25))
    bad = dataclasses.replace(tried, numerics=Check(passed=False, detail=""))

    def asked(candidate: Recommendation, *verdicts: Verdict) -> int:
        return len(planner.second_look([GRAPHS, *verdicts], [candidate]))

    assert asked(much, tried) == 1
    assert asked(little, tried) == asked(known, tried) == asked(much, bad) == asked(much, tried, tried) == 0


def test_wrong_ineffective_or_slow_to_switch_on_is_not_tried_again() -> None:
    bad = Check(passed=False, detail="")
    for change in ({"numerics": bad}, {"effect": bad}, {"timing": None}, {"first_step_us": 40e6}, {"status": "failed"}):
        assert again(dataclasses.replace(SLOW, **change), GRAPHS) == []


def test_a_rival_of_what_is_kept_is_left_alone(declare: Callable[..., None]) -> None:
    declare("amp_bf16", conflicts=("cuda_graphs",))
    rival = [Recommendation(transform="amp_bf16")]
    assert planner.second_look([SLOW, GRAPHS], rival) == ()


BAD = Check(passed=False, detail="")
LEFT_OUT = dataclasses.replace(SLOW, transform="fused_bn_act", status="reverted", effect=BAD, timing=None)
HALF = dataclasses.replace(GRAPHS, transform="amp_bf16")


def kernels_again(*verdicts: Verdict) -> list[str]:
    candidates = [*CANDIDATES, Recommendation(transform="fused_bn_act"), Recommendation(transform="cudnn_benchmark")]
    return [c.transform for c in planner.second_look(verdicts, candidates)]


def test_kernels_that_fp32_had_no_use_for_are_tried_again_in_half_precision() -> None:
    assert kernels_again(LEFT_OUT, HALF) == ["fused_bn_act"]
    assert kernels_again(dataclasses.replace(LEFT_OUT, effect=GOOD, timing=BAD), HALF) == ["fused_bn_act"]


def test_kernels_are_not_tried_again_without_a_new_dtype_or_when_wrong() -> None:
    assert kernels_again(HALF, LEFT_OUT) == []
    assert kernels_again(LEFT_OUT, GRAPHS) == []
    assert kernels_again(dataclasses.replace(LEFT_OUT, numerics=BAD), HALF) == []
    assert kernels_again(dataclasses.replace(LEFT_OUT, transform="cudnn_benchmark"), HALF) == []
    kept_later = dataclasses.replace(GRAPHS, transform="fused_bn_act")
    assert kernels_again(LEFT_OUT, HALF, kept_later) == []


def test_nhwc_that_fp32_was_slower_in_is_tried_again_in_half_precision() -> None:
    nhwc = dataclasses.replace(SLOW, transform="channels_last", status="reverted")
    candidates = [*CANDIDATES, Recommendation(transform="channels_last")]

    def again(*verdicts: Verdict) -> list[str]:
        return [c.transform for c in planner.second_look(verdicts, candidates)]

    assert again(nhwc, HALF) == ["channels_last"]
    assert again(HALF, nhwc) == again(nhwc, dataclasses.replace(GRAPHS, transform="tf32")) == []
    assert again(dataclasses.replace(nhwc, numerics=BAD), HALF) == []
    assert again(nhwc, HALF, dataclasses.replace(nhwc, status="kept")) == []


def test_nhwc_and_half_precision_that_lose_apart_are_tried_as_one() -> None:
    nhwc = dataclasses.replace(SLOW, transform="channels_last", status="reverted")
    half = dataclasses.replace(SLOW, status="reverted")
    both = [Recommendation(transform=name) for name in ("channels_last", "tf32", "amp_bf16", "amp_fp16")]

    def pair(*verdicts: Verdict) -> list[str]:
        return [c.transform for c in planner.layout_with_half(verdicts, both)]

    assert pair(nhwc, half) == ["channels_last", "amp_bf16"]
    assert pair(nhwc) == pair(half) == []
    assert pair(dataclasses.replace(nhwc, status="kept"), half) == pair(nhwc, HALF) == []
    assert pair(nhwc, dataclasses.replace(half, numerics=BAD)) == []
    assert pair(nhwc, dataclasses.replace(half, numerics=BAD), dataclasses.replace(half, transform="amp_fp16")) == [
        "channels_last",
        "amp_fp16",
    ]
    assert pair(dataclasses.replace(nhwc, status="not applicable"), half) == []
    assert pair(dataclasses.replace(nhwc, round=2), half) == []


def open_verdict(transform: str, gain: float = 0.02, high: float = 0.05, **changes: object) -> Verdict:
    timing = Check(passed=False, detail="noise", numbers={"gain": gain})
    interval = Interval(low=-0.02, high=high, basis="6 pairs")
    return dataclasses.replace(SLOW, transform=transform, timing=timing, gain=interval, **changes)


def test_noise_that_may_hide_a_large_gain_gets_one_more_turn() -> None:
    hidden = open_verdict("amp_bf16", high=0.4)
    assert again(GRAPHS, hidden) == ["amp_bf16"]
    assert again(GRAPHS, hidden, dataclasses.replace(hidden, round=2)) == []
    assert again(GRAPHS, open_verdict("amp_bf16", high=0.05)) == []
    assert again(GRAPHS, dataclasses.replace(hidden, status="reverted")) == []


def test_what_is_left_open_and_rather_faster_is_tried_as_one(declare: Callable[..., None]) -> None:
    both = [Recommendation(transform=name) for name in ("amp_bf16", "fused_optimizer", "set_to_none")]
    first, second = open_verdict("amp_bf16"), open_verdict("fused_optimizer")

    def left(*verdicts: Verdict, candidates: Sequence[Recommendation] = both) -> list[str]:
        return [c.transform for c in planner.left_open(verdicts, candidates, 0.01)]

    assert left(first, second) == ["amp_bf16", "fused_optimizer"]
    assert left(first) == []
    assert left(open_verdict("amp_bf16", gain=0.009), open_verdict("fused_optimizer", gain=0.009)) == []
    dear = [both[0], Recommendation(transform="compile")]
    assert left(first, open_verdict("compile"), candidates=dear) == []
    slower = open_verdict("fused_optimizer", gain=-0.01)
    reverted = dataclasses.replace(second, status="reverted")
    wrong = dataclasses.replace(second, numerics=BAD)
    for other in (
        slower,
        reverted,
        wrong,
        dataclasses.replace(second, round=2),
        dataclasses.replace(second, status="kept"),
    ):
        assert left(first, other) == []
    rivals = [both[0], Recommendation(transform="fused_optimizer")]
    declare("fused_optimizer", conflicts=("amp_bf16",))
    assert left(first, second, candidates=rivals) == []
    kept = dataclasses.replace(GRAPHS, transform="set_to_none")
    beside = [both[0], Recommendation(transform="fused_optimizer")]
    declare("fused_optimizer", conflicts=("set_to_none",))
    assert left(kept, first, second, candidates=beside) == []
    assert (
        left(first, second, candidates=[both[0], Recommendation(transform="fused_optimizer", parameters={"a": "b"})])
        == []
    )
