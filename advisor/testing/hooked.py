"""This process hooked as a script's is, for as long as a step is measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from advisor.core.errors import AdvisorError
from advisor.loop import attach as attached
from advisor.loop import discover, hooks
from advisor.loop.discover import LOOK_STEPS
from advisor.loop.patches import Patches
from advisor.loop.period import MAX_PERIOD
from advisor.loop.session import Session
from advisor.loop.steps import StepWatcher
from advisor.loop.training import Training
from advisor.trials.kept import PATIENCE, RunDriver

# In which `advisor.enable` has found what its plan is about, or has given up: while another optimizer is alive (the test
# before's, the other model's) which calls make a step shows once they go on without it.
PLAN_CALLS = MAX_PERIOD + LOOK_STEPS + PATIENCE + 2


@contextmanager
def found_in(
    device: torch.device, session: Session, *, keep_inputs: bool
) -> Iterator[tuple[Training, StepWatcher, discover.Discovery]]:
    """The process is hooked inside: `watcher.mark()` ends a step, `training` fills up. All hooks are gone afterwards.

    Raises:
        AdvisorError: when the process is observed by `advisor` already.
    """
    if observed() and RunDriver.current is not None:
        raise AdvisorError(
            f"the plan that was enabled is not in effect after {PLAN_CALLS} calls of the step",
            expected="a step that trains: with a backward pass and an optimizer's step()",
            fix="Measure what the plan was made for, or call advisor.disable() before.",
        )
    if observed():
        raise AdvisorError("advisor observes this process already", fix="Run the tests without `advisor profile`.")
    patches = Patches()
    training = Training(device=device)
    try:
        watcher = hooks.attach(training, session, patches)
        discovery = discover.attach(training, watcher, keep_inputs=keep_inputs)
        # From the first mark on only marks count, and it begins the look at the modules.
        watcher.mark()
        yield training, watcher, discovery
    finally:
        patches.restore_all()


def observed() -> bool:
    """Advisor's own hooks are on: `advisor profile` runs the tests, or a plan's items are not all on yet."""
    other = attached.Attached.watcher
    return other is not None and other.patches.active
