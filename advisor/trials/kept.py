"""Changes that stand: a plan's kept items, applied at the earliest moment at which each one fits.

What needs no live object (flags, loaders) is on before the script's first step; what needs the model or the optimizer
follows at one of the first step boundaries, and what waits for others of the plan right behind the last of those. What does not
fit by then is left out, and the plain script runs there.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from advisor.core import transform_table
from advisor.core.errors import ExitCode
from advisor.core.plan import Plan, PlanItem
from advisor.core.stderr import say
from advisor.core.verdict import Status
from advisor.loop.attach import Attached, attach_training
from advisor.loop.hooks import after_optimizer_steps
from advisor.loop.patches import Patches
from advisor.loop.session import Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.training import StepEvent, Training
from advisor.transforms import registry
from advisor.transforms.base import Transform, Undo
from advisor.transforms.forward import ForwardStack
from advisor.trials import planfile

# Gradients that are zeroed in place, batch shapes that vary: some facts show only after a few steps.
PATIENCE = 6
# Optimizers that come within so many steps of a plan that stands, before they are no longer followed: some methods make one a task, and
# each look again takes a few steps.
HASTY_STEPS, MOST_HASTY = 50, 3


# What looks at the forward as the script has it, and what captures that.
_BARE, _CAPTURES = transform_table.having(lambda row: row.bare), transform_table.having(lambda row: row.captures)


def _bare_first(items: Sequence[PlanItem]) -> list[PlanItem]:
    """The items in their order, but that none which captures the forward stands before one that looks at it."""
    last = max((i for i, item in enumerate(items) if item.transform in _BARE), default=-1)
    early = [item for item in items[:last] if item.transform in _CAPTURES]
    return [*(item for item in items[: last + 1] if item not in early), *early, *items[last + 1 :]]


@dataclass(slots=True, eq=False)
class StandingChange:
    """One change that is on."""

    transform: Transform
    parameters: Mapping[str, str]
    undo: Undo
    sites: tuple[str, ...] = ()
    title: str = ""


@dataclass(slots=True, eq=False)
class KeptChanges:
    """Call `settle` at attach and at each boundary until it returns True; then `standing` is on and `left_out` says why not."""

    training: Training
    items: Sequence[PlanItem]
    find: Callable[[str], Transform] = registry.get
    standing: list[StandingChange] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    _waiting: list[PlanItem] = field(default_factory=list)
    _boundaries: int = -1

    def __post_init__(self) -> None:
        self._waiting = _bare_first(self.items)
        for item in self.items:
            awaited = [other for other in self._waiting if other.transform in self._waits_for(item)]
            if awaited:
                # Not behind all the others: some run the model's forward to find their places.
                self._waiting.remove(item)
                self._waiting.insert(self._waiting.index(awaited[-1]) + 1, item)

    def settle(self) -> bool:
        """Apply what fits by now; True when nothing waits any more."""
        self._boundaries += 1
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            reason = self._apply(item)
            if reason and self._boundaries < PATIENCE:
                self._waiting.append(item)
            elif reason:
                self.left_out[item.transform] = reason
        return not self._waiting

    @property
    def waiting(self) -> frozenset[str]:
        """Transforms that did not fit yet."""
        return frozenset(item.transform for item in self._waiting)

    def undo(self) -> None:
        """Take everything back, last first; what waits is dropped.

        Raises:
            The first error of a change that could not be taken back, after all were tried.
        """
        self._waiting.clear()
        everything = Undo([standing.undo.run for standing in self.standing])
        self.standing.clear()
        everything.run()

    def follow(self) -> None:
        """What stands is on in the models that the script trains by now.

        Raises:
            Whatever a change raises that cannot be taken back or put on again.
        """
        for standing in reversed(self.standing):
            standing.undo.run()
        for standing in self.standing:
            standing.undo = standing.transform.apply(self.training, standing.parameters)

    def _waits_for(self, item: PlanItem) -> tuple[str, ...]:
        try:
            return self.find(item.transform).waits_for
        except Exception:
            return ()  # `_apply` says why there is none

    def _apply(self, item: PlanItem) -> str:
        """Why it does not fit (yet); empty when it is on."""
        try:
            transform = self.find(item.transform)
            waits_for = {*transform.waits_for, *(_BARE if item.transform in _CAPTURES else ())}
            awaited = [other.transform for other in self._waiting if other.transform in waits_for]
            if awaited:
                return f"it waits for {', '.join(awaited)}"
            # A change of how loaders are made must be on before there is a loader to match.
            match = transform.match(self.training, item.parameters)
            if not match.applies and (transform.live or self._boundaries > 0):
                return match.reason or "it does not apply here"
            undo = transform.apply(self.training, item.parameters)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.standing.append(StandingChange(transform, item.parameters, undo, match.sites, transform.title))
        return ""


class RunDriver:
    """The run mode: applies a plan and gets out of the way. A `Training.on_step` listener until everything stands.

    From then on it is told of each optimizer's steps alone, because a script may go on with another: over the same model (a new phase),
    over another model of the same make (the next fold), or over something else (a probe, now and then). At the first step of one that
    it does not know it looks again, while all stands as it is; the plan goes over to the first two, and stays where it is for the third. What another thread
    trains meanwhile is passed over.
    """

    current: RunDriver | None = None  # the one of this process, for `disable`

    def __init__(
        self,
        training: Training,
        session: Session,
        watcher: StepWatcher,
        find: Callable[[str], Transform] = registry.get,
    ) -> None:
        self.training, self.session, self.watcher, self.find = training, session, watcher, find
        self.kept = KeptChanges(training, session.kept, find)
        self.kept.settle()
        self._model = ""  # hash of what the plan stands on
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._patches = Patches()
        self._steps = self._hasty = 0  # since it stands; optimizers that came soon after another
        self._second: StepWatcher | None = None  # while it looks again
        self._told: list[str] = []
        RunDriver.current = self
        training.on_step.append(self.on_step)
        atexit.register(self.let_go)

    def on_step(self, event: StepEvent) -> None:
        """One boundary; after the last one needed nothing of advisor's watching is left in the process, but for one hook.

        Raises:
            SystemExit: under `strict`, when the plan does not fit.
        """
        if self.looking():
            return
        settled = self.kept.settle()
        expected = self.session.model_hash
        if not self._model and self.training.roots:
            self._model = _hash_of(self.training)
            if expected and self._model != expected:
                self._give_up("the plan was proved on another model (modules, parameters or dtypes differ)")
                return
        if not settled:
            return
        problems = [f"{name} ({reason})" for name, reason in self.kept.left_out.items()]
        if problems and self.session.strict:
            self._give_up("these items of the plan do not fit: " + ", ".join(problems))
            return
        on = [standing.transform.id for standing in self.kept.standing]
        tell(self.session, "applied", transforms=on, left_out=self.kept.left_out)
        told = ["training with " + (", ".join(on) or "no change of the plan"), *(f"without {p}" for p in problems)]
        if told != self._told:
            self._told = told
            for line in told:
                say(line)
        self._leave()
        if on:
            self._wait()
        else:
            self.let_go()

    def looking(self) -> bool:
        """Discovery still observes every call. What it has wrapped it takes back first, in the order it went on: a change
        made on top of it now (another `zero_grad`) would keep it there for good.
        """
        return _looks(self.watcher)

    def undo(self) -> None:
        """The process is as without the plan."""
        atexit.unregister(self.let_go)
        self._patches.restore_all()
        if self._second is not None:
            self._second.detach()
            self._second.training.let_go()
        try:
            self.kept.undo()
        finally:
            self._leave()
            self.let_go()

    def let_go(self) -> None:
        """Hold nothing of the script's any more; what is on stays on, for good."""
        self.kept.standing.clear()
        ForwardStack.let_go(root.module for root in self.training.roots)
        self.training.let_go()

    def _wait(self) -> None:
        self._known.update(self.training.optimizers)
        self._steps, self._patches = 0, Patches()
        after_optimizer_steps(self._stepped, self._patches)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.watcher.elsewhere():
            return
        self._steps += 1
        if optimizer in self._known:
            return
        self._known.add(optimizer)
        self._hasty += self._steps < HASTY_STEPS
        self._patches.restore_all()
        if self._hasty > MOST_HASTY:
            say("the script makes new optimizers; the plan stays with the first ones")
            return
        self._look_again(optimizer)

    def _look_again(self, newcomer: torch.optim.Optimizer) -> None:
        training, self._second = attach_training(self.session)
        self._second.pass_over(optimizer for optimizer in self._known if optimizer is not newcomer)
        training.on_step.append(self._seen)

    def _seen(self, event: StepEvent) -> None:
        """A boundary while it looks again."""
        watcher = self._second
        if watcher is None or _looks(watcher):
            return
        self._second, training = None, watcher.training
        training.on_step.remove(self._seen)
        stood_on = {id(root.module) for root in self.training.roots}
        same = all(id(root.module) in stood_on for root in training.roots)
        if training.roots and (same or _hash_of(training) == self._model):
            self._go_over(training, watcher, same=same)
            self.on_step(event)
        else:  # something else: the plan stays where it is
            watcher.detach()
            training.let_go()
            self._wait()

    def _go_over(self, training: Training, watcher: StepWatcher, *, same: bool) -> None:
        """The plan is taken off, and is put on what trains now at its next boundaries."""
        self.kept.undo()
        trains = set(map(id, training.optimizers))
        before = [root for root in self.training.roots if all(root.module is not r.module for r in training.roots)]
        if same:  # what was trained in the phase before may be again, by its own optimizer
            training.roots.extend(before)
            training.optimizers.extend(optimizer for optimizer in self._known if id(optimizer) not in trains)
        else:
            ForwardStack.let_go(root.module for root in before)
        self.training.let_go()
        self.training, self.watcher = training, watcher
        self.kept = KeptChanges(training, self.session.kept, self.find)
        training.on_step.append(self.on_step)

    def _give_up(self, reason: str) -> None:
        self.kept.undo()
        tell(self.session, "applied", transforms=[], error=reason)
        if self.session.strict:
            say(f"{reason}; stopped, because of --strict")
            raise SystemExit(int(ExitCode.USAGE))
        say(f"{reason}; training goes on without the plan")
        self._leave()
        self.let_go()

    def _leave(self) -> None:
        for root in self.training.roots:
            root.args, root.kwargs, root.output, root.output_grads = (), {}, None, ()
        if self.on_step in self.training.on_step:
            self.training.on_step.remove(self.on_step)
        self.watcher.detach()


def _looks(watcher: StepWatcher) -> bool:
    discovery = Attached.discovery
    return discovery is not None and discovery.watcher is watcher and not discovery.finished


def _hash_of(training: Training) -> str:
    return planfile.model_hash(root.module for root in training.roots)


def attach_run(session: Session) -> None:
    """The run mode, in the child, once torch is imported."""
    training, watcher = attach_training(session)
    RunDriver(training, session, watcher)


def enable(plan: Plan, *, strict: bool = False) -> None:
    """Apply a plan in this process, before training begins. A second call replaces the first."""
    disable()
    items = tuple(item for item in plan.items if item.status == Status.KEPT)
    # No run folder: what `tell` would write there goes nowhere.
    session = Session(
        mode="run", run_dir=os.devnull, script=plan.script, kept=items, strict=strict, model_hash=plan.hashes.model
    )
    attach_run(session)


def disable() -> None:
    """Take back what `enable` or `advisor run` applied here; no error when nothing is."""
    driver, RunDriver.current = RunDriver.current, None
    if driver is not None:
        driver.undo()
