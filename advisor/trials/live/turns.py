"""What is tried next in the running loop, by what is on and what the verdicts say so far: one candidate, or several as one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from advisor.core.findings import Recommendation
from advisor.core.verdict import Status
from advisor.transforms.channels_last import in_nhwc
from advisor.trials import planner, records, whole
from advisor.trials.live.loop import Loop

# Everything as one, with CUDA graphs, holds the step's memory this many times: in the graphs' pool, and for the eager calls before a capture.
GRAPHED_ROOM = 2.2


@dataclass(frozen=True, slots=True)
class Turn:
    """What is on trial. `first`: it is tried as one before anything else. `brought`: the one for whose sake channels_last is tried with
    it, and which alone is told of."""

    candidate: Recommendation
    members: tuple[Recommendation, ...] = ()  # several as one
    first: bool = False
    brought: Recommendation | None = None


@dataclass(frozen=True, slots=True)
class Turns:
    """`next` takes single candidates off what waits; several as one stay there until they have a verdict."""

    loop: Loop

    def next(self, waiting: list[Recommendation]) -> Turn | None:
        """The next trial: of what waits, or once, behind that, of what noise has left open; None when there is none."""
        if not waiting:
            open_yet = self._left_open()
            return Turn(planner.as_one(open_yet), open_yet) if open_yet else None
        first = self._whole(waiting)
        if members := first or self._pair() or self._bundle(waiting):
            return Turn(planner.as_one(members), members, first=bool(first))
        candidate = waiting.pop(0)
        pair = self._with_layout((candidate,))
        return Turn(planner.as_one(pair), pair, brought=candidate) if len(pair) > 1 else Turn(candidate)

    def _whole(self, waiting: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """What is tried as one before anything else, while nothing is kept: everything that fits, then less of it."""
        verdicts = self.loop.verdicts()
        kept = self.loop.kept.standing or any(v.status == Status.KEPT for v in verdicts)
        if kept or not self.loop.session.whole_first:
            return ()
        tried = {v.transform for v in verdicts}
        asked = [c for c in waiting if whole.kind(c) and c.transform not in self.loop.session.later]
        live = [c for c in asked if self.loop.find(c.transform).live and self.applies(c)]
        nhwc = self._nhwc() or not self.applies(Recommendation(transform=planner.LAYOUT))
        without = whole.to_leave_out(verdicts)
        attempts = whole.attempts(live, graphs_fit=self._graphs_fit(), nhwc=nhwc, without=without)
        return next((found for found in attempts if planner.as_one(found).transform not in tried), ())

    def _graphs_fit(self) -> bool:
        """Whether the device holds the step's memory once more, in graphs."""
        device = self.loop.training.device
        if device.type != "cuda":
            return True
        _, total = torch.cuda.mem_get_info(device)
        return total >= GRAPHED_ROOM * torch.cuda.max_memory_allocated(device)

    def _bundle(self, waiting: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """Of the candidates whose turn it is, those to be tried as one: what applies now, unless that was tried before, or one of
        them is on trial already.
        """
        group = planner.bundle(waiting)
        current = records.load_current(self.loop.session.folder)
        if current is not None and current.transform in {c.transform for c in group}:
            return ()
        members = self._with_layout(tuple(c for c in group if self.applies(c)))
        known = {v.transform for v in self.loop.verdicts()}
        return members if len(members) > 1 and planner.as_one(members).transform not in known else ()

    def _with_layout(self, members: tuple[Recommendation, ...]) -> tuple[Recommendation, ...]:
        """These, and channels_last before them where they need it and it can be had."""
        found = planner.with_layout(members, self.loop.session.candidates, nhwc=self._nhwc())
        return found if len(found) == len(members) or self.applies(found[0]) else members

    def _nhwc(self) -> bool:
        """Whether the model is in NHWC, by the script's doing or by what is kept."""
        kept = {v.transform for v in self.loop.verdicts() if v.status == Status.KEPT}
        on = {standing.transform.id for standing in self.loop.kept.standing}
        return planner.LAYOUT in kept | on or in_nhwc(self.loop.training)

    def _left_open(self) -> tuple[Recommendation, ...]:
        """What is to be tried as one, once, behind everything else: what noise has left open, each by itself."""
        if self.out_of_time():
            return ()
        session = self.loop.session
        return self._pair() or self._once(planner.left_open(self.loop.verdicts(), session.candidates, session.min_gain))

    def _pair(self) -> tuple[Recommendation, ...]:
        """Layout and half precision, once, where neither was kept alone."""
        return self._once(planner.layout_with_half(self.loop.verdicts(), self.loop.session.candidates))

    def _once(self, members: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """These, if they can be switched in the loop and were not tried as one before."""
        if not members or not all(self.loop.find(m.transform).live for m in members):
            return ()
        tried = {v.transform for v in self.loop.verdicts()}
        return () if planner.as_one(members).transform in tried else tuple(members)

    def out_of_time(self) -> bool:
        """The search's time is over."""
        return 0 < self.loop.session.deadline_unix_s <= time.time()

    def applies(self, candidate: Recommendation) -> bool:
        """Whether the loop as it stands has a place for it."""
        try:
            return self.loop.find(candidate.transform).match(self.loop.training, {}).applies
        except Exception:
            return False  # its own trial tells why
