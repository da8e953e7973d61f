"""One rule file to one `Rule`, every field typed and checked; all faults of a file are collected, each with its place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TypeVar

from advisor.core.errors import meant
from advisor.core.findings import Semantics
from advisor.core.metric_spec import MetricSpec
from advisor.core.metrics import BY_NAME
from advisor.core.transform_table import ROWS
from advisor.rules import estimate, messages, units
from advisor.rules.conditions import OPERATORS, All, AnyOf, Condition, MetricComparison, Not, Threshold
from advisor.rules.rule import AREAS, ROLES, SEVERITIES, STATUSES, CounterExample, Rule
from advisor.rules.sites import SELECTORS
from advisor.rules.yaml_nodes import Mapping, Node, RuleError, Scalar, Sequence, YamlDocument, YamlMark, read

SCHEMA = 1
MAX_CONDITION_DEPTH = 6
REQUIRED = (
    "schema",
    "id",
    "title",
    "area",
    "severity",
    "status",
    "requires",
    "when",
    "message",
    "rationale",
)
OPTIONAL = (
    "semantics", "cause", "role", "gain", "transform", "parameters", "gates", "sites", "counter_examples", "references",
)  # fmt: skip
FIELDS = REQUIRED + OPTIONAL
_ID = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_TRANSFORM = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_PARAMETER = re.compile(r"[a-z][a-z0-9_]*")
T = TypeVar("T")


class Fields:
    """Typed access to the fields of one mapping. A fault is added to `problems` and a harmless default returned."""

    def __init__(
        self, document: YamlDocument, node: Node, known: Collection[str], problems: list[RuleError], what: str
    ):
        self.document, self.problems, self.what, self.mark = document, problems, what, node.mark
        self.values: dict[str, Node] = {}
        if not isinstance(node, Mapping):
            self.fail(node.mark, f"{what} is {kind_of(node)}", "fields, 'name: value'")
            return
        for key, value in node.entries:
            if key.text in known:
                self.values[key.text] = value
            else:
                expected = "one of " + ", ".join(known)
                self.fail(key.mark, f"unknown field {key.text!r} in {what}", expected, meant(key.text, known))

    def fail(self, mark: YamlMark, found: str, expected: str = "", fix: str = "") -> None:
        """Collect one fault."""
        self.problems.append(self.document.error(mark, found, expected=expected, fix=fix))

    def mark_of(self, name: str) -> YamlMark:
        """Where the field's value stands, or where the mapping starts."""
        return self.values[name].mark if name in self.values else self.mark

    def require(self, names: Iterable[str]) -> None:
        """Collect a fault for every absent field."""
        for name in names:
            if name not in self.values:
                self.fail(self.mark, f"{self.what} has no {name!r}", fix=f"Add the field {name!r}.")

    def text(self, name: str, *, empty: bool = False) -> str:
        """A text; bare words that YAML reads as something else are refused."""
        return self.text_in(self.values[name], name, empty=empty) if name in self.values else ""

    def text_in(self, node: Node, name: str, *, empty: bool = True) -> str:
        """The text in a node."""
        if not isinstance(node, Scalar):
            self.fail(node.mark, f"{name} is {kind_of(node)}", "a text")
        elif node.kind == "null" or (not node.text.strip() and not empty):
            self.fail(node.mark, f"{name} is empty", "a text")
        elif node.kind != "text":
            self.fail(
                node.mark, f"{name} is {node.text!r}, which YAML reads as {node.kind}", "a text", "Put it in quotes."
            )
        else:
            return " ".join(node.text.split())
        return ""

    def flag(self, name: str) -> bool:
        """true or false; absent is false."""
        node = self.values.get(name)
        if node is None:
            return False
        if isinstance(node, Scalar) and node.kind == "bool" and node.text in ("true", "false"):
            return node.text == "true"
        self.fail(node.mark, f"{name} is {kind_of(node)}", "true or false")
        return False

    def choice(self, name: str, options: Collection[str]) -> str:
        """One of the options; the first of them when the value is none."""
        text = self.text(name)
        if text and text not in options:
            self.fail(self.mark_of(name), f"{name} is {text!r}", "one of " + ", ".join(options), meant(text, options))
            text = ""
        return text or next(iter(options))

    def matching(self, name: str, pattern: re.Pattern[str], expected: str) -> str:
        """A text of a given form."""
        text = self.text(name)
        if text and not pattern.fullmatch(text):
            self.fail(self.mark_of(name), f"{name} is {text!r}", expected)
        return text

    def items(self, name: str) -> tuple[Node, ...]:
        """The items of a list; absent is empty."""
        node = self.values.get(name)
        if node is None:
            return ()
        if isinstance(node, Sequence):
            return node.items
        self.fail(node.mark, f"{name} is {kind_of(node)}", "a list")
        return ()

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts without repeats."""
        found = tuple(self.text_in(item, f"an item of {name}", empty=False) for item in self.items(name))
        if len(set(found)) < len(found):
            self.fail(self.mark_of(name), f"{name} names something twice", fix="Keep one.")
        return tuple(text for text in found if text)


def kind_of(node: Node) -> str:
    """What stands in a node, for messages."""
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    return "empty" if node.kind == "null" else repr(node.text)


def metric_spec(fields: Fields, node: Node) -> MetricSpec | None:
    """The metric that a node names."""
    name = fields.text_in(node, "metric", empty=False)
    if name and name not in BY_NAME:
        fix = meant(name, BY_NAME) or "`advisor rules metrics` lists them."
        fields.fail(node.mark, f"unknown metric {name!r}", "a metric of `advisor rules metrics`", fix)
    return BY_NAME.get(name)


def metric_value(fields: Fields, node: Node, spec: MetricSpec) -> float | str | bool | None:
    """A value of the metric's kind and unit, or None after a fault was collected."""
    if not isinstance(node, Scalar):
        fields.fail(node.mark, f"{spec.name} is compared with {kind_of(node)}", units.example(spec))
        return None
    if spec.kind == "flag":
        if node.kind == "bool" and node.text in ("true", "false"):
            return node.text == "true"
        fields.fail(node.mark, f"{node.text!r} for {spec.name}, which is a flag", "true or false")
        return None
    if spec.kind == "text":
        if node.kind == "text":
            return node.text
        found = f"{node.text!r} for {spec.name}, which is a text"
        fields.fail(node.mark, found, "a text", f"YAML reads it as {node.kind}; put it in quotes.")
        return None
    try:
        return units.parse_number(node.text, spec)
    except ValueError as error:
        fields.fail(node.mark, f"{error}, for {spec.name}", units.example(spec))
        return None


