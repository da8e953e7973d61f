"""`advisor rules list|show|test|lint`; `metrics` has a file of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import completion, layout, output
from advisor.cli.help import HelpGroup
from advisor.cli.metrics import metrics
from advisor.cli.parameters import format_option, rules_option
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.units import counted
from advisor.rules.rule import AREAS, Rule

paths_argument = click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATHS]...")


def _say(text: str) -> None:
    output.say(text, sys.stdout)


@click.group(cls=HelpGroup)
def rules() -> None:
    """List, show, test and lint the rules, and list their metrics.

    A rule is a YAML file. It says what to look for, with a unit and a reason for every threshold, what that costs, and what to
    do. Cases beside it prove that the rule does what it says. docs/guides/add-a-rule.md shows how to write a rule.
    """


rules.add_command(metrics)


@rules.command("list")
@rules_option
@click.option(
    "--area",
    type=click.Choice(tuple(AREAS)),
    metavar="AREA",
    help="Only the rules of this area: " + ", ".join(AREAS) + ".",
)
@format_option("text", "json")
def list_rules(*, rules_dirs: tuple[Path, ...], area: str | None, form: str) -> int:
    """List every rule: id, severity, semantics, the change it asks for, title.

    \b
    Examples:
      advisor rules list --area input
      advisor rules list --rules my-rules --format json
    """
    from advisor.reporting import wording
    from advisor.rules import load

    chosen = [rule for rule in load(rules_dirs) if area in (None, rule.area)]
    if form == "json":
        _say(output.document("rules", [_facts(rule) for rule in chosen]))
        return ExitCode.OK
    rows = [(rule.id, rule.severity, rule.semantics.value, rule.transform or "–", rule.title) for rule in chosen]
    table = layout.table([("rule", "severity", "semantics", "asks for", "what"), *rows], output.width())
    _say(table[0])
    for number, (rule, text) in enumerate(zip(chosen, table[1:], strict=True)):
        if number == 0 or rule.area != chosen[number - 1].area:
            _say(f"\n{rule.area}: {AREAS[rule.area]}")
        _say(text)
    meanings = "; ".join(f"{semantics.value}: {meaning}" for semantics, meaning in wording.SEMANTICS.items())
    for text in (
        f"Semantics, what the change does to the numbers: {meanings}.",
        f"{counted(len(chosen), 'rule')}. `{output.program()} rules show ID` explains one.",
    ):
        _say("\n" + layout.wrapped(text, output.width()))
    return ExitCode.OK


def _facts(rule: Rule) -> dict[str, object]:
    gain = rule.gain and {"low": rule.gain.low.text, "high": rule.gain.high.text, "basis": rule.gain.basis}
    return {
        "id": rule.id,
        "title": rule.title,
        "area": rule.area,
        "severity": rule.severity,
        "status": rule.status,
        "semantics": rule.semantics.value,
        "requires": list(rule.requires),
        "transform": rule.transform,
        "parameters": rule.parameters,
        "gain": gain,
        "cause": rule.cause,
        "role": rule.role,
        "gates": rule.gates,
        "path": rule.path,
    }


@rules.command()
@rules_option
@format_option("text", "json")
@click.argument("identifier", metavar="ID", shell_complete=completion.rules)
def show(identifier: str, *, rules_dirs: tuple[Path, ...], form: str) -> int:
    """Explain one rule: what it says, why, its thresholds and their reasons, when it is wrong, references, cases.

    \b
    Example:
      advisor rules show launch-bound
    """
    from advisor.rules import load
    from advisor.rules.docs import rule_text
    from advisor.rules.selection import find

    rule = find(load(rules_dirs), identifier)
    if form == "json":
        _say(output.document("rule", {**_facts(rule), "text": rule_text(rule)}))
        return ExitCode.OK
    text = layout.wrapped(rule_text(rule), output.width())
    _say(layout.rendered(text, color=output.color(sys.stdout)) + f"\n\nFile: {rule.path}")
    return ExitCode.OK


@rules.command()
@paths_argument
@click.option("-v", "--verbose", is_flag=True, help="Show every case, not only those that fail.")
@format_option("text", "json")
def test(paths: tuple[Path, ...], *, verbose: bool, form: str) -> int:
    """Run the cases of the rules at PATHS (files or folders), or of the bundled rules. Exits with 1 when one fails.

    Every rule needs three cases: the rule fires, it stays quiet just below a threshold, and it is not evaluated because a
    metric is missing. Cases are beside the rule, in <rule>.cases.yaml.

    \b
    Examples:
      advisor rules test
      advisor rules test my-rules -v
    """
    from advisor.rules import load, run_cases

    load(paths)  # as everywhere else, beside the bundled ones
    results = run_cases(load(paths, shipped=not paths))
    failed = [result for result in results if not result.passed]
    if form == "json":
        _say(output.document("cases", results))
        return ExitCode.FINDINGS if failed else ExitCode.OK
    for result in results if verbose else failed:
        word = "ok    " if result.passed else "FAILED"
        _say(f"{word} {result.rule}: {result.case}" + (f": {result.detail}" if result.detail else ""))
    rules_tested = len({result.rule for result in results})
    _say(f"{counted(len(results), 'case')} of {counted(rules_tested, 'rule')}, {len(failed)} failed")
    return ExitCode.FINDINGS if failed else ExitCode.OK


@rules.command()
@paths_argument
@format_option("text", "json")
def lint(paths: tuple[Path, ...], *, form: str) -> int:
    """Check the form of the rules at PATHS (files or folders), or of the bundled rules. Exits with 1 on a fault.

    Each fault is shown as file:line:column, with the line. Nothing in a rule is ever executed.

    \b
    Example:
      advisor rules lint my-rules
    """
    from advisor.resources import rules_dir
    from advisor.rules import check
    from advisor.rules.cases import read_cases
    from advisor.rules.catalog import in_order, rule_files
    from advisor.rules.yaml_nodes import RuleError

    # Beside the bundled ones, whose ids are taken; told is what is at PATHS.
    files = {file.resolve() for path in paths or (rules_dir(),) for file in rule_files(path)}
    every, problems = check((rules_dir(), *paths))
    found = [rule for rule in every if Path(rule.path).resolve() in files]
    placed = [problem for problem in problems if Path(problem.path).resolve() in files]
    unread: list[AdvisorError] = []
    for rule in found:
        try:
            read_cases(rule)
        except RuleError as error:
            placed.append(error)
        except AdvisorError as error:
            unread.append(error)
    faults = (*in_order(placed), *unread)
    if form == "json":
        _say(output.document("faults", [_fault(fault) for fault in faults]))
        return ExitCode.FINDINGS if faults else ExitCode.OK
    for fault in faults:
        _say(str(fault))
        if isinstance(fault, RuleError) and fault.excerpt:
            _say(fault.excerpt)
    _say(f"{counted(len(found), 'sound rule')}, {counted(len(faults), 'fault')}")
    return ExitCode.FINDINGS if faults else ExitCode.OK


def _fault(fault: AdvisorError) -> dict[str, object]:
    """A fault as plain data; one without a place (a file that cannot be read) has no line."""
    from advisor.rules.yaml_nodes import RuleError

    place = (fault.path, fault.mark.line, fault.mark.column) if isinstance(fault, RuleError) else ("", None, None)
    told = {"text": str(fault), "found": fault.found, "expected": fault.expected, "fix": fault.fix}
    return {**dict(zip(("path", "line", "column"), place, strict=True)), **told}
