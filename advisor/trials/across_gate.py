"""The numeric gate of a change that several ranks make together.

Each rank judges a change of the model by itself, on its own batch and without the others (distributed/alone.py); what one rank finds wrong
is wrong. A change of how gradients are sent shows only where they are sent: there all ranks replay the step the same few times, and what
arrives is held against what arrived before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from advisor.core import transform_table
from advisor.core.errors import first_line
from advisor.core.findings import Semantics
from advisor.core.transform_row import TOGETHER, Stage
from advisor.core.verdict import Check
from advisor.distributed.alone import alone
from advisor.distributed.board import Board
from advisor.loop.attach import Attached
from advisor.loop.interval import BACKWARDS, SHAPES
from advisor.loop.steps import StepWatcher
from advisor.loop.training import StepEvent, Training
from advisor.transforms.base import Transform
from advisor.trials.live.precision import precision_of
from advisor.trials.live.step_to_replay import CAPTURE_TRIES
from advisor.trials.numerics.distance import Distance, distance
from advisor.trials.numerics.gate import Gate, quiet
from advisor.trials.numerics.replay import Result, random_like, replay
from advisor.trials.numerics.state import SavedState

# What gradients may be off that are sent in other buckets: sums in another order. And as 16 bits: a few roundings of 2**-9. One that is not
# sent at all is off by its own size.
SAME_SUMS, AS_16_BITS, NOISE_FACTOR = 1e-5, 2e-2, 4.0
Switch = Callable[[bool], str]  # in all ranks; why one of them could not


class AcrossGate:
    """One for a search. All ranks call its functions together."""

    def __init__(self, training: Training, watcher: StepWatcher | None, board: Board) -> None:
        self.training, self.board = training, board
        self._gate, self._watcher = Gate(training, watcher), watcher

    def capture(self, transform: Transform) -> Generator[None, StepEvent, bool]:
        """Whether each rank has a step to replay."""
        for _ in range(CAPTURE_TRIES):
            self._gate.arm(guides=transform.guides)
            event = yield
            fits = self._gate.captured() and event.reason not in (SHAPES, BACKWARDS)
            if all(self.board.exchange(fits)):
                return True
        self._gate.release()
        return False

    def judge(self, transform: Transform, switch: Any, precision_kept: str, *, patience_s: float) -> Check:
        """Of a change of the model, which is on behind it in each rank that could make it: the worst of all ranks' checks.

        Raises:
            GateFailed: naming the first rank in which the change raised.
        """
        found, why = Check(passed=None, detail=""), ""
        try:
            with alone(root.module for root in self.training.models):
                found = self._gate.judge(
                    switch.on, switch.off, transform.semantics, precision_of(transform), precision_kept
                ).check
        except Exception as error:
            why = first_line(error)
        self._gate.release()
        told = self.board.exchange([found.passed, found.detail, found.numbers, why], patience_s=patience_s)
        return worst(told)

    def judge_sent(self, transform: Transform, switch: Switch) -> Check:
        """Of a change of how gradients are sent, which is on behind it.

        Raises:
            GateFailed: naming the first rank in which the change raised.
        """
        calls = self._gate.take()
        for call in calls:
            call.grads = [None if g is None else random_like(g) for g in call.grads]
        modules = [call.root.module for call in calls]
        with quiet(self._watcher), SavedState(modules, self.training) as saved:

            def sent() -> list[Result]:
                return [replay(call, saved) for call in calls]

            base, again = sent(), sent()
            saved.restore()
            if why := switch(True):
                raise GateFailed(why)
            saved.leave_to_change()
            sent()  # the first backward of a reducer lays its buckets out
            found = sent()
        limit = AS_16_BITS if transform.semantics is Semantics.PRECISION else SAME_SUMS
        limit += NOISE_FACTOR * max(d.largest for d in map(distance, again, base))
        own = _held_against(list(map(distance, found, base)), limit)
        self._gate.release()
        return worst(self.board.exchange([own.passed, own.detail, own.numbers, ""]))

    def release(self) -> None:
        """Let go of what was captured."""
        self._gate.release()


class GateFailed(Exception):
    """A rank could not make the change."""


def worst(told: list[Any]) -> Check:
    """Of all ranks' checks the one that counts, with the rank's number.

    Raises:
        GateFailed: where the change raised in a rank.
    """
    for rank, (_, _, _, why) in enumerate(told):
        if why:
            raise GateFailed(f"rank {rank}: {why}")
    for wanted in (False, None):
        for rank, (passed, detail, numbers, _) in enumerate(told):
            if passed is wanted:
                return Check(passed=passed, detail=f"rank {rank}: {detail}", numbers=numbers)
    passed, detail, numbers, _ = max(told, key=lambda one: one[2].get("of_bound", 0.0))
    return Check(passed=passed, detail=f"in all {len(told)} ranks; the farthest: {detail}", numbers=numbers)


def _held_against(apart: list[Distance], limit: float) -> Check:
    broken = next((d.broken for d in apart if d.broken), "")
    off = max(d.largest for d in apart)
    if broken:
        return Check(passed=False, detail=f"what arrives is not what arrived: {broken}")
    return Check(
        passed=off <= limit,
        detail=f"gradients behind their reduction are {off:.1e} apart, of {limit:.1e} allowed",
        numbers={"error": off, "of_bound": off / limit},
    )


def sends(transform: Transform) -> bool:
    """Whether it changes how gradients are sent, or where ranks run, and nothing else."""
    name = transform.id
    return TOGETHER not in name and transform_table.row(name).stage is Stage.RANKS


def rounds_to() -> str:
    """What the script's own forward is known to round to."""
    discovery = Attached.discovery
    return "half" if discovery is not None and discovery.seen.autocast is not None else "fp64"
