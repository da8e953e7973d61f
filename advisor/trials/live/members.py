"""Verdicts on changes that were tried as one: each of them has a verdict of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from advisor.core.findings import Recommendation
from advisor.core.units import counted
from advisor.core.verdict import Blocks, Check, Status, Verdict
from advisor.transforms.base import Transform
from advisor.trials.live.loop import Loop


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


def each_kept(
    loop: Loop, members: Sequence[Recommendation], verdict: Verdict, known: Mapping[str, Check]
) -> Iterator[Verdict]:
    """Of a kept bundle each member's own verdict, with the effect it had itself (`known`); the gain is of all that had one."""
    transforms = [loop.find(m.transform) for m in members]
    effects = [known[transform.id] for transform in transforms]
    with_effect = [t for t, effect in zip(transforms, effects, strict=True) if effect.passed is not False]
    for member, transform, effect in zip(members, transforms, effects, strict=True):
        sites = transform.sites(loop.training) or ((), ())
        own = dataclasses.replace(
            of_member(verdict, transform, member, members), effect=effect, matched=sites[0], unmatched=sites[1]
        )
        if transform not in with_effect:
            # It is on with the others, and nothing of it is in the graph.
            reason = f"applied, but without effect: {effect.detail}"
            own = dataclasses.replace(
                own, status=Status.REVERTED, reason=reason, gain=None, timing=None, blocks=Blocks()
            )
        elif len(with_effect) > 1:
            own = kept_with(own, [t for t in with_effect if t is not transform])
        if transform not in with_effect[:1]:  # paid once, and so told once
            own = dataclasses.replace(own, first_step_us=0.0, break_even_steps=None, memory_delta_bytes=0)
        yield own


def each_hidden(
    loop: Loop, hidden: Sequence[Recommendation], members: Sequence[Recommendation], verdict: Verdict
) -> Iterator[Verdict]:
    """What noise has left open as one is left open one by one, where a trial of its own could tell no more."""
    for member in hidden:
        together = tried_with(len(members) - 1)
        reason = f"{verdict.reason}; {together}; alone its predicted gain is below the noise"
        timing = Check(passed=False, detail=reason)
        own = of_member(verdict, loop.find(member.transform), member, members)
        yield dataclasses.replace(own, reason=reason, gain=None, timing=timing)
