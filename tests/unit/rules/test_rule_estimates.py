"""Gain expressions: what is computed, what is unknown, and what cannot be written at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.core.metrics import MetricTable
from advisor.rules.estimate import ExpressionError, Gain, parse


def table(**values):
    metrics = MetricTable()
    for name, value in values.items():
        metrics.set(name, value)
    return metrics


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.3 * idle_frac", 0.12),
        ("1 - busy_frac", 0.4),
        ("2 - 1 - 1", 0.0),
        ("idle_frac / 2 / 2", 0.1),
        ("(1 + 1) * idle_frac", 0.8),
        ("min(idle_frac, busy_frac)", 0.4),
        ("max(idle_frac, 0.5)", 0.5),
        ("known(comm_exposed_frac, 0)", 0.0),
        ("known(busy_frac, 1)", 0.6),
        ("launch_us / step_us", 0.25),
        ("(launch_us + launch_us) / step_us", 0.5),
        ("20 us * kernels_per_step / step_us", 0.5),
        ("1 - 1 / 2.25", 1 - 1 / 2.25),
        ("conv_frac * 2", None),
        ("idle_frac / h2d_copies", None),
    ],
)
def test_values(text, expected):
    metrics = table(
        idle_frac=0.4, busy_frac=0.6, launch_us=500.0, step_us=2000.0, h2d_copies=0.0, kernels_per_step=50.0
    )
    value = parse(text).value(metrics)
    assert value == (pytest.approx(expected) if expected is not None else None)


ATTACKS = [
    "__import__('os').system('id')", "().__class__.__bases__", "idle_frac.__class__", "idle_frac[0]", "lambda: 1",
    "[x for x in (1,)]", "f'{idle_frac}'", "10 ** 10", "idle_frac ** 99999", "9 << 9", "1 if 1 else 2", "idle_frac; 1",
    "open('/etc/passwd')", "eval('1')", "'a' * 10", "{1: 2}", "idle_frac % 2", "1e999", "idle_frac = 2", "globals()",
    "\u0456dle_frac", "not idle_frac", "idle_frac and 1", "-idle_frac", "99999999999999999999", "min(idle_frac)",
    "known(0.5, 1)", "optimizer * 2", "on_gpu + 1", "", "(", "idle_frac)", "idle_frac idle_frac", "1 +", "min(1, 2",
]  # fmt: skip


@pytest.mark.parametrize("text", ATTACKS)
def test_what_is_no_arithmetic_on_numbers_is_refused(text):
    with pytest.raises(ExpressionError):
        parse(text)


@pytest.mark.parametrize("text", ["1 + " * 5000 + "1", "(" * 200 + "1" + ")" * 200, "(" * 30 + "1" + ")" * 30])
def test_long_and_deep_expressions_are_refused(text):
    with pytest.raises(ExpressionError):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "step_us",
        "step_us + idle_frac",
        "min(step_us, idle_frac)",
        "step_us * step_us",
        "copy_gbps / step_us",
        "20 us",
        "20 us + 1",
        "1 us us",
        "us",
        "idle_frac us",
    ],
)
def test_units_must_fit(text):
    with pytest.raises(ExpressionError):
        parse(text)


def test_the_column_of_a_fault_is_known():
    with pytest.raises(ExpressionError) as caught:
        parse("0.5 * idle_frc")
    assert caught.value.offset == 6


@given(st.text(max_size=60) | st.text(alphabet="idle_frac 0123.+-*/(),knowmx", max_size=60))
def test_any_text_is_read_or_refused_never_worse(text):
    try:
        expression = parse(text)
    except ExpressionError:
        return
    value = expression.value(table(idle_frac=0.4))
    assert value is None or isinstance(value, float)


def gain(low, high):
    return Gain(low=parse(low), high=parse(high), basis="all of it")


def test_a_sound_interval_carries_its_basis_and_no_complaint():
    interval, complaint = gain("0", "idle_frac").interval(table(idle_frac=0.4))
    assert (interval.low, interval.high, interval.basis, complaint) == (0.0, 0.4, "all of it", "")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [("0", "3 * idle_frac", (0.0, 1.0)), ("idle_frac - 1", "idle_frac", (0.0, 0.4)), ("idle_frac", "0.5 * idle_frac", (0.2, 0.2)),
     ("0", "idle_frac - 2", (0.0, 0.0))],
)  # fmt: skip
def test_impossible_bounds_are_clamped_and_told_as_a_fault_of_the_rule(low, high, expected):
    interval, complaint = gain(low, high).interval(table(idle_frac=0.4))
    assert (interval.low, interval.high) == pytest.approx(expected)
    assert "fault in the rule" in complaint
    assert complaint in interval.basis


def test_a_missing_metric_makes_the_gain_unknown_not_zero():
    assert gain("0", "idle_frac").interval(table()) == (None, "")
