"""Rules and a run's metrics to findings, and findings to recommendations. Pure; no metric table makes it raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from advisor.core import transform_table
from advisor.core.findings import Finding, Interval, Outcome, Recommendation, Semantics
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.core.profile import StepProfile
from advisor.core.transform_row import Row
from advisor.core.units import percent_text
from advisor.rules.conditions import comparisons, evidence, truth
from advisor.rules.messages import fill
from advisor.rules.rule import AREAS, SEVERITIES, Rule
from advisor.rules.sites import select

# What a transform with these parameters would save of the step: `analysis.predict`, of the run whose metrics are evaluated.
Predict = Callable[[str, Mapping[str, str]], Interval | None]

_OUTCOMES = (Outcome.FIRED, Outcome.UNKNOWN, Outcome.QUIET)
_STAGE = {area: place for place, area in enumerate(AREAS)}
_STARVED = 0.1  # share of the step waiting for input above which a faster kernel mostly lengthens the wait
_STRANGE = "cupy_alone: the loop is CuPy's, and the change is for PyTorch's"


def evaluate(
    rules: Iterable[Rule], table: MetricTable, profile: StepProfile | None = None, predict: Predict | None = None
) -> tuple[Finding, ...]:
    """One finding a rule: fired ones first, by severity and gain, then those not evaluated, then quiet ones.

    Deprecated rules are left out. Without a profile the findings name no sites. The gain of a finding that asks for a transform is
    what `predict` says of it, with the parameters of all that ask for it; without `predict` it is not known.
    """
    findings = [_judge(rule, table, profile) for rule in rules if rule.status != "deprecated"]
    if predict is not None:
        findings = _predicted(findings, table, predict)
    return tuple(sorted(findings, key=_rank))


def _predicted(findings: Sequence[Finding], table: MetricTable, predict: Predict) -> list[Finding]:
    asked = _asked(findings)
    gains = {transform: predict(transform, _parameters(group)) for transform, group in asked.items()}
    return [
        replace(finding, gain=_possible(gains[finding.transform], finding.semantics, table))
        if finding.outcome is Outcome.FIRED and finding.transform
        else finding
        for finding in findings
    ]


def _possible(gain: Interval | None, semantics: Semantics, table: MetricTable) -> Interval | None:
    """Within what the step is above this machine's limit. The limit is that of the precision in use: a lower one may pass it."""
    limit = table.number("limit_frac")
    if gain is None or limit is None or not 0.0 < limit <= 1.0 or semantics is Semantics.PRECISION:
        return gain
    high = min(gain.high, 1.0 - limit)
    return replace(gain, low=min(gain.low, high), high=high)


def _asked(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Fired findings by the transform that they ask for, the weightiest first."""
    asked: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=_rank):
        if finding.outcome is Outcome.FIRED and finding.transform:
            asked.setdefault(finding.transform, []).append(finding)
    return asked


def _parameters(group: Iterable[Finding]) -> dict[str, str]:
    """Those of all, of each the weightiest finding's."""
    parameters: dict[str, str] = {}
    for finding in group:
        for name, value in finding.parameters.items():
            parameters.setdefault(name, value)
    return parameters


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
    result, names = outcome(rule, table)
    missing = tuple(f"{name}: {_reason(name, table)}" for name in names)
    if result is Outcome.FIRED and rule.transform and table["cupy_alone"].value and not _fits(rule.transform, table):
        # What mends a loop of PyTorch's is no advice for one of CuPy's; rules of its own speak of the same causes.
        result, missing = Outcome.UNKNOWN, (_STRANGE,)
    fired = result is Outcome.FIRED
    gain = _possible(rule.gain.interval(table)[0], rule.semantics, table) if fired and rule.gain else None
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
        transform=rule.transform if _fits(rule.transform, table) else "",
        parameters=dict(rule.parameters),
        semantics=rule.semantics,
        missing=missing,
        rationale=rule.rationale,
        references=rule.references,
        gates=rule.gates,
        cause=rule.cause or rule.id,
        role=rule.role,
    )


def _fits(transform: str, table: MetricTable) -> bool:
    """Whether the loop is one that this transform is for: CuPy's own or PyTorch's. What nobody has asked is PyTorch's."""
    return bool(transform) and transform_table.row(transform).cupy == bool(table["cupy_alone"].value)


def _reason(name: str, table: MetricTable) -> str:
    return table[name].reason or (f"needs {BY_NAME[name].needs}" if BY_NAME[name].needs else "was not gathered")


def _rank(finding: Finding) -> tuple[int, int, float, int, str]:
    severity = SEVERITIES.index(finding.severity) if finding.severity in SEVERITIES else 0
    high = finding.gain.high if finding.gain else 0.0
    return _OUTCOMES.index(finding.outcome), -severity, -high, _STAGE.get(finding.area, len(AREAS)), finding.rule


def recommend(findings: Sequence[Finding], table: MetricTable | None = None) -> tuple[Recommendation, ...]:
    """One recommendation for each transform that fired findings ask for, in the order of the findings.

    A finding's title says what is wrong, a recommendation's what to do. When a gating finding fired, recommendations are still listed, marked with `gated_by`. What would change the training recipe is never
    among them. With `table`, changes on the device side of a GPU that waits for its input say so.
    """
    gating = [finding for finding in findings if finding.outcome is Outcome.FIRED and finding.gates]
    starved = (table.number("idle_data_frac") or 0.0) if table else 0.0
    found = []
    for transform, group in _asked(f for f in findings if f.semantics is not Semantics.TRAINING).items():
        stage = min(_STAGE.get(finding.area, len(AREAS)) for finding in group)
        hidden = starved if stage > _STAGE["transfer"] and starved > _STARVED else 0.0
        found.append(_merge(transform_table.row(transform), group, gating, hidden))
    return tuple(found)


def _merge(row: Row, group: list[Finding], gating: list[Finding], starved: float) -> Recommendation:
    first = group[0]
    reason = f"{first.title}. {first.message}"
    if len(group) > 1:
        reason += " Also: " + ", ".join(finding.title for finding in group[1:]) + "."
    if starved:
        reason += f" The GPU waits for input {percent_text(starved)} of the step: the gain shows once that is mended."
    if gating:
        reason += " Measured in doubt: " + ", ".join(finding.title for finding in gating) + "."
    return Recommendation(
        transform=row.id,
        parameters=_parameters(group),
        title=row.title,
        rules=tuple(finding.rule for finding in group),
        semantics=row.semantics,
        predicted=first.gain,
        reason=reason.strip(),
        gated_by=tuple(finding.rule for finding in gating),
    )
