"""Joins the parts in a process that has imported CuPy and not torch: each mode of a session.

A script that imports torch later may train in either: at the first step of torch's `let_go` is called.
"""

from __future__ import annotations

import sys
from typing import Any

from advisor.core.errors import first_line
from advisor.cupy_loops.driver import CupyProfile
from advisor.cupy_loops.watch import Watcher
from advisor.profiling.session import Session, tell
from advisor.profiling.waiting import ATTACHED, FAULT, STEP

MODES = frozenset({"profile"})


class Attached:
    """What is attached to this process; `watcher` serves `advisor.step()`."""

    watcher: Watcher | None = None
    driver: Any = None


def attach(session: Session, module: Any = None) -> None:
    """Called right behind `import cupy`.

    Args:
        module: CuPy, or what stands for it.
    """
    module = module if module is not None else sys.modules["cupy"]
    if not hasattr(module, "ndarray"):
        return  # the user's own module of that name
    watcher = Watcher(module)
    watcher.patches.on_fault.append(lambda error: tell(session, FAULT, error=first_line(error)))
    Attached.watcher = watcher
    watcher.on_step.append(_first_step(session, watcher))
    tell(session, ATTACHED)
    Attached.driver = CupyProfile(module, session, watcher)


def _first_step(session: Session, watcher: Watcher) -> Any:
    def first_step(step: object) -> None:
        watcher.on_step.remove(first_step)
        tell(session, STEP)

    return first_step


def step() -> None:
    """`advisor.step()`: end a step here. Does nothing when advisor is not attached."""
    if Attached.watcher is not None:
        Attached.watcher.mark()


def let_go() -> None:
    """PyTorch's steps are the script's steps: nothing of this is left in the process."""
    driver, Attached.driver, Attached.watcher = Attached.driver, None, None
    if driver is not None:
        driver.let_go()
