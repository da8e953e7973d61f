"""Bounds on a gain, as arithmetic over metrics: numbers, times ("20 us"), metrics, + - * /, parentheses, min, max, known.

`known(metric, number)` is the metric's value, or the number where it is missing: `known(work_frac, 1)` is 1 where no step was timed. An
own parser of 60 lines rather than Python's: there is nothing to escape from, and every error has its column. Units are
checked when the rule is read, so that microseconds are never added to shares; the result is a share of the step's time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from advisor.core.findings import Interval
from advisor.core.metrics import BY_NAME, MetricTable

MAX_LENGTH = 400
MAX_DEPTH = 24
_TOKEN = re.compile(r"\s*(?:([0-9]{1,12}(?:\.[0-9]{1,12})?)|([A-Za-z_][A-Za-z0-9_]*)|([-+*/(),]))")
_FUNCTIONS = {"min": 2, "max": 2, "known": 2}
Dimension = tuple[tuple[str, int], ...]  # ((unit, exponent), …); () is a pure number
_PURE = ("frac", "count", "")


class ExpressionError(ValueError):
    """`offset` is the column in the expression, from 0."""

    def __init__(self, offset: int, found: str, expected: str = "") -> None:
        self.offset, self.found, self.expected = offset, found, expected
        super().__init__(found)


@dataclass(frozen=True, slots=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True, slots=True)
class MetricValue:
    """A metric's value."""

    name: str


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """An operator or function applied to its operands."""

    name: str
    operands: tuple[Term, ...]


Term = Number | MetricValue | FunctionCall


@dataclass(frozen=True, slots=True)
class Expression:
    """A checked expression and how it was written."""

    text: str
    term: Term

    def metrics(self) -> tuple[str, ...]:
        """Metrics it reads, in order, each once."""
        return tuple(dict.fromkeys(_names(self.term)))

    def value(self, table: MetricTable) -> float | None:
        """Its value; None where a metric is missing, a divisor is zero or the result is not finite."""
        return _value(self.term, table)


def parse(text: str) -> Expression:
    """Check and read an expression whose value is a pure number.

    Raises:
        ExpressionError: with the column of the fault.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(0, f"an expression of {len(text)} characters", f"at most {MAX_LENGTH}")
    term, dimension = _Parser(text).parse()
    if dimension:
        raise ExpressionError(0, f"a value in {_words(dimension)}", "a share of the step's time, a pure number")
    return Expression(text, term)


class _Parser:
    """Recursive descent; every method returns the term and its dimension."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[int, str, str]] = []  # offset, kind, text
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                at = position + len(text[position:]) - len(text[position:].lstrip())
                raise ExpressionError(at, f"{text[at]!r}", "numbers, metrics, + - * / ( ) min max known")
            kind = ("number", "name", "sign")[match.lastindex - 1 if match.lastindex else 0]
            self.tokens.append((match.start(match.lastindex or 0), kind, match.group(match.lastindex or 0)))
            position = match.end()
        self.tokens.append((len(text), "end", "the end"))
        self.position, self.depth = 0, 0

    def parse(self) -> tuple[Term, Dimension]:
        result = self.sum()
        offset, kind, text = self.tokens[self.position]
        if kind != "end":
            raise ExpressionError(offset, f"{text!r} after a whole expression", "an operator")
        return result

    def take(self, *texts: str) -> str:
        token = self.tokens[self.position]
        if token[1] == "sign" and token[2] in texts:
            self.position += 1
            return token[2]
        return ""

    def need(self, text: str) -> None:
        offset, _, found = self.tokens[self.position]
        if not self.take(text):
            raise ExpressionError(offset, f"{found!r}", repr(text))

    def sum(self) -> tuple[Term, Dimension]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ExpressionError(self.tokens[self.position][0], f"nested deeper than {MAX_DEPTH} levels")
        left = self.product()
        while sign := self.take("+", "-"):
            left = self.same(sign, left, self.product())
        self.depth -= 1
        return left

    def product(self) -> tuple[Term, Dimension]:
        left, unit = self.factor()
        while sign := self.take("*", "/"):
            right, other = self.factor()
            left, unit = FunctionCall(sign, (left, right)), _combine(unit, other, 1 if sign == "*" else -1)
        return left, unit

    def factor(self) -> tuple[Term, Dimension]:
        if self.take("("):
            result = self.sum()
            self.need(")")
            return result
        offset, kind, text = self.tokens[self.position]
        self.position += kind != "end"
        if kind == "number":
            is_time = self.tokens[self.position][1:] == ("name", "us")
            self.position += is_time
            return Number(float(text)), (("us", 1),) if is_time else ()
        if kind == "name" and text in _FUNCTIONS:
            return self.function(offset, text)
        if kind == "name":
            spec = BY_NAME.get(text)
            if spec is None:
                raise ExpressionError(offset, f"the unknown metric {text!r}")
            if spec.kind != "number":
                raise ExpressionError(offset, f"{text}, which is a {spec.kind}", "a metric that is a number")
            return MetricValue(text), () if spec.unit in _PURE else ((spec.unit, 1),)
        raise ExpressionError(offset, f"{text!r}", "a number, a metric or '('")

    def function(self, offset: int, name: str) -> tuple[Term, Dimension]:
        self.need("(")
        left = self.sum()
        self.need(",")
        right = self.sum()
        self.need(")")
        if name == "known" and not isinstance(left[0], MetricValue):
            raise ExpressionError(offset, "known() of something that is no metric", "known(metric, number)")
        return self.same(name, left, right)

    def same(self, name: str, left: tuple[Term, Dimension], right: tuple[Term, Dimension]) -> tuple[Term, Dimension]:
        if left[1] != right[1]:
            offset = self.tokens[self.position - 1][0]
            raise ExpressionError(offset, f"{name!r} of {_words(left[1])} and {_words(right[1])}", "the same unit")
        return FunctionCall(name, (left[0], right[0])), left[1]


