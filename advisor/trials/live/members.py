"""Verdicts on changes that were tried as one: each of them has a verdict of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from advisor.core.findings import Recommendation
from advisor.core.units import counted
from advisor.core.verdict import Verdict
from advisor.transforms.base import Transform


def of_member(
    verdict: Verdict, transform: Transform, member: Recommendation, members: Sequence[Recommendation]
) -> Verdict:
    """The verdict on all `members` as one, as that on one of them, which `transform` makes."""
    return dataclasses.replace(
        verdict,
        transform=member.transform,
        title=transform.title,
        round=member.round,
        semantics=transform.semantics,
        predicted=member.predicted,
        seconds=verdict.seconds / len(members),
    )


def kept_with(verdict: Verdict, others: Sequence[Transform]) -> Verdict:
    """A member's verdict that was kept together with these: the gain is of all of them."""
    reason = f"{verdict.reason}; {tried_with(len(others))}"
    return dataclasses.replace(verdict, reason=reason, gain=None, together=tuple(other.id for other in others))


def tried_with(others: int) -> str:
    """That the verdict is on so many others as well. Which they are is in `together`, and each has this verdict."""
    return f"tried as one with {counted(others, 'other change')}"