def _condition(document: YamlDocument, node: Node, problems: list[RuleError], depth: int = 1) -> Condition | None:
    fields = Fields(document, node, ("all", "any", "not", "metric", "because", *OPERATORS), problems, "a condition")
    if not isinstance(node, Mapping) or len(fields.values) < len(node.entries):
        return None
    if depth > MAX_CONDITION_DEPTH:
        fields.fail(node.mark, f"conditions nested deeper than {MAX_CONDITION_DEPTH} levels", fix="Split the rule.")
        return None
    groups = [name for name in ("all", "any", "not") if name in fields.values]
    if not groups:
        return _comparison(fields)
    if len(fields.values) > 1:
        fields.fail(node.mark, f"{' and '.join(fields.values)} in one condition", "one of them", "Nest them in 'all'.")
        return None
    name = groups[0]
    if name == "not":
        part = _condition(document, fields.values["not"], problems, depth + 1)
        return Not(part=part) if part else None
    items = fields.items(name)
    if not items and isinstance(fields.values[name], Sequence):
        fields.fail(node.mark, f"{name!r} without a condition", "at least one")
    parts = [_condition(document, item, problems, depth + 1) for item in items]
    known = tuple(part for part in parts if part is not None)
    if not known:
        return None
    return All(parts=known) if name == "all" else AnyOf(parts=known)


