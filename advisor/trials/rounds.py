"""Rounds of a search: what was kept changes where the time goes, so the rules are asked again.

Half precision and the first kernels make a step several times shorter, and its shares are other ones: LayerNorm, pooling or
the first convolution, below every threshold in fp32, may then be what is left to gain. So after each pass over candidates
that kept something, the script is profiled once more with all that is kept, and what the rules recommend now is tried, with
what was tried before and whose time may have come (`planner.second_look`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from advisor.analysis.predict import predict
from advisor.core.findings import Recommendation
from advisor.core.profile import StepProfile
from advisor.core.verdict import Verdict
from advisor.trials import planner

# The first one included. Nothing is left for a fourth on the models of docs/benchmarks.
MOST = 3
# A round that has shortened the step by less than this leaves its shares as they were: nothing new to ask.
LEAST_MOVED = 0.1
# Short windows: shares of a step are wanted, not a proof. The warm-up is what discovery and captures need to settle.
WARMUP, STEPS, TRACED = 6, 8, 2
# A further round is begun only with this much time left before the stack's turn: a start with the captures of the kept
# changes takes 10 to 20 s on an H200, a trial about 10 s.
LEAST_S = 30.0
PROFILE_TIMEOUT_S = 120.0


def moved(verdicts: Sequence[Verdict], number: int) -> bool:
    """Whether what round `number` kept has changed the step enough to look at it anew."""
    kept = [v for v in verdicts if v.round == number and v.status == "kept"]
    gains: dict[frozenset[str], float] = {}  # of those tried as one, one gain
    for verdict in kept:
        if verdict.gain is not None:
            gain = 0.5 * (verdict.gain.low + verdict.gain.high)
        elif verdict.together and verdict.timing is not None and "gain" in verdict.timing.numbers:
            gain = verdict.timing.numbers["gain"]
        else:
            return True
        gains[frozenset((verdict.transform, *verdict.together))] = gain
    return bool(kept) and math.prod(1.0 - gain for gain in gains.values()) <= 1.0 - LEAST_MOVED


def candidates(
    number: int,
    verdicts: Sequence[Verdict],
    known: Sequence[Recommendation],
    recommended: Sequence[Recommendation],
    profile: StepProfile | None,
    min_gain: float,
    waiting: Sequence[Recommendation] = (),
) -> tuple[Recommendation, ...]:
    """What round `number` tries, in order, each marked with the round.

    New is what no earlier round had among its candidates (`known`). What had its turn gets another when
    `planner.second_look` says so. What is predicted to stay below `min_gain` is left out; predictions are for `profile`'s
    step, and None without a profile. `waiting` has had no turn yet and is judged by its prediction for this step as well.
    """
    before = {planner.identity(item) for item in known}
    kept = {v.transform for v in verdicts if v.status == "kept"}
    new = [
        r
        for r in recommended
        if planner.identity(r) not in before and r.transform not in kept and planner.promises(r, min_gain)
    ]
    asked_again = {planner.identity(r): r for r in recommended}
    latest = {planner.identity(r): r for r in known}
    step = profile.step_us or profile.wall_us if profile is not None else None
    again = []
    step_us = step.median if step is not None else 0.0
    for candidate in (*waiting, *planner.second_look(verdicts, tuple(latest.values()), step_us)):
        found = asked_again.get(planner.identity(candidate))
        if found is None:
            predicted = predict(profile, candidate.transform, candidate.parameters) if profile is not None else None
            found = dataclasses.replace(candidate, predicted=predicted)
        if planner.promises(found, min_gain):
            again.append(found)
    return tuple(dataclasses.replace(r, round=number) for r in planner.order([*new, *again], profile))
