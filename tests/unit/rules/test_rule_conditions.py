"""Kleene's three-valued logic over metrics, thresholds in units, messages."""

from __future__ import annotations

import itertools

import pytest
from rule_files import spoiled, write

from advisor.core.findings import Outcome
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.rules import evaluate, load
from advisor.rules.conditions import All, AnyOf, MetricComparison, Not, always_read, truth
from advisor.rules.messages import faults, fill
from advisor.rules.units import parse_number

FLAGS = ("on_gpu", "graphed")


def flag(name):
    return MetricComparison(metric=name, operator="is", threshold=True, written="true")


def table(**values):
    metrics = MetricTable()
    for name, value in values.items():
        if value is not None:
            metrics.set(name, value)
    return metrics


@pytest.mark.parametrize(("a", "b"), [*itertools.product((True, False, None), repeat=2)])
def test_the_logic_is_kleenes(a, b):
    metrics = table(on_gpu=a, graphed=b)
    parts = tuple(flag(name) for name in FLAGS)
    both = False if False in (a, b) else None if None in (a, b) else True
    either = True if True in (a, b) else None if None in (a, b) else False
    assert truth(All(parts=parts), metrics) is both
    assert truth(AnyOf(parts=parts), metrics) is either
    assert truth(Not(part=parts[0]), metrics) is (None if a is None else not a)


@pytest.mark.parametrize(
    ("operator", "below", "equal", "beyond"),
    [("above", False, False, True), ("at_least", False, True, True), ("below", True, False, False), ("at_most", True, True, False)],
)  # fmt: skip
def test_comparisons_at_the_threshold(operator, below, equal, beyond):
    leaf = MetricComparison(
        metric="idle_frac", operator=operator, threshold=parse_number("5 %", BY_NAME["idle_frac"]), written="5 %"
    )
    assert [leaf.judge(value) for value in (0.0499, 0.05, 0.0501)] == [below, equal, beyond]


def test_a_threshold_of_57_per_cent_equals_a_measured_0_57():
    """0.57 and 57 * 0.01 differ in the last bit; the comparison must not."""
    threshold = parse_number("57 %", BY_NAME["idle_frac"])
    assert threshold != 0.57
    assert not MetricComparison(metric="idle_frac", operator="above", threshold=threshold, written="").judge(0.57)
    assert MetricComparison(metric="idle_frac", operator="at_most", threshold=threshold, written="").judge(0.57)


@pytest.mark.parametrize(
    ("metric", "text", "value"),
    [
        ("idle_frac", "12.5%", 0.125), ("step_us", "1.5 ms", 1500), ("step_us", "30 us", 30), ("step_us", "30 µs", 30),
        ("step_us", "500 ns", 0.5), ("state_bytes", "1 GiB", 2**30), ("state_bytes", "32 MB", 32e6), ("copy_gbps", "4.2 TB/s", 4200),
        ("workers", "8", 8), ("gpu_temperature", "85 °C", 85), ("power_w", "300 W", 300), ("idle_frac", "-3 %", -0.03),
    ],
)  # fmt: skip
def test_thresholds_carry_units(metric, text, value):
    assert parse_number(text, BY_NAME[metric]) == pytest.approx(value)


@pytest.mark.parametrize(
    ("metric", "text"),
    [("idle_frac", "5"), ("workers", "8 %"), ("step_us", "30"), ("step_us", "30 bananas"), ("workers", "1e3"), ("workers", "١٢"),
     ("workers", ""), ("workers", "--1"), ("step_us", "30 us us"), ("workers", "1" * 40)],
)  # fmt: skip
def test_other_numbers_are_refused(metric, text):
    with pytest.raises(ValueError, match=r".+"):
        parse_number(text, BY_NAME[metric])


def test_any_decides_although_another_part_is_missing(tmp_path):
    text = spoiled(
        ("requires: [idle_data_frac, workers]", "requires: [idle_data_frac]"),
        (
            "    - metric: workers\n      at_most: 0\n      because: another reason\n",
            "    - any:\n        - {metric: workers, at_most: 0, because: x}\n        - {metric: cpu_count, above: 4, because: x}\n",
        ),
    )
    rules = load([write(tmp_path, text)], shipped=False)
    assert tuple(always_read(rules[0].when)) == ("idle_data_frac",)

    def outcome(**values):
        (finding,) = evaluate(rules, table(**values))
        return finding.outcome, finding.missing

    assert outcome(idle_data_frac=0.2, workers=0.0)[0] is Outcome.FIRED
    assert outcome(idle_data_frac=0.2, workers=2.0, cpu_count=2.0)[0] is Outcome.QUIET
    assert outcome(idle_data_frac=0.2, workers=2.0) == (Outcome.UNKNOWN, ("cpu_count: was not gathered",))
    assert outcome(idle_data_frac=0.01)[0] is Outcome.QUIET, "false dominates in all"


def test_the_reason_of_a_missing_metric_is_told(tmp_path):
    rules = load([write(tmp_path)], shipped=False)
    metrics = table(workers=0.0)
    metrics.miss("idle_data_frac", "the trace was empty")
    (finding,) = evaluate(rules, metrics)
    assert finding.missing == ("idle_data_frac: the trace was empty",)
    (finding,) = evaluate(rules, table(workers=0.0))
    assert finding.missing == ("idle_data_frac: needs a CUDA GPU",)


@pytest.mark.parametrize(
    ("template", "values", "filled"),
    [
        ("{cpu_threads} threads on {cpu_count} cores", {"cpu_threads": 1.0, "cpu_count": 8.0}, "1 thread on 8 cores"),
        ("{cpu_threads} threads on {cpu_count} cores", {"cpu_threads": 8.0, "cpu_count": 1.0}, "8 threads on 1 core"),
        ("{workers} loader workers", {"workers": 1.0}, "1 loader worker"),
        ("of {epoch_batches:count} batches", {"epoch_batches": 1.0}, "of 1 batch"),
        ("{accumulation} backward passes", {"accumulation": 1.0}, "1 backward pass"),
        ("{optimizer} takes", {"optimizer": "1"}, "1 takes"),
        ("{idle_frac:pct} is", {"idle_frac": 1.0}, "100 % is"),
    ],
)
def test_of_one_the_noun_is_in_the_singular(template, values, filled):
    assert fill(template, table(**values)) == filled


def test_messages_fill_in_values_and_say_what_was_not_measured():
    template = (
        "{idle_frac:pct} of {step_us:time}, {optimizer}, {first_step_ratio:times}, {on_gpu}, {dram_gb_per_step:bytes}"
    )
    assert not list(faults(template))
    filled = fill(template, table(idle_frac=0.314, step_us=1234.0, optimizer="SGD", first_step_ratio=2.5, on_gpu=True))
    assert filled == "31 % of 1.23 ms, SGD, 2.5×, true, (not measured)"


def test_a_text_from_the_script_cannot_act_as_a_template():
    assert fill("{optimizer}", table(optimizer="{on_gpu} {0.__class__}")) == "{on_gpu} {0.__class__}"
