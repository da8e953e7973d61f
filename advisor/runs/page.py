"""A run folder as an HTML page."""

from __future__ import annotations

from pathlib import Path

from advisor.core import storage
from advisor.core.findings import Findings
from advisor.core.held import HELD_FILE, MemoryLook
from advisor.core.profile import StepProfile
from advisor.core.verdict import TrialLog


def report_page(run_dir: Path, profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> str:
    """The report, with the timeline and the memory of a step where the folder has them."""
    from advisor.profiling.after import timeline
    from advisor.reporting.html import report_html

    look = storage.load(run_dir / HELD_FILE, MemoryLook) if (run_dir / HELD_FILE).is_file() else None
    return report_html(profile, findings, trials, timeline.of_run(run_dir, profile.environment), look)
