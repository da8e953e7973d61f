"""Typed conditions over metrics, in Kleene's three-valued logic: a missing metric is neither true nor false.

`all` is false as soon as one part is false, `any` is true as soon as one part is true; otherwise a missing metric makes
the whole unknown. No expression strings, no code: a condition is data that was checked against `core.metrics` when read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from advisor.core.findings import Evidence
from advisor.core.metrics import BY_NAME, MetricTable, Scalar

Truth = bool | None
Threshold = float | str | bool | tuple[str, ...]

_NUMERIC: dict[str, Callable[[float, float], bool]] = {
    "above": lambda value, limit: value > limit,
    "at_least": lambda value, limit: value >= limit,
    "below": lambda value, limit: value < limit,
    "at_most": lambda value, limit: value <= limit,
}
# operator → kinds of metric it is for
OPERATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_NUMERIC, ("number",)),
    "is": ("flag", "text"),
    "is_not": ("text",),
    "in": ("text",),
}
# Where floating-point conversion of a written threshold would decide ("5 %" is 0.05): values this close are equal.
_RELATIVE_EQUALITY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricComparison:
    """One metric against one threshold in the metric's unit. `written` is the threshold as the author wrote it."""

    metric: str
    operator: str
    threshold: Threshold
    written: str
    because: str = ""

    def judge(self, value: Scalar) -> bool:
        """Whether a value of the metric's kind satisfies the condition."""
        if isinstance(self.threshold, tuple):
            return value in self.threshold
        if self.operator == "is":
            return value == self.threshold
        if self.operator == "is_not":
            return value != self.threshold
        number, limit = float(value), float(self.threshold)
        if abs(number - limit) <= _RELATIVE_EQUALITY * abs(limit):
            number = limit
        return _NUMERIC[self.operator](number, limit)

    def __str__(self) -> str:
        return f"{self.operator.replace('_', ' ')} {self.written}"


@dataclass(frozen=True, slots=True, kw_only=True)
class All:
    """Every part holds."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf:
    """At least one part holds."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Not:
    """The part does not hold."""

    part: Condition


Condition = MetricComparison | All | AnyOf | Not


def truth(condition: Condition, table: MetricTable) -> Truth:
    """True, False, or None where a missing metric leaves it open."""
    if isinstance(condition, MetricComparison):
        value = table[condition.metric].value
        return None if value is None else condition.judge(value)
    if isinstance(condition, Not):
        inner = truth(condition.part, table)
        return None if inner is None else not inner
    values = [truth(part, table) for part in condition.parts]
    decisive = isinstance(condition, AnyOf)
    if decisive in values:
        return decisive
    return None if None in values else not decisive


def comparisons(condition: Condition) -> Iterator[MetricComparison]:
    """All leaves, in order of writing."""
    if isinstance(condition, MetricComparison):
        yield condition
    elif isinstance(condition, Not):
        yield from comparisons(condition.part)
    else:
        for part in condition.parts:
            yield from comparisons(part)


def always_read(condition: Condition) -> Iterator[str]:
    """Metrics outside any `any`, in order: without them the condition cannot come out true."""
    if isinstance(condition, MetricComparison):
        yield condition.metric
    elif isinstance(condition, Not):
        yield from always_read(condition.part)
    elif isinstance(condition, All):
        for part in condition.parts:
            yield from always_read(part)


def replace(condition: Condition, change: Callable[[MetricComparison], MetricComparison]) -> Condition:
    """The same condition with every leaf passed through `change`."""
    if isinstance(condition, MetricComparison):
        return change(condition)
    if isinstance(condition, Not):
        return Not(part=replace(condition.part, change))
    parts = tuple(replace(part, change) for part in condition.parts)
    return All(parts=parts) if isinstance(condition, All) else AnyOf(parts=parts)


def evidence(condition: Condition, table: MetricTable) -> tuple[Evidence, ...]:
    """What each leaf read, also where it was missing."""
    return tuple(
        Evidence(
            metric=leaf.metric,
            value=table[leaf.metric].value,
            unit=BY_NAME[leaf.metric].unit,
            provenance=table[leaf.metric].provenance.value,
            threshold=str(leaf),
        )
        for leaf in comparisons(condition)
    )


def describe(condition: Condition, indent: str = "") -> list[str]:
    """The condition in words, one line a leaf, with the reason of each threshold."""
    if isinstance(condition, MetricComparison):
        reason = f": {condition.because}" if condition.because else ""
        return [f"{indent}- `{condition.metric}` {condition}{reason}"]
    if isinstance(condition, Not):
        return [f"{indent}- not:", *describe(condition.part, indent + "  ")]
    if isinstance(condition, All) and not indent:
        return [line for part in condition.parts for line in describe(part, indent)]
    word = "all of" if isinstance(condition, All) else "any of"
    return [f"{indent}- {word}:", *(line for part in condition.parts for line in describe(part, indent + "  "))]
