"""The numeric gate: does the training step still compute what it computed, on the live model, without moving it an inch.

At a step boundary each root module's latest call is replayed from saved state (replay.py, state.py): same inputs, same random
state, same output gradients; forward, backward, buffers. The output gradients have the captured ones' size and random signs. Backward
is linear in them, so any fault shows. A net that has learnt its batch by heart has gradients that cancel; it is judged like any other.
The plain step is replayed several times to learn its own noise (plain.py), then the step
with the change; how far they are apart (distance.py) is held against that noise (bounds.py), and before a change is refused more of
it is looked for (appeal.py). Where half precision or random numbers hide what is wrong, each layer is judged by itself (inside.py).
Where the step draws random numbers, it must still draw. A change of the optimizer is held against the
plain update (updates.py). Parameters, buffers, gradients, random state and plain attributes are put back, and a fingerprint over their
bits says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.loop.recorded import capture_next_step
from advisor.loop.steps import StepWatcher
from advisor.loop.training import RootModule, Training
from advisor.trials.numerics.appeal import close_by, more_noise
from advisor.trials.numerics.bounds import DRAW_FACTOR, joined
from advisor.trials.numerics.compared import compare
from advisor.trials.numerics.distance import distance
from advisor.trials.numerics.inside import UNCHECKED, by_layers, speaks
from advisor.trials.numerics.plain import MORE_SEEDS, SEEDS, PlainStep, observe
from advisor.trials.numerics.precision import ROUNDED
from advisor.trials.numerics.replay import ReplayedCall, Result, copied, detached, random_like
from advisor.trials.numerics.seen import alike, dropped
from advisor.trials.numerics.state import SavedState
from advisor.trials.numerics.updates import compare_update, state_of


@dataclass(frozen=True, slots=True)
class GateResult:
    """The check, and what the replays with the change on took beyond a usual one (compile, capture, tuning), microseconds."""

    check: Check
    first_us: float = 0.0


class Gate:
    """Compares the step with a change on and off. One capture serves one comparison.

    `arm()` at one boundary, then at the next `captured()` and `judge(...)`; `release()` frees what was captured.
    """

    def __init__(self, training: Training, watcher: StepWatcher | None = None) -> None:
        self.training, self.watcher = training, watcher
        self._autocast: dict[int, tuple[bool, torch.dtype]] = {}
        self._hooks: list[Any] = []
        self._calls: list[ReplayedCall] = []
        self._silent: dict[int, tuple[RootModule, Any, Any]] = {}  # the step's latest calls of models without gradients

    def arm(self, *, guides: bool = False) -> None:
        """Record the coming step's root calls, and with `guides` those of models that run without gradients."""
        self.release()
        kind = self.training.device.type

        # How autocast stands is known only at the call itself.
        def note(module: Any, args: Any, kwargs: Any) -> None:
            self._autocast[id(module)] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

        for root in self.training.roots:
            self._hooks.append(root.module.register_forward_pre_hook(note, with_kwargs=True))
        for guide in self.training.guides if guides else ():

            def keep(module: Any, args: Any, kwargs: Any, guide: RootModule = guide) -> None:
                if not torch.is_grad_enabled():
                    note(module, args, kwargs)
                    # Copies: the script may go on to change its batch in place.
                    self._silent[id(module)] = guide, *pytree.tree_map(copied, (args, kwargs))

            self._hooks.append(guide.module.register_forward_pre_hook(keep, with_kwargs=True))
        capture_next_step(self.training)

    def captured(self) -> bool:
        """Take what the step left; True when every root that backward reached can be replayed."""
        self._unhook()
        self._calls = []
        default = (False, torch.get_autocast_dtype(self.training.device.type))
        for root in self.training.roots:
            if id(root.module) not in self._autocast or not any(g is not None for g in root.output_grads):
                continue
            args, kwargs = pytree.tree_map(detached, (root.args, root.kwargs))
            autocast = self._autocast.get(id(root.module), default)
            self._calls.append(ReplayedCall(root, args, kwargs, list(root.output_grads), autocast))
        for key, (guide, args, kwargs) in self._silent.items():
            self._calls.append(ReplayedCall(guide, args, kwargs, [], self._autocast.get(key, default), learns=False))
        return bool(self._calls)

    def take(self) -> list[ReplayedCall]:
        """The calls that were captured, and the step's graph let go of: replays need the room."""
        self._let_go()
        return self._calls

    def release(self) -> None:
        """Let go of inputs, outputs and gradients."""
        self._unhook()
        self._calls, self._autocast, self._silent = [], {}, {}
        self._let_go()

    def _let_go(self) -> None:
        for root in self.training.roots:
            root.output, root.output_grads = None, ()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def judge(
        self,
        on: Callable[[], None],
        off: Callable[[], None],
        semantics: Semantics,
        precision: str = "half",
        computes_in: str = "fp64",
    ) -> GateResult:
        """Compare, and leave the change on.

        Args:
            on, off: switch the change; `on` must leave the loop as it will be timed.
            semantics: what the change promises.
            precision: the class that a PRECISION change computes in: half or tf32.
            computes_in: the coarsest class that the loop as it stands is known to round to inside its models (autocast
                in a forward, kept changes): fp64, fp32, tf32 or half.

        Raises:
            Whatever `on` or a replay with the change on raises; everything saved is put back before.
        """
        modules = [call.root.module for call in self.take()]
        if not all(bool(torch.isfinite(g).all()) for call in self._calls for g in call.grads if g is not None):
            on()
            return GateResult(Check(passed=None, detail="the plain step's gradients are NaN or infinite themselves"))
        for call in self._calls:
            call.grads = [None if g is None else random_like(g) for g in call.grads]
        with quiet(self.watcher), SavedState(modules, self.training) as saved:
            if any(_has_update_hooks(module) for module in modules):
                on()
                return GateResult(
                    Check(passed=None, detail="parameters update themselves in backward: no replay is possible")
                )
            plain = [observe(call, saved, semantics, precision, computes_in) for call in self._calls]
            hooks = [dict(o._optimizer_step_post_hooks) for o in self.training.optimizers]
            before = [state_of(o) for o in self.training.optimizers]
            saved.restore()
            on()
            saved.leave_to_change()
            findings, first_us = [], 0.0
            for step in plain:
                finding, extra = compare(step, semantics)
                finding = _looked_again(step, finding, semantics, on, off)
                findings.append(finding)
                first_us += extra
            saved.restore()
            saved.give_gradients()
            for optimizer, old, user_hooks in zip(self.training.optimizers, before, hooks, strict=True):
                if state_of(optimizer) != old:
                    findings.append(compare_update(optimizer, on, off, semantics, user_hooks))
        moved = saved.difference()
        if moved:
            findings.append(Check(passed=False, detail=f"the change moved {moved} outside the step"))
        return GateResult(joined(findings), first_us)


