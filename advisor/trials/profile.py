"""The profile mode with kept changes on: what a later round of a search starts from.

The changes go on as `advisor run` puts them on; then the loop is looked at anew, because precision, layout and gradients
are no longer the script's own, and the usual profile follows. A captured forward is not looked into: its layout is that of
its weights. Replayed graphs are paused in the traced window: a replay
belongs to no operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from advisor.loop.attach import Attached, attach_training
from advisor.loop.discover import Discovery
from advisor.loop.session import Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.training import StepEvent, Training
from advisor.profiling.inside.driver import ProfileDriver
from advisor.transforms import capture, registry
from advisor.transforms.base import Transform
from advisor.transforms.graphs import calls
from advisor.transforms.patch import target_of
from advisor.trials.kept import KeptChanges

# Captured forwards run out of sight of the hooks that see autocast.
_AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


class KeptProfileDriver(ProfileDriver):
    """A `Training.on_step` listener: phase `kept` until all changes stand, then as ProfileDriver."""

    def __init__(
        self,
        training: Training,
        session: Session,
        watcher: StepWatcher,
        discovery: Discovery,
        find: Callable[[str], Transform] = registry.get,
    ) -> None:
        super().__init__(training, session, watcher, discovery)
        self.phase = "kept"
        self.kept = KeptChanges(training, session.kept, find)
        self.kept.settle()
        self._paused = contextlib.ExitStack()

    def on_step(self, step: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when everything is measured.
        """
        if self.phase != "kept":
            super().on_step(step)
            return
        # What the first look has wrapped it takes back before anything is put on top of it.
        if not self.discovery.finished or not self.kept.settle():
            return
        for name, reason in self.kept.left_out.items():
            self._notes.append(f"profiled without {name}, kept before: {reason}")
        tell(self.session, "applied", transforms=[s.transform.id for s in self.kept.standing])
        if any(capture.current(target_of(self.training, root)) for root in self.training.roots):
            # Inside a captured forward nothing is seen, and Dynamo would compile for the look and once more after it.
            self.discovery.seen.convs.clear()
        else:
            self.discovery.look_anew()
        for standing in self.kept.standing:
            self.discovery.seen.autocast = _AUTOCAST.get(standing.transform.id, self.discovery.seen.autocast)
        self.phase = "warm-up"

    def _begin_trace(self, step: StepEvent) -> None:
        self._paused.enter_context(calls.paused())
        super()._begin_trace(step)

    def _let_go(self) -> None:
        self._paused.close()
        super()._let_go()


def attach_kept_profile(session: Session) -> None:
    """The profile mode on top of `session.kept`, in the child, once torch is imported."""
    training, watcher = attach_training(session)
    assert Attached.discovery is not None
    KeptProfileDriver(training, session, watcher, Attached.discovery).attach()
