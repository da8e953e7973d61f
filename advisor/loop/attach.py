"""Joins the parts in the child process, once torch is imported: what pipeline.attach builds each mode on.

    training, watcher = attach_training(session)     every mode: steps are found, `training` fills up

A driver of a mode (profiling/inside/driver.py's, for one) appends its listener to `training.on_step`; it is called at each step boundary with a
StepEvent, inside the user's last `Optimizer.step()` of the step, after discovery has updated `training`. From there it
may switch transforms, call `recorded.capture_next_step(training)`, read `watcher.interval` (what the finished interval
held), write files, and end the script with `stop.stop(session, reason)`. An exception of a listener switches advisor
off and leaves the training alone; StopTraining passes.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable

import torch

from advisor.core.errors import first_line
from advisor.loop import discover, hooks
from advisor.loop.patches import Patches
from advisor.loop.session import Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.training import StepEvent, Training
from advisor.loop.waiting import ATTACHED, FAULT, STEP


class Attached:
    """What is attached to this process; `watcher` serves `advisor.step()`."""

    training: Training | None = None
    watcher: StepWatcher | None = None
    discovery: discover.Discovery | None = None


def attach_training(session: Session) -> tuple[Training, StepWatcher]:
    """Hook the process. `training.roots`, `.optimizers`, `.loaders`, … are filled within the first three steps.

    `Attached.discovery.finished` says when; `discover.attach` has put its listener first. A fault in a hook takes all
    hooks back and says so on stderr and in `progress.jsonl` (event `fault`).
    """
    patches = Patches()
    patches.on_fault.append(lambda error: tell(session, FAULT, error=first_line(error)))
    training = Training(device=torch.device("cpu"))
    try:
        watcher = hooks.attach(training, session, patches)
        plain = session.mode == "profile" and not session.kept  # some changes need the inputs to find their places
        discovery = discover.attach(training, watcher, keep_inputs=not plain, infer=plain)
    except BaseException:
        patches.restore_all()
        raise
    training.on_step.append(_first_step(training, session))
    tell(session, ATTACHED)
    if Attached.watcher is None:
        atexit.register(_let_go)  # before any driver's, which are then called first
    Attached.training, Attached.watcher, Attached.discovery = training, watcher, discovery
    return training, watcher


def _first_step(training: Training, session: Session) -> Callable[[StepEvent], None]:
    """A listener that tells of the first step, and is gone."""

    def first_step(step: StepEvent) -> None:
        training.on_step.remove(first_step)
        tell(session, STEP)

    return first_step


def _let_go() -> None:
    """At the interpreter's end a model that the script let go of long ago is there for advisor alone no more.

    A process group that hangs on one has threads, and where such a thread has a tensor to free while the interpreter is taken apart, it
    cannot have the GIL any more and ends the process (`std::terminate`): a training that is done would exit with 134.
    """
    if Attached.training is not None and Attached.watcher is not None:
        Attached.watcher.detach()
        Attached.training.let_go()
        gc.collect()


def mark_step() -> None:
    """`advisor.step()`: end a step here. Does nothing when advisor is not attached."""
    if Attached.watcher is not None:
        Attached.watcher.mark()
