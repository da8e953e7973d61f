"""A step recorded for the numeric gate to replay: one like most others, or why there is none."""

from __future__ import annotations

from collections.abc import Generator

from advisor.loop.interval import BACKWARDS, SHAPES
from advisor.loop.training import StepEvent
from advisor.trials.numerics.gate import Gate

CAPTURE_TRIES = 4


def step_to_replay(gate: Gate, *, guides: bool) -> Generator[None, StepEvent, str]:
    """Record a step for the gate, like most others; why there is none, "" where there is one."""
    odd = ""
    for _ in range(CAPTURE_TRIES):
        gate.arm(guides=guides)
        event = yield
        odd = event.reason if event.reason in (SHAPES, BACKWARDS) else ""
        if gate.captured() and not odd:
            return ""
    if odd:
        return f"{CAPTURE_TRIES} steps were recorded, none like most others: the last had {odd}"
    return "no model call with gradients was seen to replay"
