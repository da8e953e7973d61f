"""What people read about the rules: one rule as text, and docs/reference/rules.md. Generated, never typed.

python -m advisor.rules.docs > docs/reference/rules.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from advisor.rules.cases import read_cases
from advisor.rules.catalog import load
from advisor.rules.conditions import AnyOf, describe
from advisor.rules.rule import AREAS, SEVERITIES, Rule

_HEADER = """\
# Rules

{count} rules in {areas} areas, from `rules/<area>/<rule>.yaml`. This page is generated from them by
`python -m advisor.rules.docs > docs/reference/rules.md`; a test fails when it is out of date.

A rule is **fired**, **quiet** or **not evaluated**; the last names the metric that is missing and what it needs, for a
missing metric is neither true nor false. `advisor rules metrics` lists the metrics with their units. A *gain* is a
pair of bounds on the share of the step's time that can be saved; 0 as lower bound says that the change may give nothing.
Of what advisor can try it is predicted from the run's profile (`advisor/analysis/predictions`), of advice computed from its
metrics as the rule says. *Semantics* says what a change does to the numbers:
exact (bit-equal), reassociated (same maths, other order), precision (fewer mantissa bits somewhere), training (another
recipe: only ever advice). A rule that *gates* puts every measurement of the run in doubt. Rules of one *cause*, and rules
that ask for one change, are told as one card, led by the one with the most to gain; a *description* says what a step looks
like and not why, and stands below every cause.

Write your own: [add a rule](../guides/add-a-rule.md).
"""


def rule_text(rule: Rule, *, cases: bool = True) -> str:
    """Everything about one rule as Markdown that also reads well in a terminal; ends without a newline."""
    facts = [f"{rule.severity} severity", rule.semantics.value, rule.status]
    if rule.transform:
        parameters = ", ".join(f"{name} {value}" for name, value in rule.parameters.items())
        facts.append(f"asks for `{rule.transform}`" + (f" ({parameters})" if parameters else ""))
    else:
        facts.append("advice for a person")
    if rule.cause not in ("", rule.id):
        facts.append(f"cause `{rule.cause}`")
    if rule.role == "description":
        facts.append("a description, no cause")
    if rule.gates:
        facts.append("gates all others")
    lines = [f"### {rule.id}", "", f"**{rule.title}** ({rule.area}; {', '.join(facts)})", ""]
    lines += [f"What it says: {rule.message}", "", f"Why: {rule.rationale}", ""]
    lines += ["When any of these holds:" if isinstance(rule.when, AnyOf) else "When all of these hold:", ""]
    described = describe(rule.when)
    lines += [line[2:] for line in described[1:]] if isinstance(rule.when, AnyOf) else described
    if rule.gain:
        lines += ["", f"Gain: `{rule.gain.low.text}` to `{rule.gain.high.text}` of the step: {rule.gain.basis}."]
    if rule.counter_examples:
        lines += ["", "When it is wrong:", ""]
        lines += [f"- {example.text} ({example.source})" for example in rule.counter_examples]
    if rule.references:
        lines += ["", "References:", "", *(f"- {reference}" for reference in rule.references)]
    if cases:
        found = read_cases(rule)
        lines += ["", "Cases:", "", *(f"- {case.expect.value}: {case.name}" for case in found)] if found else []
    return "\n".join(lines)


def page(rules: Iterable[Rule]) -> str:
    """docs/reference/rules.md as it should be."""
    rules = tuple(rules)
    areas = [area for area in AREAS if any(rule.area == area for rule in rules)]
    parts = [_HEADER.format(count=len(rules), areas=len(areas))]
    parts.append("| area | what it is about | rules |\n|---|---|---|")
    for area in areas:
        count = sum(rule.area == area for rule in rules)
        parts[-1] += f"\n| [{area}](#{area}) | {AREAS[area]} | {count} |"
    for area in areas:
        chosen = sorted((rule for rule in rules if rule.area == area), key=_order)
        table = "| rule | severity | semantics | asks for | what |\n|---|---|---|---|---|"
        for rule in chosen:
            wanted = f"`{rule.transform}`" if rule.transform else "–"
            table += (
                f"\n| [{rule.id}](#{rule.id}) | {rule.severity} | {rule.semantics.value} | {wanted} | {rule.title} |"
            )
        parts += [f"## {area}", f"{AREAS[area].capitalize()}.", table]
        parts += [rule_text(rule, cases=False) for rule in chosen]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _order(rule: Rule) -> tuple[int, str]:
    return -SEVERITIES.index(rule.severity), rule.id


if __name__ == "__main__":
    sys.stdout.write(page(load()))
