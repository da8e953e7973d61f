"""Findings to recommendations: merged, ordered by what bounds the step, gated by machine state."""

from __future__ import annotations

import dataclasses

import pytest
from rule_files import RULE, write

from advisor.core.findings import Finding, Interval, Outcome, Semantics
from advisor.core.metrics import MetricTable
from advisor.rules import evaluate, load, recommend


def finding(rule, transform="", area="precision", high=0.5, low=0.0, **fields):
    gain = Interval(low=low, high=high, basis=f"basis of {rule}")
    return Finding(
        rule=rule, title=f"title of {rule}", area=area, severity=fields.pop("severity", "medium"),
        outcome=fields.pop("outcome", Outcome.FIRED), message=f"{rule} fired.", gain=gain, transform=transform, **fields,
    )  # fmt: skip


def transforms(found):
    return [item.transform for item in found]


def test_what_bounds_the_step_comes_first_whatever_the_gain():
    found = recommend(
        [
            finding("a", "compile", "fusion", 0.9), finding("b", "channels_last", "layout", 0.8), finding("c", "tf32", "precision", 0.7),
            finding("d", "cuda_graphs", "launch", 0.3), finding("e", "defer_sync", "sync", 0.2), finding("f", "loader_workers", "input", 0.1),
        ]
    )  # fmt: skip
    assert transforms(found) == ["loader_workers", "defer_sync", "cuda_graphs", "tf32", "channels_last", "compile"]


def test_within_a_stage_the_larger_bound_comes_first():
    assert transforms(recommend([finding("a", "x", high=0.1), finding("b", "y", high=0.2)])) == ["y", "x"]


def test_after_is_kept_across_stages_and_only_among_those_asked_for():
    found = recommend(
        [
            finding("a", "cuda_graphs", "launch", 0.9, after=("channels_last", "amp_bf16", "not_asked_for")),
            finding("b", "channels_last", "layout", after=("amp_bf16",)), finding("c", "amp_bf16"),
        ]
    )  # fmt: skip
    assert transforms(found) == ["amp_bf16", "channels_last", "cuda_graphs"]


def test_a_circle_in_hand_made_findings_ends():
    found = recommend([finding("a", "x", after=("y",)), finding("b", "y", after=("x",))])
    assert sorted(transforms(found)) == ["x", "y"]


def test_findings_for_one_transform_become_one_recommendation():
    (item,) = recommend(
        [
            finding(
                "a",
                "compile",
                "fusion",
                0.3,
                0.05,
                semantics=Semantics.REASSOCIATED,
                after=("x",),
                parameters={"mode": "a"},
            ),
            finding(
                "b",
                "compile",
                "fusion",
                0.2,
                0.10,
                semantics=Semantics.PRECISION,
                conflicts=("z",),
                parameters={"mode": "b"},
            ),
            finding("c", "compile", "launch", 0.4, semantics=Semantics.EXACT, severity="high"),
        ]
    )
    assert item.rules == ("c", "a", "b"), "the weightiest first"
    assert item.semantics is Semantics.PRECISION, "the most invasive one counts"
    assert item.predicted.high == pytest.approx(0.7), "areas add up, rules of one area do not"
    assert item.predicted.low == pytest.approx(0.10)
    assert (item.after, item.conflicts, item.parameters) == (("x",), ("z",), {"mode": "a"})
    assert item.reason.startswith("c fired.")


def test_merged_upper_bounds_never_pass_the_whole_step():
    (item,) = recommend([finding("a", "x", "fusion", 0.8), finding("b", "x", "launch", 0.8)])
    assert item.predicted.high == 1.0


def test_a_change_of_recipe_and_advice_and_quiet_rules_recommend_nothing():
    assert not recommend(
        [
            finding("a", "x", semantics=Semantics.TRAINING), finding("b", ""), finding("c", "y", outcome=Outcome.QUIET),
            finding("d", "z", outcome=Outcome.UNKNOWN),
        ]
    )  # fmt: skip


def test_a_fired_gate_marks_all_and_a_quiet_one_none():
    gate = finding("shared", "", "machine", gates=True)
    (item,) = recommend([gate, finding("a", "x")])
    assert item.gated_by == ("shared",)
    assert "title of shared" in item.reason
    for outcome in (Outcome.QUIET, Outcome.UNKNOWN):
        (item,) = recommend([dataclasses.replace(gate, outcome=outcome), finding("a", "x")])
        assert item.gated_by == ()


def test_kernels_of_a_starved_gpu_come_with_a_warning():
    table = MetricTable()
    table.set("idle_data_frac", 0.5)
    feed, kernel = recommend([finding("a", "loader_workers", "input"), finding("b", "compile", "fusion")], table)
    assert "waits for input 50 %" in kernel.reason
    assert "waits for input" not in feed.reason


def test_fired_findings_come_first_then_those_not_evaluated(tmp_path):
    rules = []
    for number, severity in enumerate(("low", "high", "medium", "high")):
        text = RULE.replace("id: slow-thing", f"id: rule-{number}").replace("severity: high", f"severity: {severity}")
        if number == 3:
            text = text.replace("metric: workers", "metric: prefetch_factor").replace(
                "_frac, workers]", "_frac, prefetch_factor]"
            )
        write(tmp_path, text, name=f"rule-{number}.yaml", cases=None)
    rules = load([tmp_path], shipped=False)
    table = MetricTable()
    table.set("idle_data_frac", 0.3)
    table.set("workers", 0)
    found = evaluate(rules, table)
    assert [item.rule for item in found] == ["rule-1", "rule-2", "rule-0", "rule-3"]
    assert found[-1].outcome is Outcome.UNKNOWN
    assert found[0].evidence[0].threshold == "above 5 %"
    assert found[0].evidence[0].provenance == "measured"


def test_a_deprecated_rule_is_kept_for_its_id_and_not_asked(tmp_path):
    rules = load([write(tmp_path, RULE.replace("status: stable", "status: deprecated"))], shipped=False)
    assert rules[0].id == "slow-thing"
    assert evaluate(rules, MetricTable()) == ()
