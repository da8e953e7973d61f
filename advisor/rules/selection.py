"""Which rules are asked, and with which thresholds: --select, --ignore and --set."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from advisor.core.errors import AdvisorError, meant
from advisor.core.metrics import BY_NAME
from advisor.rules import units
from advisor.rules.conditions import OPERATORS, MetricComparison, comparisons, replace
from advisor.rules.rule import Rule

NAMED = 6  # rules that a line names


def apply_overrides(
    rules: Iterable[Rule],
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    overrides: Mapping[str, str] | Iterable[str] = (),
) -> tuple[Rule, ...]:
    """The rules that `select` names and `ignore` does not, with thresholds changed by `overrides`.

    `select`, `ignore`: rule ids, areas, or globs over "id", "area" and "area/id". No `select` means all. `overrides`:
    "RULE.METRIC=VALUE", or "RULE.METRIC.OPERATOR=VALUE" where a rule compares one metric twice, as texts or as a mapping
    from the part before "=" to the part after. The value carries its unit; a share may also be a fraction ("0.1").

    Raises:
        AdvisorError: for a pattern that names nothing and an override that does not fit, with the nearest name.
    """
    rules = tuple(rules)
    chosen = _named(rules, select, "--select") or {rule.id for rule in rules}
    chosen -= _named(rules, ignore, "--ignore")
    changed = {rule.id: rule for rule in rules}
    texts = [f"{key}={value}" for key, value in overrides.items()] if isinstance(overrides, Mapping) else overrides
    for text in texts:
        rule = _override(changed, text)
        changed[rule.id] = rule
    return tuple(changed[rule.id] for rule in rules if rule.id in chosen)


def find(rules: Iterable[Rule], identifier: str) -> Rule:
    """The rule with this id.

    Raises:
        AdvisorError: when there is none, with the nearest id.
    """
    known = {rule.id: rule for rule in rules}
    if identifier not in known:
        inside = [rule_id for rule_id in known if identifier and identifier in rule_id]
        fix = meant(identifier, known) or "`advisor rules list` shows them all."
        if len(inside) > 1:
            fix = f"Rules with that in their name: {', '.join(inside[:NAMED])}{', …' if len(inside) > NAMED else ''}."
        raise AdvisorError(f"no rule {identifier!r}", fix=fix)
    return known[identifier]


def _named(rules: tuple[Rule, ...], patterns: Iterable[str], option: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        hits = {
            rule.id
            for rule in rules
            if any(fnmatchcase(name, pattern) for name in (rule.id, rule.area, f"{rule.area}/{rule.id}"))
        }
        if not hits:
            names = [name for rule in rules for name in (rule.id, rule.area)]
            fix = meant(pattern, names) or "`advisor rules list` shows rules and areas."
            raise AdvisorError(f"{option} {pattern!r} names no rule", expected="a rule id, an area or a glob", fix=fix)
        found |= hits
    return found


def _override(rules: dict[str, Rule], text: str) -> Rule:
    left, equals, value = text.partition("=")
    parts = left.strip().split(".")
    if not equals or len(parts) not in (2, 3) or not value.strip():
        raise AdvisorError(
            f"--set {text!r}", expected="RULE.METRIC=VALUE, such as --set input-starved.idle_data_frac='2 %'"
        )
    rule = find(rules.values(), parts[0])
    metric = parts[1]
    leaves = [leaf for leaf in comparisons(rule.when) if leaf.metric == metric]
    if not leaves:
        read = list(dict.fromkeys(leaf.metric for leaf in comparisons(rule.when)))
        raise AdvisorError(
            f"--set {text!r}: {rule.id} has no threshold on {metric!r}",
            expected="one of " + ", ".join(read),
            fix=meant(metric, read),
        )
    if len(parts) == 3:
        leaves = [leaf for leaf in leaves if leaf.operator == parts[2]]
    if len(leaves) != 1:
        raise AdvisorError(
            f"--set {text!r}: {rule.id} has {len(leaves)} such thresholds on {metric}",
            expected=f"RULE.METRIC.OPERATOR=VALUE with one of {', '.join(OPERATORS)}",
        )
    new = _changed(leaves[0], value.strip(), text)
    target = leaves[0]
    return dataclasses.replace(rule, when=replace(rule.when, lambda leaf: new if leaf is target else leaf))


def _changed(leaf: MetricComparison, value: str, text: str) -> MetricComparison:
    spec = BY_NAME[leaf.metric]
    threshold: float | str | bool | tuple[str, ...]
    if spec.kind == "number":
        if spec.unit == "frac" and re.fullmatch(r"-?0?\.[0-9]{1,15}|0", value):
            value = f"{float(value) * 100:.12g} %"
        try:
            threshold = units.parse_number(value, spec)
        except ValueError as error:
            raise AdvisorError(f"--set {text!r}: {error}", expected=units.example(spec)) from None
    elif spec.kind == "flag":
        if value not in ("true", "false"):
            raise AdvisorError(f"--set {text!r}: {leaf.metric} is a flag", expected="true or false")
        threshold = value == "true"
    else:
        threshold = tuple(part.strip() for part in value.split(",")) if leaf.operator == "in" else value
    return dataclasses.replace(
        leaf, threshold=threshold, written=value, because=f"set with --set (rule: {leaf.written})"
    )
