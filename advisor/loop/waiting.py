"""What a process of the script has come to, what is waited for, and when there is nothing more to wait for. No torch here.

The process tells in events: that Python has started, that torch is imported and advisor attached, that a first step was seen, or that
advisor has switched itself off. One in which nothing can be measured any more would train on to its end: where that training is for
nobody, it is ended. So is one that is sure to have no steps. A script that may still be making its data ready is let be, and what is
waited for is said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from advisor.core.units import counted
from advisor.loop.session import Session, tell

# Events of the child; bootstrap/sitecustomize.py writes some of them itself.
STARTED, IMPORTED, ATTACHED, STEP, FAULT = "started", "imported", "attached", "step", "fault"
CALLED = "called"  # the model, for the first time; its `search`: cuDNN times its algorithms in the first step
WAITING = "waiting"  # the launcher's own event: what is waited for

TELL_S = 15.0  # until it is first said what is waited for; then twice as long each time
ASKED_S = 12.0  # for a process to end that the user has interrupted; cuDNN's search may keep it from hearing of that for longer
FAULT_S = 10.0  # for a process in which advisor has switched itself off to end by itself, its partial results written
# A script imports what it trains with in its first seconds. Some read their data first, so a long time is left for torch; CuPy without
# torch is rarely there for anything but a loop of its own.
CUPY_TOLD_S, CUPY_S, TORCH_S = 3.0, 30.0, 600.0
STARTS, START_MARGIN_S = 4.0, 20.0
INTERRUPTED = "interrupted"
SEARCHES = "; cudnn.benchmark is on, so cuDNN times its algorithms in the first step"
OTHERS_WORKED = "processes that the script started did the work and joined no process group; call the function that trains in the script itself"


def tell_called(session: Session, torch: Any) -> None:
    """The model is called for the first time; `torch` is the script's module: waits are looked at before there is one."""
    tell(session, CALLED, search=torch.backends.cudnn.benchmark and torch.cuda.is_initialized())


def others_worked() -> list[str]:
    """That processes which this one has started did the work: those that have ended took more of the CPU's time than it did itself."""
    used = os.times()
    return [OTHERS_WORKED] if used.children_user + used.children_system > used.user + used.system else []


def patience_s(first_step_s: float | None) -> float:
    """How long a process may take to its first step where an earlier one of the same script took so long; 0 where that is not known.

    The machine may have become busy, and files that were read before may have to be read again.
    """
    return 0.0 if first_step_s is None else STARTS * first_step_s + START_MARGIN_S


class WaitStage(IntEnum):
    """How far a process has come."""

    NOTHING = 0  # no Python of the command has told that it reads advisor's orders
    PYTHON = 1  # it has started, and not imported torch or CuPy
    TORCH = 2  # advisor is attached
    MODEL = 3  # the script has called its model
    STEPS = 4


class Waiting:
    """Fed with a process's events; `line` and `over` are asked again and again while it runs.

    Args:
        watched: advisor is in the process at all; nothing is waited for in another.

    `fault` is what advisor has switched itself off for, "" while it has not; `gave_up` is why `over` says that the process is to end.
    """

    def __init__(self, session: Session, *, watched: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._session, self._watched, self._clock = session, watched, clock
        self._began = clock()
        self._next_s = TELL_S
        self._cupy: float | None = None  # when it was imported
        self._cupy_told = False
        self._faulted = self._asked = 0.0
        self._searches = False  # cuDNN, in the first step
        self.stage = WaitStage.NOTHING
        self.first_step_s: float | None = None  # from the start
        self.fault = self.gave_up = ""

    @property
    def thrown_away(self) -> bool:
        """Whether this training is for a measurement alone."""
        return self._watched and self._session.mode != "run" and not self._session.keep_running

    def told(self, event: Mapping[str, Any]) -> None:
        """One event of the process."""
        kind = event.get("event")
        if kind == STARTED:
            self.stage = max(self.stage, WaitStage.PYTHON)
        elif kind == IMPORTED and self._cupy is None:
            self._cupy = self._clock()
        elif kind == ATTACHED:
            self.stage = max(self.stage, WaitStage.TORCH)
        elif kind == CALLED:
            self.stage, self._searches = max(self.stage, WaitStage.MODEL), bool(event.get("search"))
        elif kind == STEP and self.first_step_s is None:
            self.stage, self.first_step_s = WaitStage.STEPS, self._clock() - self._began
        elif kind == FAULT and not self.fault:
            self.fault, self._faulted = str(event.get("error")), self._clock()

    def line(self) -> str:
        """What is waited for, when it is time to say so; "" else."""
        if self.stage is WaitStage.STEPS or self.fault or not self._watched:
            return ""
        now = self._clock()
        waited_s = now - self._began
        at_once = self._alone and not self._cupy_told and now - (self._cupy or 0.0) >= CUPY_TOLD_S
        if waited_s < self._next_s and not at_once:
            return ""
        self._cupy_told = self._cupy_told or at_once
        self._next_s = 2 * max(waited_s, TELL_S)
        return f"{waited_s:.0f} s: {missing(self.stage, cupy=self._alone)}{SEARCHES * self._searches}; waiting (Ctrl-C ends it)"

    def asked(self) -> None:
        """The user has asked for an end."""
        self._asked = self._asked or self._clock()

    def over(self) -> str:
        """Why the process is to end now: `fault`, what becomes `gave_up`, or the user; "" while there is something to wait for."""
        if not self.thrown_away:
            return ""
        now = self._clock()
        if self._asked and now - self._asked >= ASKED_S:
            return INTERRUPTED
        if self.fault:
            partial = self.stage >= WaitStage.TORCH  # one that was never attached has nothing to write
            return self.fault if now - self._faulted >= FAULT_S * partial else ""
        if not self.gave_up:
            self.gave_up = self.nothing_left(now)
        return self.gave_up

    @property
    def _alone(self) -> bool:
        """CuPy, and no torch."""
        return self._cupy is not None and self.stage < WaitStage.TORCH

    def nothing_left(self, now: float) -> str:
        waited_s, limit_s = now - self._began, self._session.first_step_s
        if self.stage is WaitStage.STEPS:
            return ""
        if self._alone and now - (self._cupy or 0.0) >= CUPY_S:
            return missing(self.stage, cupy=True)
        # A command that has not come to Python yet may stand in the queue of a cluster.
        if (0 < limit_s <= waited_s) or (self.stage is WaitStage.PYTHON and waited_s >= TORCH_S):
            return f"no training step within {counted(round(waited_s), 'second')}: {missing(self.stage)}"
        return ""


def missing(stage: WaitStage, *, cupy: bool = False) -> str:
    """Why a process that has come this far has shown no step. `cupy`: it has imported that, and not torch."""
    if cupy:
        return "the script uses CuPy without torch, and in such a loop no change can be switched while it runs"
    if stage is WaitStage.NOTHING:
        return "advisor found no Python process to enter: -I, -E or -S, a container or another machine keeps it out"
    if stage is WaitStage.PYTHON:
        return "the script has imported neither torch nor CuPy, so it has no training steps yet"
    if stage is WaitStage.MODEL:
        return "the script has called its model, and no training step has ended yet"
    return "no training step was seen yet; in a loop without an optimizer call advisor.step() after each step"
