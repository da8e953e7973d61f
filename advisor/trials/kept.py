"""Changes that stand: a plan's kept items, applied at the earliest moment at which each one fits.

What needs no live object (flags, loaders) is on before the script's first step; what needs the model or the optimizer
follows at one of the first step boundaries. What does not fit by then is left out, and the plain script runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from advisor.core.plan import PlanItem
from advisor.profiling.training import Training
from advisor.transforms import registry
from advisor.transforms.base import Transform, Undo

# Gradients that are zeroed in place, batch shapes that vary: some facts show only after a few steps.
PATIENCE = 6


@dataclass(slots=True, eq=False)
class Standing:
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
    standing: list[Standing] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    _waiting: list[PlanItem] = field(default_factory=list)
    _boundaries: int = -1

    def __post_init__(self) -> None:
        self._waiting = list(self.items)

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

    def undo(self) -> None:
        """Take everything back, last first; what waits is dropped."""
        self._waiting.clear()
        while self.standing:
            self.standing.pop().undo.run()

    def _apply(self, item: PlanItem) -> str:
        """Why it does not fit (yet); empty when it is on."""
        try:
            transform = self.find(item.transform)
            # A change of how loaders are made must be on before there is a loader to match.
            match = transform.match(self.training, item.parameters)
            if not match.applies and (transform.live or self._boundaries > 0):
                return match.reason or "it does not apply here"
            undo = transform.apply(self.training, item.parameters)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.standing.append(Standing(transform, item.parameters, undo, match.sites, transform.title))
        return ""
