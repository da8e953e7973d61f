"""Which candidates of a round are tried: what may be at all, and what the user wants of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from advisor.core.findings import Recommendation, Semantics
from advisor.core.verdict import Status
from advisor.trials import records
from advisor.trials.budget import Budget


class Answer(Enum):
    """To the question whether a change is tried. `ALL`: it and all that follow; `QUIT`: neither it nor any that follows."""

    YES = "yes"
    NO = "no"
    ALL = "all"
    QUIT = "quit"


Ask = Callable[[Recommendation], Answer]
_QUIT = Status.DECLINED, "you quit before its turn"


@dataclass(slots=True, eq=False)
class CandidateChooser:
    """Called with the candidates of a round; `outcome` then says of the others what became of them."""

    budget: Budget
    ask: Ask | None  # before each candidate; None tries all
    over: bool = False  # the user wants no further questions, and nothing more than what was said yes to
    asked_s: float = 0.0
    _passed: dict[object, tuple[Status, str]] = field(default_factory=dict)  # status and reason, by attempt

    def __call__(self, found: Sequence[Recommendation]) -> list[Recommendation]:
        """Those of them that are to be tried."""
        wanted = []
        for candidate in found:
            passed = self._never(candidate) or self._declined(candidate)
            if passed is None:
                wanted.append(candidate)
            else:
                self._passed[records.attempt(candidate)] = passed
        return wanted

    def outcome(self, candidate: Recommendation) -> tuple[Status, str] | None:
        """Status and reason of what is not tried for its own sake, or for the user's; None for what should have been tried."""
        found = self._passed.get(records.attempt(candidate))
        return found or (_QUIT if self.over else None)

    def _never(self, candidate: Recommendation) -> tuple[Status, str] | None:
        """Of what is not tried in any search of this length."""
        if candidate.semantics is Semantics.TRAINING:
            return Status.SKIPPED, "it changes the recipe: advice for you, never applied"
        reason = self.budget.too_short_for(candidate.transform)
        return (Status.SKIPPED, reason) if reason else None

    def _declined(self, candidate: Recommendation) -> tuple[Status, str] | None:
        if self.over:
            return _QUIT
        began = time.time()
        answer = self.ask(candidate) if self.ask is not None else Answer.YES
        asked_s = time.time() - began  # the user's time, not the search's
        self.asked_s += asked_s
        self.budget.until += asked_s
        if answer is Answer.ALL:
            self.ask = None
        self.over = answer is Answer.QUIT
        if answer in (Answer.YES, Answer.ALL):
            return None
        return _QUIT if self.over else (Status.DECLINED, "you said no")
