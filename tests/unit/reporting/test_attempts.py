"""What `advisor try` prints."""

import dataclasses

import pytest
import samples

from advisor.core.verdict import Check
from advisor.reporting.attempts import attempt_text


def test_the_verdict_comes_first_then_each_check_then_the_times():
    lines = attempt_text(samples.attempt()).splitlines()
    assert lines[0] == "idea.patch: kept"
    assert [line.split()[0] for line in lines if line.startswith("  ")][1:] == [
        "Effect", "Numerics", "Timing", "Step", "Speed-up", "Files", "Run",
    ]  # fmt: skip
    assert "  Effect    open: not seen" in lines
    assert "  Step      1.00 ms as it is, 0.500 ms with it  (fastest run of each)" in lines


def test_what_is_not_kept_has_no_speed_up():
    lost = dataclasses.replace(samples.attempt(), verdict="reverted", numerics=Check(passed=False, detail="NaN"))
    text = attempt_text(lost, color=True)
    assert "Speed-up" not in text
    assert "\x1b[31mfailed\x1b[0m: NaN" in text


def test_the_reason_is_told_once():
    slow = dataclasses.replace(samples.attempt(), reason="too noisy", timing=Check(passed=False, detail="too noisy"))
    text = attempt_text(slow)
    assert text.count("too noisy") == 1
    assert "  Timing    failed: as said above" in text


@pytest.mark.parametrize("width", [40, 72, 120])
def test_no_line_is_wider_than_the_terminal(width):
    long = dataclasses.replace(samples.attempt(), reason="word " * 60, notes=("note " * 40,))
    assert max(map(len, attempt_text(long, width).splitlines())) <= max(width, 72)
