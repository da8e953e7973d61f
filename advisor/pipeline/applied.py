"""What `apply` gives back, and where it leaves its plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from advisor.core.findings import Findings
from advisor.core.plan import Plan
from advisor.core.profile import StepProfile
from advisor.core.verdict import TrialLog
from advisor.pipeline.shared import Say


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """`log` and `plan` are None for a dry run, and when there was nothing to try; `plan_file` is where people find the plan."""

    run_dir: Path
    exit_code: int
    profile: StepProfile | None = None
    findings: Findings | None = None
    log: TrialLog | None = None
    plan: Plan | None = None
    plan_file: Path | None = None


def plan_beside(plan: Plan, run_dir: Path, say: Say) -> Path:
    """The proved plan in the working directory too; the file to name."""
    from advisor.trials import plans

    file, told = plans.beside(plan, run_dir, Path.cwd())
    if told:
        say(told)
    return file