def _comparison(fields: Fields) -> MetricComparison | None:
    operators = [name for name in OPERATORS if name in fields.values]
    if "metric" not in fields.values or len(operators) != 1:
        found = "no metric" if "metric" not in fields.values else f"{len(operators)} comparisons"
        fields.fail(fields.mark, f"a condition with {found}", f"'metric' and one of {', '.join(OPERATORS)}")
        return None
    spec = metric_spec(fields, fields.values["metric"])
    because = fields.text("because")
    if spec is None:
        return None
    operator = operators[0]
    node = fields.values[operator]
    if spec.kind not in OPERATORS[operator]:
        fit = ", ".join(name for name, kinds in OPERATORS.items() if spec.kind in kinds)
        fields.fail(node.mark, f"{operator!r} on {spec.name}, which is a {spec.kind}", fit)
        return None
    if spec.kind == "number" and not because:
        fields.fail(fields.mark, f"the threshold of {spec.name} has no reason", "'because: …' beside it")
    threshold: Threshold
    if operator == "in":
        values = [metric_value(fields, item, spec) for item in fields.items("in")]
        threshold = tuple(str(value) for value in values if value is not None)
        written = ", ".join(value or '""' for value in threshold)
        if not threshold:
            fields.fail(node.mark, "'in' without a value", "a list of texts")
            return None
    else:
        value = metric_value(fields, node, spec)
        if value is None:
            return None
        threshold, written = value, (node.text if isinstance(node, Scalar) else "") or '""'
    return MetricComparison(metric=spec.name, operator=operator, threshold=threshold, written=written, because=because)


def _gain(fields: Fields) -> estimate.Gain | None:
    inner = Fields(fields.document, fields.values["gain"], ("low", "high", "basis"), fields.problems, "gain")
    inner.require(("low", "high", "basis"))
    basis = inner.text("basis")
    bounds: dict[str, estimate.Expression] = {}
    for name in ("low", "high"):
        node = inner.values.get(name)
        if node is None:
            continue
        if not isinstance(node, Scalar):
            inner.fail(node.mark, f"{name} is {kind_of(node)}", "an expression such as 0.5 * idle_data_frac")
            continue
        try:
            bounds[name] = estimate.parse(node.text)
        except estimate.ExpressionError as error:
            mark = YamlMark(node.mark.line, node.mark.column + error.offset)
            word = error.found.rsplit("'", 2)[-2] if error.found.startswith("the unknown metric") else ""
            inner.fail(mark, f"{error.found} in {name!r}", error.expected, meant(word, BY_NAME) if word else "")
    if len(bounds) < 2:
        return None
    gain = estimate.Gain(low=bounds["low"], high=bounds["high"], basis=basis)
    if not gain.high.metrics():
        inner.fail(inner.mark_of("high"), "the upper bound is a constant", "an expression over measured metrics")
    return gain


def _counter_examples(fields: Fields) -> tuple[CounterExample, ...]:
    found = []
    for item in fields.items("counter_examples"):
        inner = Fields(fields.document, item, ("text", "source"), fields.problems, "a counter-example")
        inner.require(("text", "source"))
        found.append(CounterExample(text=inner.text("text"), source=inner.text("source")))
    return tuple(found)


def _parameters(fields: Fields) -> dict[str, str]:
    node = fields.values.get("parameters")
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        fields.fail(node.mark, f"parameters is {kind_of(node)}", "fields, 'name: \"value\"'")
        return {}
    for key, _ in node.entries:
        if not _PARAMETER.fullmatch(key.text):
            fields.fail(key.mark, f"the parameter name {key.text!r}", "lower-case words joined by _")
    return {key.text: fields.text_in(value, f"the parameter {key.text}") for key, value in node.entries}


def _semantics(fields: Fields, transform: str) -> Semantics:
    """What the change does to the numbers: a transform's row says it, advice says it itself."""
    if not transform:
        fields.require(("semantics",))
        return Semantics(fields.choice("semantics", [member.value for member in Semantics]))
    if "semantics" in fields.values:
        found = "both semantics and a transform, which has its own"
        fields.fail(fields.mark_of("semantics"), found, fix="Take 'semantics' out: it is for advice.")
    return ROWS[transform].semantics if transform in ROWS else Semantics.EXACT


