"""--select, --ignore and --set."""

from __future__ import annotations

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.metrics import MetricTable
from advisor.rules import apply_overrides, evaluate, load

RULES = load()


def ids(rules):
    return {rule.id for rule in rules}


def test_nothing_asked_for_is_everything():
    assert apply_overrides(RULES) == RULES


def test_rules_areas_and_globs_select():
    assert ids(apply_overrides(RULES, ["launch-bound"])) == {"launch-bound"}
    assert {rule.area for rule in apply_overrides(RULES, ["input", "sync"])} == {"input", "sync"}
    assert ids(apply_overrides(RULES, ["input/*"])) == ids(rule for rule in RULES if rule.area == "input")
    assert ids(apply_overrides(RULES, ["gpu-*"])) == {rule.id for rule in RULES if rule.id.startswith("gpu-")}


def test_ignore_is_stronger_than_select():
    assert "input-starved" not in ids(apply_overrides(RULES, ["input"], ["input-starved"]))


@pytest.mark.parametrize(
    ("select", "ignore", "fix"), [(["launch-bond"], [], "launch-bound"), ([], ["inputs"], "input")]
)
def test_a_name_that_is_none_is_told_with_the_nearest(select, ignore, fix):
    with pytest.raises(AdvisorError, match=f"Did you mean '{fix}'"):
        apply_overrides(RULES, select, ignore)


@pytest.mark.parametrize(
    "overrides", [["launch-bound.idle_launch_frac=40 %"], {"launch-bound.idle_launch_frac": "0.4"}]
)
def test_a_threshold_can_be_set(overrides):
    table = MetricTable()
    for name, value in {"idle_launch_frac": 0.3, "graphed": False, "fixed_shapes": True}.items():
        table.set(name, value)

    def fired(rules):
        return {item.rule for item in evaluate(rules, table) if item.outcome.value == "fired"}

    changed = apply_overrides(RULES, overrides=overrides)
    assert "launch-bound" in fired(RULES)
    assert "launch-bound" not in fired(changed)
    assert len(changed) == len(RULES)
    (rule,) = (rule for rule in changed if rule.id == "launch-bound")
    (found,) = evaluate([rule], table)
    assert found.evidence[0].threshold in ("above 40 %", "above 40 %")


def test_flags_texts_and_twice_compared_metrics_can_be_set():
    changed = {
        rule.id: rule
        for rule in apply_overrides(
            RULES,
            overrides=[
                "gpu-clock-drifting.clock_drift_frac.above=10 %",
                "launch-bound.graphed=true",
                "optimizer-unfused.optimizer=SGD, Lion",
            ],
        )
    }
    assert "10 %" in str(changed["gpu-clock-drifting"].when)
    assert "-3 %" in str(changed["gpu-clock-drifting"].when)
    assert "Lion" in str(changed["optimizer-unfused"].when)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("launch-bond.idle_launch_frac=1 %", "Did you mean 'launch-bound'"),
        ("launch-bound.idle_lunch_frac=1 %", "Did you mean 'idle_launch_frac'"),
        ("launch-bound.idle_launch_frac=5", "a number without a unit"),
        ("launch-bound.idle_launch_frac=1 GiB", "the unit 'GiB'"),
        ("launch-bound.graphed=maybe", "true or false"),
        ("gpu-clock-drifting.clock_drift_frac=1 %", "2 such thresholds"),
        ("launch-bound.idle_launch_frac.below=1 %", "0 such thresholds"),
        ("launch-bound=1 %", "RULE.METRIC=VALUE"),
        ("launch-bound.idle_launch_frac", "RULE.METRIC=VALUE"),
        ("launch-bound.idle_launch_frac=", "RULE.METRIC=VALUE"),
        ("launch-bound.__class__.x=1", "no threshold on '__class__'"),
    ],
)
def test_what_cannot_be_set_is_told(text, words):
    with pytest.raises(AdvisorError, match=words):
        apply_overrides(RULES, overrides=[text])
