"""What is tried a second time after a later change was kept."""

from __future__ import annotations

import dataclasses

from advisor.core.findings import Recommendation
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


def test_wrong_ineffective_or_slow_to_switch_on_is_not_tried_again() -> None:
    bad = Check(passed=False, detail="")
    for change in ({"numerics": bad}, {"effect": bad}, {"timing": None}, {"first_step_us": 40e6}, {"status": "failed"}):
        assert again(dataclasses.replace(SLOW, **change), GRAPHS) == []


def test_a_rival_of_what_is_kept_is_left_alone() -> None:
    rival = [Recommendation(transform="amp_bf16", conflicts=("cuda_graphs",))]
    assert planner.second_look([SLOW, GRAPHS], rival) == ()
