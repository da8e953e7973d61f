"""A search as `advisor apply` makes it, without the profile before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from advisor.core.findings import Recommendation
from advisor.core.plan import Plan
from advisor.core.profile import StepProfile
from advisor.core.verdict import TrialLog
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import search
from advisor.trials.options import SearchOptions

OPTIONS = {field.name for field in fields(SearchOptions)}


def searched(
    command: ScriptCommand,
    recommendations: Sequence[Recommendation],
    profile: StepProfile | None,
    *,
    profiled_s: float = 0.0,
    before_s: float = 0.0,
    **options: Any,
) -> tuple[TrialLog, Plan, int]:
    """Try what is recommended: the log, the plan, the exit code. `options`: SearchOptions' own, and those of `search.begin`."""
    own = {name: value for name, value in options.items() if name in OPTIONS}
    rest = {name: value for name, value in options.items() if name not in OPTIONS}
    begun = search.begin(command, profile, options=SearchOptions(**own), **rest)
    begun.profiled_s, begun.before_s = profiled_s, before_s
    return begun.finish(recommendations)
