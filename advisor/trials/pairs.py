"""A trial in pairs of fresh processes, of what must be on from the script's start: loader workers, process groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from advisor.core.findings import Recommendation, Semantics
from advisor.core.plan import PlanItem
from advisor.core.verdict import Blocks, Check, Status, Verdict
from advisor.trials import budget, losses, records, spent
from advisor.trials.flow import every_us
from advisor.trials.fresh import FreshRuns
from advisor.trials.records import Measurement
from advisor.trials.statistics import PROCESS_STAGES, Decision, decide


@dataclass(slots=True, eq=False)
class PairsOfRuns:
    """Runs without the candidate and with it; pair i is (off[i], on[i])."""

    off: list[Measurement] = field(default_factory=list)
    on: list[Measurement] = field(default_factory=list)

    @property
    def times_us(self) -> list[tuple[float, float]]:
        # Epoch starts count here: they are what worker processes make longer or shorter.
        off, on = every_us((self.off, self.on))
        return list(zip(map(fmean, off), map(fmean, on), strict=True))


def try_in_pairs(
    runs: FreshRuns,
    candidate: Recommendation,
    kept: Sequence[PlanItem],
    *,
    min_gain: float,
    max_pairs: int,
    until: float,
) -> Verdict | None:
    """The verdict on a candidate on top of `kept`; None when the search is over before there is one.

    Args:
        until: `time.time()` at which no further pair begins.
    """
    pairs = PairsOfRuns()
    found = _decided(runs, candidate, kept, pairs, min_gain=min_gain, max_pairs=max_pairs, until=until)
    if found is None:
        return None
    status, reason, numerics = found.status, found.reason, None
    if status == Status.KEPT:
        numerics = losses.compare(
            [m.losses for m in pairs.off],
            [m.losses for m in pairs.on],
            precision=candidate.semantics is Semantics.PRECISION,
        )
        if numerics.passed is False:
            status, reason = Status.REVERTED, f"it changes the training: {numerics.detail}"
        elif numerics.passed is None:
            status, reason = Status.INCONCLUSIVE, f"its losses could not be compared: {numerics.detail}"
    times_us = pairs.times_us
    return records.verdict_on(
        candidate,
        status,
        reason,
        gain=found.gain,
        effect=Check(passed=True, detail="on from the start in fresh runs") if pairs.on else None,
        numerics=numerics,
        timing=Check(passed=status == Status.KEPT, detail=reason) if times_us else None,
        blocks=Blocks(
            off_us=tuple(off for off, _ in times_us),
            on_us=tuple(on for _, on in times_us),
            steps_per_block=min((len(m.every_us) for m in (*pairs.off, *pairs.on)), default=0),
        ),
    )


def _decided(
    runs: FreshRuns,
    candidate: Recommendation,
    kept: Sequence[PlanItem],
    pairs: PairsOfRuns,
    *,
    min_gain: float,
    max_pairs: int,
    until: float,
) -> Decision | None:
    """Run pairs, in ABBA order, until they decide; they are added to `pairs`."""
    item = PlanItem(transform=candidate.transform, status=Status.KEPT, parameters=dict(candidate.parameters))
    script, title = runs.script, records.title_of(candidate)

    def ended(status: Status, reason: str) -> Decision:
        return Decision(status, None, None, reason)

    while time.time() < until:
        number = len(pairs.on) + 1
        arms: dict[bool, Measurement] = {}
        for on in (False, True) if number % 2 else (True, False):
            script.say(f"{title}: fresh runs, pair {number}, {'with' if on else 'without'} it")
            found = runs.measure(spent.PAIRS, (*kept, item) if on else kept)
            if script.over:
                return None
            if found is None:
                if on:
                    return ended(Status.FAILED, f"a fresh run with it gave no measurement: {runs.why_none}")
                return ended(
                    Status.INCONCLUSIVE, f"the script gave no measurement in a fresh run without it: {runs.why_none}"
                )
            arms[on] = found
        if candidate.transform not in arms[True].applied:
            return ended(Status.NOT_APPLICABLE, arms[True].left_out.get(candidate.transform, "it was not applied"))
        pairs.off.append(arms[False])
        pairs.on.append(arms[True])
        times_us = pairs.times_us
        if len(times_us) == 2 and all(on >= off for off, on in times_us):
            return ended(Status.REVERTED, "no faster in either of two pairs of fresh runs")
        decision = decide(times_us, min_gain, max_pairs=min(max_pairs, PROCESS_STAGES[-1]), stages=PROCESS_STAGES)
        if decision.status != Status.MORE:
            return decision
    return ended(Status.INCONCLUSIVE, budget.LATE)
