"""What every transform is: matches, applies, undoes, and says what effect to expect.

A transform never replaces a parameter, a buffer or a module object, and after `undo` the process is as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from advisor.core import transform_table
from advisor.core.findings import Semantics
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Whether a transform applies to this training, where, and where not (`"path: why not"`)."""

    applies: bool
    reason: str = ""
    sites: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()


@dataclass(slots=True)
class Undo:
    """A LIFO stack of steps back. `run` is safe to call twice and goes on after a step that raises."""

    steps: list[object] = field(default_factory=list)

    def push(self, step: object) -> None:
        """Add a callable without arguments that takes one change back."""
        self.steps.append(step)

    def run(self) -> None:
        """Take everything back, last change first.

        Raises:
            The first error of a step, after all steps were tried.
        """
        first: BaseException | None = None
        while self.steps:
            step = self.steps.pop()
            try:
                step()  # type: ignore[operator]  # callables, by `push`
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first


class Transform(ABC):
    """One optimisation: what it does. What it is says its row in `core/transform_table.py`.

    Instances hold no state; the returned `Undo` does.

    Switching off and on again is cheap: what is costly to make (compiled code, graphs) outlives `undo` until `release`.
    """

    id: ClassVar[str]
    # Its effect is told by traces before and after; False where live state alone proves it (what ran is counted).
    traced: ClassVar[bool] = True
    guides: ClassVar[bool] = False  # it changes what models that run without gradients give out

    @property
    def title(self) -> str:
        """What people call it."""
        return transform_table.title(self.id)

    @property
    def semantics(self) -> Semantics:
        """What it does to the numbers of the training."""
        return transform_table.row(self.id).semantics

    @property
    def live(self) -> bool:
        """Whether it can be switched between two steps of a running loop."""
        return transform_table.row(self.id).live

    @property
    def conflicts(self) -> tuple[str, ...]:
        """What cannot be on together with it."""
        return transform_table.conflicts(self.id)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """What it goes on behind in a plan."""
        return transform_table.row(self.id).waits_for

    @abstractmethod
    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        """Say whether and where this applies. Changes nothing."""

    @abstractmethod
    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        """Switch it on, between two steps. On an exception everything already done is taken back first."""

    def release(self, training: Training) -> None:
        """Free what is kept for switching on again quickly (compiled code, captured graphs). Called after a revert."""

    def sites(self, training: Training) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Where it took effect and where not (`"path: why not"`), once it is on and has run; None: as `match` said."""
        return None

    def warming(self, training: Training) -> bool:
        """Whether what the next steps run is another thing than what the last ones ran: it still waits for calls before it captures."""
        return False

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        """Show from live state, or from short traces before and after, that the change is there.

        `before` and `after` hold at least `kernels`, `launches` and `model` of a one-step trace; they are None where no
        trace could be taken.
        """
        return Check(passed=None, detail="this transform states no effect to look for")
