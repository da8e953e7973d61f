"""Several transforms switched as one: where each is known to win alone, one trial can prove what would else take one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from advisor.core import transform_table
from advisor.core.findings import Semantics
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing

_BY_LICENCE = (Semantics.EXACT, Semantics.REASSOCIATED, Semantics.PRECISION, Semantics.TRAINING)


class Bundle(Transform):
    """All members together, in their order; they take no parameters.

    Attributes:
        blamed: the member that raised when it was last to be switched on; "" while none did.
    """

    def __init__(self, identifier: str, members: Sequence[Transform]) -> None:
        self.members = tuple(members)
        self.blamed = ""
        self.id = identifier  # type: ignore[misc]  # a class's constant elsewhere
        self.traced = any(m.traced for m in members)  # type: ignore[misc]  # as `id`
        self.guides = any(m.guides for m in members)  # type: ignore[misc]  # as `id`

    @property
    def title(self) -> str:
        return transform_table.title_of_several([(m.id, m.title) for m in self.members])

    @property
    def semantics(self) -> Semantics:
        """It promises no more than the least strict of its members."""
        return max((m.semantics for m in self.members), key=_BY_LICENCE.index)

    @property
    def live(self) -> bool:
        return all(m.live for m in self.members)

    @property
    def conflicts(self) -> tuple[str, ...]:
        return tuple(name for m in self.members for name in m.conflicts)

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        found = {m.title: m.match(training, parameters) for m in self.members}
        unfit = [f"{title}: {match.reason}" for title, match in found.items() if not match.applies]
        sites = tuple(site for match in found.values() for site in match.sites)
        return Match(applies=not unfit, reason="; ".join(unfit), sites=sites)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            for member in self.members:
                self.blamed = member.id
                undo.push(member.apply(training, parameters).run)
        self.blamed = ""
        return undo

    def release(self, training: Training) -> None:
        for member in self.members:
            member.release(training)

    def sites(self, training: Training) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        found = [found for m in self.members if (found := m.sites(training)) is not None]
        return tuple(s for sites, _ in found for s in sites), tuple(s for _, unmatched in found for s in unmatched)

    def warming(self, training: Training) -> bool:
        return any(m.warming(training) for m in self.members)

    def effects(self, training: Training) -> dict[str, Check]:
        """Each member's own, by its name, as the live state shows it."""
        return {member.id: member.effect(training, None, None) for member in self.members}

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        """Of any of them: a member that finds no place changes nothing for the others."""
        found = {m.id: m.effect(training, before, after) for m in self.members}
        seen = {check.passed for check in found.values()}
        passed = True if True in seen else None if None in seen else False
        return Check(passed=passed, detail="; ".join(f"{n}: {check.detail}" for n, check in found.items()))
