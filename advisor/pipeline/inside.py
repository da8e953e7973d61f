"""What runs in the script's own process: hooks, `advisor.enable`, `disable`, `step`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import use
from advisor.core.errors import AdvisorError
from advisor.core.transform_table import ROWS
from advisor.core.verdict import Status

if TYPE_CHECKING:
    from advisor.loop.session import Session


def attach(session: Session) -> None:
    """Called in the hooked process once torch is imported: hand over to the driver of the session's mode.

    Raises:
        AdvisorError: for a mode that does not exist.
    """
    use.hold(session.folder)
    if session.protect_files:
        from advisor.userfiles.protect import protect

        protect(session.protecting)
    from advisor.distributed import joining

    joining.join(session)
    if session.mode == "profile" and session.kept:
        from advisor.trials.profile import attach_kept_profile

        attach_kept_profile(session)
    elif session.mode == "profile" and session.hands_over:
        from advisor.trials.live.handed import attach_handed

        attach_handed(session)
    elif session.mode == "profile":
        from advisor.profiling.inside.driver import attach_profile

        attach_profile(session)
    elif session.mode == "search":
        from advisor.trials.live.driver import attach_search

        attach_search(session)
    elif session.mode == "memory":
        from advisor.trials.look import attach_look

        attach_look(session)
    elif session.mode == "across":
        from advisor.trials.across import attach_across

        attach_across(session)
    elif session.mode == "measure":
        from advisor.trials.measure import attach_measure

        attach_measure(session)
    elif session.mode == "run":
        from advisor.trials.kept import attach_run

        attach_run(session)
    else:
        raise AdvisorError(f"session mode {session.mode!r}", expected="profile, search, across, memory, measure or run")
    _prefer_torch()


def attach_to_cupy(session: Session) -> None:
    """Called in the hooked process once CuPy is imported and torch is not: hand over to what reads loops of CuPy alone.

    A mode that such a loop has not waits for torch.
    """
    from advisor.cupy_loops import attach as cupy_loop

    use.hold(session.folder)
    if session.protect_files:
        from advisor.userfiles.protect import protect

        protect(session.protecting)
    cupy_loop.attach(session)


def _prefer_torch() -> None:
    """Where a loop of CuPy's is watched as well, it is let go of at the first step of torch's."""
    cupy_loop = sys.modules.get("advisor.cupy_loops.attach")
    if cupy_loop is None:
        return
    from advisor.loop.attach import Attached

    training = Attached.training
    if training is not None:

        def first(step: object) -> None:
            training.on_step.remove(first)
            cupy_loop.let_go()

        training.on_step.insert(0, first)


def enable(plan: str | Path) -> None:
    """Apply a plan from inside a script, before training begins: `import advisor; advisor.enable("plan.yaml")`.

    Does nothing under `ADVISOR_DISABLE=1`, or when the script already runs under an `advisor` command.

    Raises:
        AdvisorError: when the plan cannot be read.
    """
    from advisor.loop.session import SESSION_VARIABLE, disabled

    if disabled() or os.environ.get(SESSION_VARIABLE):
        return
    from advisor.core import stderr
    from advisor.trials import planfile

    loaded, script = planfile.read(Path(plan)), sys.argv[0]
    use.hold(Path(plan).parent)
    if script.endswith(".py") and (other := planfile.another_script(loaded, script)):
        stderr.say(f"plan: {other}")
    kept_items = tuple(item for item in loaded.items if item.status == Status.KEPT)
    if any(item.transform in ROWS and ROWS[item.transform].cupy for item in kept_items):
        import cupy

        from advisor.cupy_loops import attach as cupy_loop

        cupy_loop.put_on(kept_items, cupy)
        return
    from advisor.trials import kept

    kept.enable(loaded)


def disable() -> None:
    """Take back what `enable` applied. Does nothing when nothing is applied."""
    cupy_loop = sys.modules.get("advisor.cupy_loops.attach")
    if cupy_loop is not None:
        cupy_loop.take_off()
    if "torch" in sys.modules:
        from advisor.trials import kept

        kept.disable()


def step() -> None:
    """Mark the end of a training step, where advisor cannot find it by itself. Costs nothing when not profiled."""
    cupy_loop = sys.modules.get("advisor.cupy_loops.attach")
    if cupy_loop is not None:
        cupy_loop.step()
    if "torch" in sys.modules:
        from advisor.loop.attach import mark_step

        mark_step()
