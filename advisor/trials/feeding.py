"""What feeds the loop, where the device waits for it beside the kept changes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.core import transform_table
from advisor.core.findings import Recommendation
from advisor.core.profile import StepProfile
from advisor.core.verdict import Status, Verdict
from advisor.trials.statistics import WAITS_FRAC

WORKERS = "loader_workers"
WHY = "with the kept changes the step waits for its loader"


def more_workers() -> Recommendation:
    """As no rule asks for it: of the plain step they see that its batches are there in time."""
    row = transform_table.row(WORKERS)
    return Recommendation(transform=WORKERS, title=row.title, semantics=row.semantics, reason=WHY)


def waits(verdicts: Sequence[Verdict], profile: StepProfile | None) -> bool:
    """Whether the step waits for its loader: with what is kept, as its blocks say, or by itself already.

    A device that needs a third of the time is soon faster than its loader, and then the clock on the wall tells the loader's rate: behind two
    workers a DeepLabV3+ took 160 ms a step on an H200, and with a plan 115, of which the device's own were 45.
    """
    blocks = [v.blocks for v in verdicts if v.status == Status.KEPT and v.blocks.device_on_us]
    seen = [(math.fsum(b.device_on_us), math.fsum(b.on_us[: len(b.device_on_us)])) for b in blocks]
    return any(own < (1 - WAITS_FRAC) * step for own, step in seen) or (profile is not None and profile.starved)
