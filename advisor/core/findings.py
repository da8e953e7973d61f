"""What the rules said, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from advisor.core.errors import AdvisorError


class Semantics(str, Enum):
    """What a change does to the numbers of the training run."""

    EXACT = "exact"  # bit-equal
    REASSOCIATED = "reassociated"  # same maths, other order of operations
    PRECISION = "precision"  # fewer mantissa bits somewhere
    TRAINING = "training"  # another recipe; only ever advice


class Outcome(str, Enum):
    """A rule's result. `UNKNOWN` is neither yes nor no: a metric it needs is missing."""

    FIRED = "fired"
    QUIET = "quiet"
    UNKNOWN = "not evaluated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One metric that a rule read."""

    metric: str
    value: float | str | bool | None
    unit: str
    provenance: str
    threshold: str = ""  # the condition as written, "> 0.05"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A share of the step's time, 0 to 1. `basis` says what it was computed from."""

    low: float
    high: float
    basis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule's verdict on one run."""

    rule: str
    title: str
    area: str
    severity: str  # info, low, medium, high
    outcome: Outcome
    message: str = ""
    evidence: tuple[Evidence, ...] = ()
    sites: tuple[str, ...] = ()  # source lines, modules or kernels
    gain: Interval | None = None  # upper bounds on the share of the step that can be saved
    transform: str = ""  # id of the transform it asks for; "" when the advice is for a person
    parameters: dict[str, str] = field(default_factory=dict)
    semantics: Semantics = Semantics.EXACT
    missing: tuple[str, ...] = ()  # "dram_frac: needs hardware counters or NVML GPM"
    rationale: str = ""
    references: tuple[str, ...] = ()
    gates: bool = False  # when fired, every measurement of the run is in doubt
    cause: str = ""  # findings of one cause are one card; the rule's own id where it names none
    role: str = "cause"  # or "description": of the state that causes bring about, no cause itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A transform worth trying, with what it is predicted to give. Built from one or more fired findings."""

    transform: str
    parameters: dict[str, str] = field(default_factory=dict)
    title: str = ""
    rules: tuple[str, ...] = ()
    semantics: Semantics = Semantics.EXACT
    predicted: Interval | None = None  # share of step time saved
    reason: str = ""
    gated_by: tuple[str, ...] = ()  # fired rules that put the run's measurements in doubt
    round: int = 1  # of the search; `predicted` is a share of the step as it was profiled for this round


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One cause as reports show it: the finding that leads, and why else. Every fired finding is on one card.

    `transform` is the leading finding's, where it can be tried. `reasons` are the rules of the other findings of this cause, or that
    ask for this change, the weightiest first.
    """

    rank: int  # from 1
    cause: str
    rule: str
    transform: str = ""
    reasons: tuple[str, ...] = ()
    predicted: Interval | None = None  # the leading finding's share of the step that can be saved; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All rule outcomes of a run, fired first; the fired ones as cards, by rank; the recommendations in the order of trial."""

    run: str
    findings: tuple[Finding, ...]
    cards: tuple[Card, ...]
    recommendations: tuple[Recommendation, ...]

    def __post_init__(self) -> None:
        """Raises AdvisorError for a card of a rule without a finding: the file was not written as it stands."""
        known = {finding.rule for finding in self.findings}
        for card in self.cards:
            for rule in {card.rule, *card.reasons} - known:
                raise AdvisorError(
                    f"a card of the rule {rule!r}, of which there is no finding", fix="Record the run again."
                )

    def of(self, rule: str) -> Finding:
        """The finding of a rule that was asked."""
        return next(finding for finding in self.findings if finding.rule == rule)