def _combine(left: Dimension, right: Dimension, sign: int) -> Dimension:
    exponents = dict(left)
    for unit, exponent in right:
        exponents[unit] = exponents.get(unit, 0) + sign * exponent
    return tuple(sorted((unit, exponent) for unit, exponent in exponents.items() if exponent))


def _words(dimension: Dimension) -> str:
    return " ".join(unit if exponent == 1 else f"{unit}^{exponent}" for unit, exponent in dimension) or "a pure number"


def _names(term: Term) -> Iterator[str]:
    if isinstance(term, MetricValue):
        yield term.name
    elif isinstance(term, FunctionCall):
        for operand in term.operands:
            yield from _names(operand)


def _value(term: Term, table: MetricTable) -> float | None:
    if isinstance(term, Number):
        return term.value
    if isinstance(term, MetricValue):
        return table.number(term.name)
    left, right = (_value(operand, table) for operand in term.operands)
    if term.name == "known":
        return left if left is not None else right
    if left is None or right is None:
        return None
    if term.name == "+":
        result = left + right
    elif term.name == "-":
        result = left - right
    elif term.name == "*":
        result = left * right
    elif term.name == "/":
        if right == 0.0:
            return None
        result = left / right
    else:
        result = min(left, right) if term.name == "min" else max(left, right)
    return result if math.isfinite(result) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Lower and upper bound on the share of the step's time that can be saved, and what they rest on."""

    low: Expression
    high: Expression
    basis: str

    def interval(self, table: MetricTable) -> tuple[Interval | None, str]:
        """The interval, and a complaint where the bounds came out impossible (a fault in the rule, not in the run).

        Bounds are clamped to [0, 1] and ordered. The interval is None where a metric it reads is missing.
        """
        low, high = self.low.value(table), self.high.value(table)
        if low is None or high is None:
            return None, ""
        complaint = ""
        if not -1e-6 <= low <= high * (1 + 1e-6) + 1e-9 or high > 1 + 1e-6:
            complaint = f"fault in the rule: its bounds came out as {low:.3g} to {high:.3g}"
        top = min(max(high, 0.0), 1.0)
        bottom = min(max(low, 0.0), top)
        basis = f"{self.basis} ({complaint}; clamped)" if complaint else self.basis
        return Interval(low=bottom, high=top, basis=basis), complaint