def read_rule(path: Path, name: str, problems: list[RuleError]) -> Rule | None:
    """Read and check one file. Faults go to `problems`; the rule is None when there were any."""
    try:
        document = read(path, name)
    except RuleError as error:
        problems.append(error)
        return None
    before = len(problems)
    rule = _rule(document, path.stem, problems)
    return rule if len(problems) == before else None


def _rule(document: YamlDocument, stem: str, problems: list[RuleError]) -> Rule | None:
    fields = Fields(document, document.root, FIELDS, problems, "the rule")
    if not isinstance(document.root, Mapping):
        return None
    fields.require(REQUIRED)
    version = fields.values.get("schema")
    if version is not None and not (isinstance(version, Scalar) and version.text == str(SCHEMA)):
        fields.fail(version.mark, f"schema is {kind_of(version)}", str(SCHEMA), "Update advisor or the rule.")
    identifier = fields.matching("id", _ID, "lower-case words joined by '-'")
    if identifier and identifier != stem:
        fields.fail(fields.mark_of("id"), f"id is {identifier!r} in {stem}.yaml", "the name of the file")
    cause = fields.matching("cause", _ID, "lower-case words joined by '-'")
    message = fields.text("message")
    for fault in list(messages.faults(message))[:1]:
        fields.fail(
            fields.mark_of("message"),
            f"{fault} in the message",
            "{metric} or {metric:pct|time|long|bytes|rate|count|times}",
        )
    transform = fields.matching("transform", _TRANSFORM, "a transform's id") if "transform" in fields.values else ""
    if transform and transform not in ROWS:
        expected = "one of " + ", ".join(ROWS)
        fields.fail(fields.mark_of("transform"), f"no transform {transform!r}", expected, meant(transform, ROWS))
    condition = _condition(document, fields.values["when"], problems) if "when" in fields.values else None
    gain = _gain(fields) if "gain" in fields.values else None
    if transform and "gain" in fields.values:
        found = "both a gain and a transform, whose gain is predicted from the profile"
        fields.fail(fields.mark_of("gain"), found, fix="Take 'gain' out: it is for advice.")
    role = fields.choice("role", ROLES) if "role" in fields.values else ROLES[0]
    selector = fields.choice("sites", SELECTORS) if "sites" in fields.values else ""
    requires = _requires(fields)
    severity, status = fields.choice("severity", SEVERITIES), fields.choice("status", STATUSES)
    semantics = _semantics(fields, transform)
    title, area, rationale = fields.text("title"), fields.choice("area", AREAS), fields.text("rationale")
    parameters, gates = _parameters(fields), fields.flag("gates")
    examples, references = _counter_examples(fields), fields.texts("references")
    if condition is None:
        return None
    rule = Rule(
        id=identifier, title=title, area=area, severity=severity, status=status,
        semantics=semantics, requires=requires, when=condition, message=message,
        rationale=rationale, gain=gain, transform=transform, parameters=parameters, gates=gates, sites=selector, counter_examples=examples,
        references=references, path=document.path, cause=cause or identifier, role=role,
    )  # fmt: skip
    for metric in rule.needed():
        if metric not in requires:
            fields.fail(
                fields.mark_of("requires"), f"the condition reads {metric}, which 'requires' lacks", fix="Add it."
            )
    for metric in requires:
        if metric not in rule.metrics():
            fields.fail(
                fields.mark_of("requires"), f"'requires' names {metric}, which the rule never reads", fix="Take it out."
            )
    return rule


def _requires(fields: Fields) -> tuple[str, ...]:
    specs = [metric_spec(fields, item) for item in fields.items("requires")]
    names = tuple(spec.name for spec in specs if spec is not None)
    if len(set(names)) < len(names):
        fields.fail(fields.mark_of("requires"), "'requires' names a metric twice", fix="Keep one.")
    return names
