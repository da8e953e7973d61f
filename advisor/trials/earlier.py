"""What the latest search of the same script on this machine has refused: a new one leaves it out of what is tried first, as one, and so
needs fewer trials, never fewer checks. Each change still has a trial of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.plan import PlanHashes
from advisor.core.verdict import Status
from advisor.trials import planfile, records

# Reasons that say what a change does, not how fast it was on that day.
SAID = ("applied, but without effect", "it changes the training")


def refused(run_dir: Path, script: str, argv: Sequence[str], here: PlanHashes) -> tuple[str, ...]:
    """Ids of changes; empty where no earlier run beside `run_dir` was of this script, with these arguments, machine and kernels."""
    found = [path for path in run_dir.parent.glob(f"*/{records.PLAN_FILE}") if path.parent != run_dir]
    for path in sorted(found, key=_age, reverse=True):
        with contextlib.suppress(AdvisorError, OSError):
            plan = planfile.read(path)
            known = plan.hashes
            alike = (known.script, known.environment, known.kernels) == (here.script, here.environment, here.kernels)
            if alike and (plan.script, tuple(plan.argv)) == (script, tuple(argv)):
                return tuple(
                    i.transform for i in plan.items if i.status == Status.REVERTED and i.reason.startswith(SAID)
                )
    return ()


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
