"""Rules and a run's metrics to findings, and findings to ordered recommendations. Pure; no metric table makes it raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from advisor.core.findings import Finding, Interval, Outcome, Recommendation, Semantics
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.core.profile import StepProfile
from advisor.core.units import percent_text
from advisor.rules.conditions import comparisons, evidence, truth
from advisor.rules.messages import fill
from advisor.rules.rule import AREAS, SEVERITIES, Rule
from advisor.rules.sites import select

_OUTCOMES = (Outcome.FIRED, Outcome.UNKNOWN, Outcome.QUIET)
_STAGE = {area: place for place, area in enumerate(AREAS)}
_STARVED = 0.1  # share of the step waiting for input above which a faster kernel mostly lengthens the wait
_SEMANTICS = (Semantics.EXACT, Semantics.REASSOCIATED, Semantics.PRECISION, Semantics.TRAINING)


def evaluate(rules: Iterable[Rule], table: MetricTable, profile: StepProfile | None = None) -> tuple[Finding, ...]:
    """One finding a rule: fired ones first, by severity and gain, then those not evaluated, then quiet ones.

    Deprecated rules are left out. Without a profile the findings name no sites.
    """
    findings = [_judge(rule, table, profile) for rule in rules if rule.status != "deprecated"]
    return tuple(sorted(findings, key=_rank))


def outcome(rule: Rule, table: MetricTable) -> tuple[Outcome, tuple[str, ...]]:
    """The rule's outcome, and for UNKNOWN the metrics that were missing.

    False is certain as soon as one part of an `all` is false, whatever else is missing; true needs every metric in
    `requires`.
    """
    answer = truth(rule.when, table)
    if answer is False:
        return Outcome.QUIET, ()
    missing = [name for name in rule.requires if table[name].value is None]
    if answer is None:
        read = (leaf.metric for leaf in comparisons(rule.when))
        missing += [name for name in read if table[name].value is None]
    return (Outcome.UNKNOWN, tuple(dict.fromkeys(missing))) if missing else (Outcome.FIRED, ())


def _judge(rule: Rule, table: MetricTable, profile: StepProfile | None) -> Finding:
    result, missing = outcome(rule, table)
    fired = result is Outcome.FIRED
    gain = rule.gain.interval(table)[0] if fired and rule.gain else None
    return Finding(
        rule=rule.id,
        title=rule.title,
        area=rule.area,
        severity=rule.severity,
        outcome=result,
        message=fill(rule.message, table) if fired else "",
        evidence=evidence(rule.when, table),
        sites=select(rule.sites, profile) if fired else (),
        gain=gain,
        transform=rule.transform,
        parameters=dict(rule.parameters),
        semantics=rule.semantics,
        missing=tuple(f"{name}: {_reason(name, table)}" for name in missing),
        rationale=rule.rationale,
        references=rule.references,
        after=rule.after,
        conflicts=rule.conflicts,
        gates=rule.gates,
        cause=rule.cause or rule.id,
        role=rule.role,
    )


def _reason(name: str, table: MetricTable) -> str:
    return table[name].reason or (f"needs {BY_NAME[name].needs}" if BY_NAME[name].needs else "was not gathered")


def _rank(finding: Finding) -> tuple[int, int, float, int, str]:
    severity = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else 0
    high = finding.gain.high if finding.gain else 0.0
    return _OUTCOMES.index(finding.outcome), -severity, -high, _STAGE.get(finding.area, len(AREAS)), finding.rule


def recommend(findings: Sequence[Finding], table: MetricTable | None = None) -> tuple[Recommendation, ...]:
    """One recommendation for each transform that fired findings ask for, in the order to try them.

    What bounds the step comes first (the order of `AREAS`), then the larger upper bound; `after` is kept. When a gating
    finding fired, recommendations are still listed, marked with `gated_by`. What would change the training recipe is never
    among them. With `table`, changes on the device side of a GPU that waits for its input say so.
    """
    fired = [finding for finding in findings if finding.outcome is Outcome.FIRED]
    gating = [finding for finding in fired if finding.gates]
    asked: dict[str, list[Finding]] = {}
    for finding in sorted(fired, key=_rank):
        if finding.transform and finding.semantics is not Semantics.TRAINING:
            asked.setdefault(finding.transform, []).append(finding)
    stages = {
        transform: min(_STAGE.get(finding.area, len(AREAS)) for finding in group) for transform, group in asked.items()
    }
    starved = (table.number("idle_data_frac") or 0.0) if table else 0.0
    merged = {}
    for transform, group in asked.items():
        hidden = starved if stages[transform] > _STAGE["transfer"] and starved > _STARVED else 0.0
        merged[transform] = _merge(transform, group, gating, hidden)
    return _ordered(merged, stages)


def _merge(transform: str, group: list[Finding], gating: list[Finding], starved: float) -> Recommendation:
    first = group[0]
    parameters: dict[str, str] = {}
    for finding in group:
        for name, value in finding.parameters.items():
            parameters.setdefault(name, value)
    reason = first.message
    if len(group) > 1:
        reason += " Also: " + ", ".join(finding.title for finding in group[1:]) + "."
    if starved:
        reason += f" The GPU waits for input {percent_text(starved)} of the step: the gain shows once that is mended."
    if gating:
        reason += " Measured in doubt: " + ", ".join(finding.title for finding in gating) + "."
    return Recommendation(
        transform=transform,
        parameters=parameters,
        title=first.title,
        rules=tuple(finding.rule for finding in group),
        semantics=max((finding.semantics for finding in group), key=_SEMANTICS.index),
        predicted=_merged_gain(group),
        after=tuple(sorted({name for finding in group for name in finding.after})),
        conflicts=tuple(sorted({name for finding in group for name in finding.conflicts})),
        reason=reason.strip(),
        gated_by=tuple(finding.rule for finding in gating),
    )


def _merged_gain(group: list[Finding]) -> Interval | None:
    """Bounds of several findings as one.

    Findings of one area look at the same part of the step, so their largest upper bound stands; those of different areas
    look at different parts, so upper bounds add up, to at most 1. The best lower bound is a lower bound for all.
    """
    gains = [(finding.area, finding.gain) for finding in group if finding.gain is not None]
    if not gains:
        return None
    by_area: dict[str, float] = {}
    for area, gain in gains:
        by_area[area] = max(by_area.get(area, 0.0), gain.high)
    high = min(1.0, sum(by_area.values()))
    low = min(high, max(gain.low for _, gain in gains))
    return Interval(low=low, high=high, basis="; ".join(dict.fromkeys(gain.basis for _, gain in gains)))


def _ordered(merged: dict[str, Recommendation], stages: dict[str, int]) -> tuple[Recommendation, ...]:
    """Always the best candidate whose predecessors are placed; a circle (hand-made findings) is cut at the best one."""

    def key(transform: str) -> tuple[int, float, str]:
        predicted = merged[transform].predicted
        return stages[transform], -(predicted.high if predicted else 0.0), transform

    waiting = sorted(merged, key=key)
    placed: list[str] = []
    while waiting:
        free = [name for name in waiting if not set(merged[name].after) & set(waiting) - {name}]
        chosen = (free or waiting)[0]
        waiting.remove(chosen)
        placed.append(chosen)
    return tuple(merged[name] for name in placed)
