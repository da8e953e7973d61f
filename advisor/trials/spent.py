"""Where a search's time goes: wall-clock seconds by phase, without gaps, so that they add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

BEFORE = "until the script's first step"  # of the process that is profiled; what the machine can do is measured there too, once
PROFILE = "first profile"  # from that step on, as --max-time counts
# In the process of a search. The start is all before the first trial: Python, data, model, warm-up, and what was kept before, which
# each process captures anew.
START, LOOK, GATE, SETTLE = "starting processes", "finding places", "correctness check", "warm-up of changes"
FIRST = "first steps with changes"  # compile, capture, tuning: in the gate, where each change is on for the first time
TRACE, BLOCKS, UNDO = "effect checks", "timed blocks", "switching changes off"
# Whole processes of another kind.
ROUNDS, PAIRS, STACK = "later profiles", "pairs of fresh runs", "final comparison"
ON_TOP, LEFT_OUT = "changes on top of the plan", "plan without each change"
RANKS = "several ranks"  # that they train as one process does, and what is tried in all of them
MEMORY = "less memory"
REST = "rest"  # rules, files, the supervisor's own

PHASES = (
    BEFORE,
    PROFILE,
    START,
    LOOK,
    GATE,
    FIRST,
    SETTLE,
    TRACE,
    BLOCKS,
    UNDO,
    ROUNDS,
    PAIRS,
    STACK,
    ON_TOP,
    LEFT_OUT,
    RANKS,
    REST,
)


class Stopwatch:
    """One phase runs at any time; `enter` ends it and begins the next."""

    def __init__(self, phase: str, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._phase = now, phase
        self._since = now()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        """From now on time is this phase's."""
        now = self._now()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def charge(self, phase: str, seconds: float) -> None:
        """So much of the running phase was another's."""
        self.enter(self._phase)
        moved = min(seconds, self._seconds[self._phase])
        self._seconds[self._phase] -= moved
        self._seconds[phase] = self._seconds.get(phase, 0.0) + moved

    def seconds(self) -> dict[str, float]:
        """By phase so far, the running one included."""
        self.enter(self._phase)
        return dict(self._seconds)


def of_process(wall_s: float, told: Mapping[str, float]) -> dict[str, float]:
    """A search process's time: what its phases told, and the rest, before its first word and after its last, as its start."""
    return {**told, START: told.get(START, 0.0) + max(0.0, wall_s - sum(told.values()))}


def whole(total_s: float, parts: Mapping[str, float]) -> dict[str, float]:
    """`parts` in the order of `PHASES`, without empty ones; what is missing to `total_s` is the rest."""
    rest = max(0.0, total_s - sum(parts.values()))
    return {phase: spent for phase in PHASES if (spent := rest if phase == REST else parts.get(phase, 0.0)) > 0.0}
