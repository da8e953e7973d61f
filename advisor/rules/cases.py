"""A rule's cases, kept beside it as <rule>.cases.yaml: tiny metric tables with the outcome they must lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from advisor.core.errors import AdvisorError, meant
from advisor.core.findings import Outcome
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.core.metrics import Scalar as MetricScalar
from advisor.core.units import percent_text
from advisor.rules.catalog import CASES_SUFFIX
from advisor.rules.conditions import MetricComparison, comparisons, truth
from advisor.rules.engine import evaluate, outcome
from advisor.rules.rule import Rule
from advisor.rules.schema import SCHEMA, Fields, kind_of, metric_value
from advisor.rules.yaml_nodes import Mapping, Node, RuleError, Scalar, YamlDocument, read

# How near the threshold the nearest quiet case must be, relative to it: a case far below proves nothing about the threshold.
NEAR = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCase:
    """Metrics as given (all others are missing) and what must follow."""

    name: str
    given: dict[str, MetricScalar]
    expect: Outcome
    missing: tuple[str, ...] = ()
    message: str = ""

    def table(self) -> MetricTable:
        """The metrics as a table."""
        table = MetricTable()
        for name, value in self.given.items():
            table.set(name, value)
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case, or one demand on a rule's cases as a whole."""

    rule: str
    case: str
    passed: bool
    detail: str = ""


def cases_path(rule: Rule) -> Path:
    """Where the rule's cases belong."""
    path = Path(rule.path)
    return path.with_name(path.name.removesuffix(path.suffix) + CASES_SUFFIX)


def read_cases(rule: Rule) -> tuple[RuleCase, ...]:
    """The rule's cases; empty when it has no file of cases.

    Raises:
        RuleError: for the first fault in the file.
    """
    path = cases_path(rule)
    if not path.exists():
        return ()
    document = read(path)
    problems: list[RuleError] = []
    top = Fields(document, document.root, ("schema", "rule", "cases"), problems, "the file of cases")
    top.require(("schema", "rule", "cases"))
    version = top.values.get("schema")
    if isinstance(version, Scalar) and version.text != str(SCHEMA):
        top.fail(version.mark, f"schema is {version.text!r}", str(SCHEMA))
    if top.text("rule") not in ("", rule.id):
        top.fail(top.mark_of("rule"), f"cases of {top.text('rule')!r} beside the rule {rule.id!r}", rule.id)
    cases = tuple(_case(document, item, problems) for item in top.items("cases"))
    if problems:
        raise problems[0]
    return cases


def _case(document: YamlDocument, node: Node, problems: list[RuleError]) -> RuleCase:
    fields = Fields(document, node, ("name", "given", "expect", "missing", "message"), problems, "a case")
    fields.require(("name", "given", "expect"))
    given: dict[str, MetricScalar] = {}
    table = fields.values.get("given")
    if isinstance(table, Mapping):
        for key, value in table.entries:
            spec = BY_NAME.get(key.text)
            if spec is None:
                fields.fail(
                    key.mark,
                    f"unknown metric {key.text!r}",
                    "a metric of `advisor rules metrics`",
                    meant(key.text, BY_NAME),
                )
                continue
            number = metric_value(fields, value, spec)
            if number is not None:
                given[key.text] = number
    elif table is not None:
        fields.fail(table.mark, f"given is {kind_of(table)}", "fields, 'metric: value'")
    expected = fields.choice("expect", [member.value for member in Outcome])
    return RuleCase(
        name=fields.text("name"),
        given=given,
        expect=Outcome(expected),
        missing=fields.texts("missing"),
        message=fields.text("message"),
    )


def run_case(rule: Rule, case: RuleCase) -> CaseResult:
    """Evaluate the rule on the case."""
    table = case.table()
    (finding,) = evaluate([rule], table) or (None,)
    if finding is None:
        return CaseResult(rule=rule.id, case=case.name, passed=True, detail="deprecated, not evaluated")
    faults = []
    if finding.outcome is not case.expect:
        faults.append(f"{finding.outcome.value}, expected {case.expect.value}")
    names = tuple(text.split(":")[0] for text in finding.missing)
    if case.missing and set(names) != set(case.missing):
        faults.append(f"missing {', '.join(names) or 'nothing'}, expected {', '.join(case.missing)}")
    if case.message and case.message not in finding.message:
        faults.append(f"the message is {finding.message!r}, expected {case.message!r} in it")
    if finding.outcome is Outcome.FIRED and rule.gain:
        interval, complaint = rule.gain.interval(table)
        if complaint:
            faults.append(complaint)
        elif interval is None:
            faults.append("the gain came out unknown; give the metrics it reads")
    return CaseResult(rule=rule.id, case=case.name, passed=not faults, detail="; ".join(faults))


def demands(rule: Rule, cases: Iterable[RuleCase]) -> Iterator[CaseResult]:
    """What every rule's cases must hold: one that fires, one quiet just below a threshold, one not evaluated."""
    cases = tuple(cases)
    if not cases:
        yield CaseResult(rule=rule.id, case="cases", passed=False, detail=f"no cases in {cases_path(rule).name}")
        return
    for wanted in Outcome:
        if not any(case.expect is wanted for case in cases):
            yield CaseResult(rule=rule.id, case="cases", passed=False, detail=f"no case expects {wanted.value!r}")
    if not any(_just_below(rule, case) for case in cases if case.expect is Outcome.QUIET):
        detail = f"no quiet case fails by one condition alone and lies within {percent_text(NEAR)} of its threshold"
        yield CaseResult(rule=rule.id, case="cases", passed=False, detail=detail)


def _just_below(rule: Rule, case: RuleCase) -> bool:
    """Whether changing one metric of the quiet case a little makes the rule fire."""
    leaves = list(comparisons(rule.when))
    numeric = [leaf for leaf in leaves if BY_NAME[leaf.metric].kind == "number"]
    return any(_flips(rule, case, leaf) for leaf in numeric or leaves)


def _flips(rule: Rule, case: RuleCase, leaf: MetricComparison) -> bool:
    value = case.given.get(leaf.metric)
    if value is None:
        return False
    candidates: list[MetricScalar]
    if isinstance(value, bool):
        candidates = [not value]
    elif isinstance(value, float):
        limit = float(leaf.threshold) if isinstance(leaf.threshold, (int, float)) else 0.0
        # counts are whole numbers: one away from the threshold is near
        step = max(NEAR * abs(limit), 1.0 if BY_NAME[leaf.metric].unit == "count" else 1e-9)
        if abs(value - limit) > step * (1 + 1e-9):
            return False
        candidates = [limit + step, limit - step]
    else:
        wanted = leaf.threshold if isinstance(leaf.threshold, tuple) else (str(leaf.threshold),)
        candidates = [*wanted, "another"]
    for candidate in candidates:
        table = case.table()
        table.set(leaf.metric, candidate)
        if truth(rule.when, table) is True and outcome(rule, table)[0] is Outcome.FIRED:
            return True
    return False


def run_cases(rules: Iterable[Rule]) -> tuple[CaseResult, ...]:
    """Every case of every rule, and the demands on them. A file of cases that cannot be read is one failed result."""
    results: list[CaseResult] = []
    for rule in rules:
        try:
            cases = read_cases(rule)
        except AdvisorError as error:
            results.append(CaseResult(rule=rule.id, case="cases", passed=False, detail=str(error)))
            continue
        results.extend(run_case(rule, case) for case in cases)
        results.extend(demands(rule, cases))
    return tuple(results)