def _looked_again(
    step: PlainStep, finding: Check, semantics: Semantics, on: Callable[[], None], off: Callable[[], None]
) -> Check:
    """The finding after all that is looked at before a change is refused, or let pass where noise may hide what is wrong."""
    hidden = (step.random or step.target_class in ROUNDED) and semantics is not Semantics.EXACT and not step.unusable
    first = hidden and speaks(finding, random=step.random)
    if first:
        finding = by_layers(step, finding, semantics, on, off)
    refused = finding.passed is False and math.isfinite(finding.numbers.get("of_bound", 0.0))
    if refused and more_noise(step, semantics, on, off):
        _, unchecked, why = finding.detail.partition(UNCHECKED)
        finding, _ = compare(step, semantics)
        if finding.passed is False and unchecked:
            finding = dataclasses.replace(finding, detail=f"{finding.detail}{unchecked}{why}")
        if finding.passed is False and semantics is Semantics.REASSOCIATED:
            finding = close_by(step, finding, on, off)
        if hidden and not first and speaks(finding, random=step.random):
            finding = by_layers(step, finding, semantics, on, off)
    if finding.passed and step.random:
        finding = _draws(step, on, off) or finding
    return finding


def _draws(plain: PlainStep, on: Callable[[], None], off: Callable[[], None]) -> Check | None:
    """What is to be said of a change with which random layers always draw the same, or nothing; None of any other. Leaves it on.

    With it on, no two seeds' results are then farther apart than `DRAW_FACTOR` lets the nearest of the plain step's be, in any
    group. A change that draws other numbers passes, and one that leaves some of the randomness (some layers', or less of it), but for
    a single dropout that can be looked at.
    Where there are few ways to draw (a layer is left out or not) the plain step's nearest are alike, and any difference lets a change pass.
    """
    repeats = {g: max(d.l2.get(g, 0.0) for d in plain.repeats) for g in plain.base.groups}
    nearest = {g: min((d.l2.get(g, 0.0) for d in (*plain.seeds, *plain.draws)), default=0.0) for g in repeats}
    told = {g: value for g, value in nearest.items() if value > DRAW_FACTOR**2 * repeats[g]}
    name = plain.call.root.name
    first, second, stuck = _two_draws(plain)
    if stuck:
        off()
        stuck -= _two_draws(plain)[2]
        on()
        for one in stuck:
            detail = f"{name}: {one} drops the same whatever the seed"
            return Check(passed=False, detail=detail, numbers={"of_bound": math.inf})
    others = SEEDS[1:] if told else (0, *SEEDS[1:], *MORE_SEEDS)  # the first two may be alike by chance
    for seed in others:
        found = distance(second if seed == SEEDS[1] else plain.again(reseed=seed, lift=plain.lift), first)
        if found.broken or any(DRAW_FACTOR * found.l2[g] > value for g, value in told.items()):
            return None
        if not told and plain.differs(found):
            return None
    detail = f"{name}: random layers draw nothing, or the same whatever the seed"
    return Check(passed=False, detail=detail, numbers={"of_bound": math.inf})


def _two_draws(plain: PlainStep) -> tuple[Result, Result, set[str]]:
    """The results of two seeds, and dropouts that drop the same in both, which what others draw hides from end to end."""
    with dropped(plain) as drawn:
        first = plain.again(reseed=SEEDS[0], lift=plain.lift)
        ends = {name: len(calls) for name, calls in drawn.items()}
        second = plain.again(reseed=SEEDS[1], lift=plain.lift)
    module = plain.call.root.module
    stuck = {n for n, end in ends.items() if alike(module.get_submodule(n), drawn[n][:end], drawn[n][end:])}
    return first, second, stuck


@contextlib.contextmanager
def quiet(watcher: StepWatcher | None) -> Iterator[None]:
    """The watcher's hooks do not take replays for training."""
    if watcher is None:
        yield
        return
    before, watcher.patches.active = watcher.patches.active, False
    try:
        yield
    finally:
        watcher.patches.active = before


def _has_update_hooks(module: torch.nn.Module) -> bool:
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())
