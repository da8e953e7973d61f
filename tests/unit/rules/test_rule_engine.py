"""Findings to recommendations: one prediction each, merged, gated by machine state."""

from __future__ import annotations

import dataclasses

import pytest
from rule_files import ADVICE, RULE, write

from advisor.core.findings import Finding, Interval, Outcome, Semantics
from advisor.core.metrics import SPECS, MetricTable
from advisor.rules import cards, evaluate, load, recommend


def finding(rule, transform="", area="precision", high=0.5, low=0.0, **fields):
    gain = Interval(low=low, high=high, basis=f"basis of {rule}")
    return Finding(
        rule=rule, title=f"title of {rule}", area=area, severity=fields.pop("severity", "medium"),
        outcome=fields.pop("outcome", Outcome.FIRED), message=f"{rule} fired.", gain=gain, transform=transform, **fields,
    )  # fmt: skip


def two_that_ask(tmp_path):
    write(tmp_path, cases=None)
    text = RULE.replace("id: slow-thing", "id: slow-too").replace("severity: high", "severity: low")
    text = text.replace('workers: "4"', 'workers: "9", more: "yes"')
    write(tmp_path, text, name="slow-too.yaml", cases=None)
    return load([tmp_path], shipped=False)


def waiting(**more):
    table = MetricTable()
    for name, value in {"idle_data_frac": 0.3, "workers": 0.0, **more}.items():
        if value is not None:
            table.set(name, value)
    return table


def test_findings_for_one_transform_become_one_recommendation():
    (item,) = recommend(
        [
            finding(
                "a",
                "compile",
                "fusion",
                0.3,
                0.05,
                parameters={"mode": "a"},
            ),
            finding(
                "b",
                "compile",
                "fusion",
                0.2,
                0.10,
                parameters={"mode": "b"},
            ),
            finding("c", "compile", "launch", 0.4, severity="high"),
        ]
    )
    assert item.rules == ("c", "a", "b"), "the weightiest first"
    assert (item.title, item.semantics) == ("torch.compile", Semantics.REASSOCIATED), "as its row says"
    assert item.parameters == {"mode": "a"}
    assert item.reason.startswith("title of c. c fired.")


def test_a_change_has_one_prediction_made_once_with_the_parameters_of_all_that_ask_for_it(tmp_path):
    rules, asked = two_that_ask(tmp_path), []

    def predict(transform, parameters):
        asked.append((transform, dict(parameters)))
        return Interval(low=0.1, high=0.4, basis="the profile")

    found = evaluate(rules, waiting(), predict=predict)
    assert asked == [("loader_workers", {"workers": "4", "more": "yes"})]
    assert [item.gain for item in found] == [Interval(low=0.1, high=0.4, basis="the profile")] * 2
    (item,) = recommend(found)
    assert (item.predicted, item.title) == (found[0].gain, "data loader workers")
    assert item.reason.startswith("A thing is slow. The GPU waits")
    assert cards(found)[0].predicted == item.predicted


def test_no_prediction_is_above_what_the_step_is_above_its_limit(tmp_path):
    (rule, *_) = two_that_ask(tmp_path)
    promised = Interval(low=0.3, high=0.9)

    def gain(limit_frac, asking=rule):
        (found,) = evaluate([asking], waiting(limit_frac=limit_frac), predict=lambda *_: promised)
        return found.gain.low, found.gain.high

    assert gain(0.4) == pytest.approx((0.3, 0.6))
    assert gain(0.8) == pytest.approx((0.2, 0.2))
    assert gain(1.2) == gain(None) == (0.3, 0.9), "a limit above the step is none"
    of_precision = dataclasses.replace(rule, semantics=Semantics.PRECISION)
    assert gain(0.8, of_precision) == (0.3, 0.9), "half precision has another limit"
    advice = write(tmp_path / "advice", ADVICE)
    (found,) = evaluate(load([advice], shipped=False), waiting(limit_frac=0.9))
    assert found.gain.high == pytest.approx(0.1)


def test_a_change_of_recipe_and_advice_and_quiet_rules_recommend_nothing():
    assert not recommend(
        [
            finding("a", "x", semantics=Semantics.TRAINING), finding("b", ""), finding("c", "y", outcome=Outcome.QUIET),
            finding("d", "z", outcome=Outcome.UNKNOWN),
        ]
    )  # fmt: skip


def test_a_fired_gate_marks_all_and_a_quiet_one_none():
    gate = finding("shared", "", "machine", gates=True)
    (item,) = recommend([gate, finding("a", "tf32")])
    assert item.gated_by == ("shared",)
    assert "title of shared" in item.reason
    for outcome in (Outcome.QUIET, Outcome.UNKNOWN):
        (item,) = recommend([dataclasses.replace(gate, outcome=outcome), finding("a", "tf32")])
        assert item.gated_by == ()


def test_a_message_tells_shares_of_the_step(tmp_path):
    text = RULE.replace("{idle_data_frac:pct}", "{idle_data_frac:pct}, convolutions take {conv_frac:pct} of the step")
    rules = load([write(tmp_path, text, cases=None)], shipped=False)
    (told,) = evaluate(rules, waiting(conv_frac=0.8, work_frac=0.5))
    assert told.message == "The GPU waits 30 %, convolutions take 40 % of the step."
    (told,) = evaluate(rules, waiting(conv_frac=0.8))
    assert "take 80 %" in told.message, "all of a traced step's work, where no step was timed"


def test_which_metrics_are_shares_of_device_time_is_what_they_say():
    told = {spec.name for spec in SPECS if spec.of_device_time}
    assert told >= {"conv_frac", "optimizer_frac", "memory_bound_frac", "fp64_frac", "average_frac", "tail_wave_frac"}
    assert not told & {"busy_frac", "idle_data_frac", "h2d_frac", "half_frac", "conv_efficiency", "loader_frac"}
    assert {spec.unit for spec in SPECS if spec.of_device_time} == {"frac"}


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


def test_what_mends_a_loop_of_pytorchs_is_no_advice_for_one_of_cupys(tmp_path):
    rules = two_that_ask(tmp_path)
    for found in evaluate(rules, waiting(cupy_alone=True)):
        assert (found.outcome, found.transform, found.message) == (Outcome.UNKNOWN, "", "")
        assert found.missing == ("cupy_alone: the loop is CuPy's, and the change is for PyTorch's",)
    for found in evaluate(rules, waiting(cupy_alone=False)):
        assert (found.outcome, found.transform) == (Outcome.FIRED, "loader_workers")
    for found in evaluate(rules, waiting(cupy_alone=True, idle_data_frac=0.0)):
        assert (found.outcome, found.missing) == (Outcome.QUIET, ())
