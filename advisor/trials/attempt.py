"""What a search for one change came to, as `advisor try` tells it."""

from __future__ import annotations

from advisor.core.attempt import CHANGE, Attempt
from advisor.core.verdict import Status, TrialLog, Verdict


def of_search(change: str, log: TrialLog, run: str) -> Attempt:
    """What a search for this one change came to."""
    verdicts = [v for v in log.verdicts if v.transform == change]
    found = verdicts[-1] if verdicts else _untried(change, log)
    stack = log.stack if found.status == Status.KEPT else None
    return Attempt(
        kind=CHANGE,
        name=change,
        verdict=found.status,
        reason=found.reason,
        script=log.script,
        argv=log.argv,
        effect=found.effect,
        numerics=found.numerics,
        timing=found.timing,
        speedup=stack.speedup if stack else None,
        speedup_low=stack.speedup_low if stack else None,
        speedup_high=stack.speedup_high if stack else None,
        plain_us=stack.plain_us if stack else (),
        changed_us=stack.stack_us if stack else (),
        seconds=log.seconds,
        run=run,
        notes=log.notes,
        parameters=dict(found.parameters),
    )


def _untried(change: str, log: TrialLog) -> Verdict:
    reason = log.fault or "; ".join(log.notes) or "it was not tried"
    return Verdict(transform=change, status=Status.INCONCLUSIVE, reason=reason)
