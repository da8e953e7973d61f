"""Joins the parts in a process that has imported CuPy and not torch: each mode of a session.

A script that imports torch later may train in either: at the first step of torch's `let_go` is called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from advisor.core.errors import first_line
from advisor.core.plan import PlanItem
from advisor.core.stderr import say
from advisor.cupy_loops.driver import CupyProfile
from advisor.cupy_loops.measure import CupyMeasure, seed_everything
from advisor.cupy_loops.standing import Standing, of_cupy
from advisor.cupy_loops.watch import Watcher
from advisor.loop.session import Session, tell
from advisor.loop.waiting import ATTACHED, FAULT, STEP


class Attached:
    """What is attached to this process; `watcher` serves `advisor.step()`."""

    watcher: Watcher | None = None
    driver: Any = None
    standing: Standing | None = None  # what `enable` and `advisor run` have put on


def attach(session: Session, module: Any = None) -> None:
    """Called right behind `import cupy`. A mode, or a plan, that a loop of CuPy has no part in is left to torch.

    Args:
        module: CuPy, or what stands for it.
    """
    module = module if module is not None else sys.modules["cupy"]
    if not hasattr(module, "ndarray"):
        return  # the user's own module of that name
    if session.mode == "run":
        if items := of_cupy(session.kept):
            put_on(items, module, session)
        return
    if session.mode not in ("profile", "measure"):
        return
    if session.mode == "measure" and session.kept and not of_cupy(session.kept):
        return
    tell(session, ATTACHED)  # before changes go on, which compile for seconds the first time
    standing = Standing(module)
    if session.seed is not None:
        seed_everything(module, session.seed)
    standing.put_on(session.kept)
    watcher = Watcher(module)
    watcher.patches.on_fault.append(lambda error: tell(session, FAULT, error=first_line(error)))
    Attached.watcher = watcher
    watcher.on_step.append(_first_step(session, watcher))
    if session.mode == "measure":
        Attached.driver = CupyMeasure(module, session, watcher, standing)
    else:
        Attached.driver = CupyProfile(module, session, watcher, standing)


def _first_step(session: Session, watcher: Watcher) -> Any:
    def first_step(step: object) -> None:
        watcher.on_step.remove(first_step)
        tell(session, STEP)

    return first_step


def put_on(items: Iterable[PlanItem], module: Any, session: Session | None = None) -> None:
    """Train with these from here on: `advisor run` and `advisor.enable`.

    Raises:
        SystemExit: under `--strict`, where one of them does not fit.
    """
    take_off()
    standing = Attached.standing = Standing(module)
    standing.put_on(items)
    if session is not None:
        tell(session, ATTACHED)
        tell(session, "applied", transforms=standing.names, left_out=standing.left_out)
    problems = [f"{name} ({reason})" for name, reason in standing.left_out.items()]
    if problems and session is not None and session.strict:
        say("these items of the plan do not fit: " + ", ".join(problems) + "; stopped, because of --strict")
        take_off()
        raise SystemExit(2)
    say("training with " + (", ".join(standing.names) or "no change of the plan"))
    for problem in problems:
        say(f"without {problem}")


def take_off() -> None:
    """Take back what `put_on` has put on; no error when nothing is."""
    standing, Attached.standing = Attached.standing, None
    if standing is not None:
        standing.undo()


def step() -> None:
    """`advisor.step()`: end a step here. Does nothing when advisor is not attached."""
    if Attached.watcher is not None:
        Attached.watcher.mark()


def let_go() -> None:
    """PyTorch's steps are the script's steps: nothing of this is left in the process."""
    driver, Attached.driver, Attached.watcher = Attached.driver, None, None
    if driver is not None:
        driver.let_go()
