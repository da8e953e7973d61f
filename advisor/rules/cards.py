"""Fired findings to cards: one a cause, and one a change, in the order in which they are worth a reader's time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from advisor.core.findings import Card, Finding, Interval, Outcome, Semantics
from advisor.rules.rule import AREAS, SEVERITIES

# Where no gain is known, the severity stands for one: what a "high" costs is more than most changes gain, an "info" costs nothing.
UNKNOWN_GAIN = {"high": 0.3, "medium": 0.05, "low": 0.01, "info": 0.0}
# Of the step: what a gain that may be nothing is taken for at least, as `apply` keeps nothing for less (--min-gain).
LEAST = 0.01
# What the script does and need not do, if it costs this much of the step and more, is told before every search that may give nothing:
# sqrt(LEAST * 1) is what such a search is worth at most, and is added to what the fault costs. Half precision or another compiler may
# gain more; `apply` finds that out by itself.
NOTICEABLE = 0.001
FAULT = math.sqrt(LEAST)
MAY_COST = {"high": NOTICEABLE, "medium": NOTICEABLE, "low": 0.1}  # by severity, where it may cost nothing
# Areas of rules about what a script does beside its model's arithmetic. A change there that is bit-equal mends a fault.
_BESIDE = frozenset({"machine", "input", "transfer", "sync", "optimizer", "memory", "parallel"})
# A fault that may cost nothing gives the first place, and no other, to a cause that promises so many times as much: who reads one card
# should read of the 50 %, not of the 8 %.
FAR_MORE = 2.0
# A larger batch or another model is more to ask than a change of how the same training runs.
RECIPE = 0.5


def cards(findings: Iterable[Finding]) -> tuple[Card, ...]:
    """One card for each cause of which a finding fired, the most to gain first; a cause goes above what only describes the step.

    Findings of one cause, and causes whose leading findings ask for one change, are one card, led by the weightiest.
    """
    by_cause: dict[str, list[Finding]] = {}
    for finding in sorted((f for f in findings if f.outcome is Outcome.FIRED), key=_weight):
        by_cause.setdefault(finding.cause or finding.rule, []).append(finding)
    merged: list[list[Finding]] = []
    by_change: dict[str, list[Finding]] = {}
    for group in by_cause.values():  # of each cause the leading finding, the weightiest cause first
        change = group[0].transform
        if change and change in by_change:
            by_change[change] += group
            continue
        merged.append(group)
        if change:
            by_change[change] = group
    groups = _largest_first([sorted(group, key=_weight) for group in merged])
    return tuple(_card(rank, group) for rank, group in enumerate(groups, start=1))


def _largest_first(groups: list[list[Finding]]) -> list[list[Finding]]:
    """The group that promises far more in front, where the first is a fault that may cost nothing; else as they are."""
    first = groups[0][0].gain if groups else None
    if first is None or first.low > 0:
        return groups
    largest = max(groups, key=lambda group: 0.0 if group[0].role == "description" else _promise(group[0]))
    if _promise(largest[0]) < FAR_MORE * middle(first):
        return groups
    return [largest, *(group for group in groups if group is not largest)]


def _promise(finding: Finding) -> float:
    """What a change may save by its prediction alone; nothing where no gain is predicted, or for another recipe."""
    return 0.0 if finding.gain is None or finding.semantics is Semantics.TRAINING else middle(finding.gain)


def _card(rank: int, group: Sequence[Finding]) -> Card:
    lead, *others = group
    return Card(
        rank=rank,
        cause=lead.cause or lead.rule,
        rule=lead.rule,
        transform="" if lead.semantics is Semantics.TRAINING else lead.transform,
        reasons=tuple(finding.rule for finding in others),
        predicted=lead.gain,
    )


def _weight(finding: Finding) -> tuple[bool, float, int, int, int, str]:
    """Least for what comes first: causes, by expected gain, then by severity, then what bounds the step before what it hides."""
    severity = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else 0
    stage = list(AREAS).index(finding.area) if finding.area in AREAS else len(AREAS)
    return finding.role == "description", -worth(finding), -severity, not finding.transform, stage, finding.rule


def worth(finding: Finding) -> float:
    """What following this finding is expected to save, a share of the step by which cards are ranked."""
    gain = finding.gain
    expected = UNKNOWN_GAIN.get(finding.severity, 0.0) if gain is None else middle(gain)
    if finding.semantics is Semantics.TRAINING:
        return expected * RECIPE
    return expected + FAULT if _is_fault(finding) and gain is not None and _costs(gain, finding.severity) else expected


def _costs(gain: Interval, severity: str) -> bool:
    """It surely costs something, or what the rule holds for a fault may; where it holds it for a small one, much."""
    return gain.high >= (NOTICEABLE if gain.low > 0 else MAY_COST.get(severity, math.inf))


def _is_fault(finding: Finding) -> bool:
    """The script does something that it need not: what only a reader can mend, or a bit-equal change beside the model's arithmetic."""
    exact = finding.semantics is Semantics.EXACT and finding.area in _BESIDE
    return not finding.transform or finding.area == "simplify" or exact


def middle(gain: Interval) -> float:
    """The geometric middle, so that what may be nothing weighs less than what is certain; less where the change may lose."""
    if gain.high <= 0:
        return 0.0
    return min(gain.high, math.sqrt(max(gain.low, LEAST) * gain.high), 0.5 * (gain.low + gain.high))
