"""`advisor rules list|show|test|lint`."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.parameters import rules_option
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.units import counted
from advisor.rules.rule import AREAS, Rule

paths_argument = click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATHS]...")


def _say(text: str) -> None:
    output.say(text, sys.stdout)


@click.group()
def rules() -> None:
    """List, show, test and lint the rules.

    Rules are YAML files: what to look for, with a unit and a reason for every threshold, what it costs, what to do, and
    cases that prove the rule does what it says. docs/guides/add-a-rule.md shows how to write one.
    """


@rules.command("list")
@rules_option
@click.option("--area", type=click.Choice(tuple(AREAS)), help="Only the rules of this area.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, one object a rule.")
def list_rules(*, rules_dirs: tuple[Path, ...], area: str | None, as_json: bool) -> int:
    """List every rule: id, severity, semantics, the transform it asks for, title.

    \b
    Examples:
      advisor rules list --area input
      advisor rules list --rules my-rules --json
    """
    from advisor.reporting import wording
    from advisor.rules import load

    chosen = [rule for rule in load(rules_dirs) if area in (None, rule.area)]
    if as_json:
        _say(output.json_text([_facts(rule) for rule in chosen]))
        return ExitCode.OK
    rows = [(rule.id, rule.severity, rule.semantics.value, rule.transform or "–", rule.title) for rule in chosen]
    table = _table([("rule", "severity", "semantics", "asks for", "what"), *rows], output.width())
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
        _say("\n" + _wrapped(text, output.width()))
    return ExitCode.OK


def _table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Rows in columns; where they are too wide together, the last two columns have a line of their own below each row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  " + "  ".join([*(f"{text:{w}}" for text, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    if max(map(len, lines)) <= width:
        return lines
    above = ["  " + "  ".join(f"{text:{w}}" for text, w in zip(row[:-2], widths, strict=False)) for row in rows]
    below = [row[-1] + (f" ({row[-2]})" if row[-2] != "–" else "") for row in rows]
    return [
        f"{first.rstrip()}\n{_wrapped(' ' * 6 + second, width)}" for first, second in zip(above, below, strict=True)
    ]


def _wrapped(text: str, width: int) -> str:
    """Lines of Markdown no longer than `width` where words allow it; items of a list hang."""
    lines = []
    for line in text.splitlines():
        text = re.sub(r"^ *(?:- )?", "", line)
        mark = line.removesuffix(text)
        lines += textwrap.wrap(
            text,
            max(width, 40),
            initial_indent=mark,
            subsequent_indent=" " * len(mark),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


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
        "gates": rule.gates,
        "path": rule.path,
    }


@rules.command()
@rules_option
@click.argument("identifier", metavar="ID")
def show(identifier: str, *, rules_dirs: tuple[Path, ...]) -> int:
    """Explain one rule: what it says, why, its thresholds and their reasons, when it is wrong, references, cases.

    \b
    Example:
      advisor rules show launch-bound
    """
    from advisor.rules import load
    from advisor.rules.docs import rule_text
    from advisor.rules.selection import find

    rule = find(load(rules_dirs), identifier)
    _say(_wrapped(rule_text(rule), output.width()) + f"\n\nFile: {rule.path}")
    return ExitCode.OK


@rules.command()
@paths_argument
@click.option("-v", "--verbose", is_flag=True, help="Show every case, not only those that fail.")
def test(paths: tuple[Path, ...], *, verbose: bool) -> int:
    """Run the cases of the rules at PATHS (files or folders), or of the bundled rules. Exits with 1 when one fails.

    Every rule needs a case that fires, one that stays quiet just below a threshold, and one that is not evaluated for
    lack of a metric. They stand beside the rule, in <rule>.cases.yaml.

    \b
    Examples:
      advisor rules test
      advisor rules test my-rules -v
    """
    from advisor.rules import load, run_cases
    from advisor.transforms.registry import TRANSFORMS

    load(paths, transforms=TRANSFORMS)  # as everywhere else, beside the bundled ones
    results = run_cases(load(paths, shipped=not paths, transforms=TRANSFORMS))
    failed = [result for result in results if not result.passed]
    for result in results if verbose else failed:
        word = "ok    " if result.passed else "FAILED"
        _say(f"{word} {result.rule}: {result.case}" + (f": {result.detail}" if result.detail else ""))
    rules_tested = len({result.rule for result in results})
    _say(f"{counted(len(results), 'case')} of {counted(rules_tested, 'rule')}, {len(failed)} failed")
    return ExitCode.FINDINGS if failed else ExitCode.OK


@rules.command()
@paths_argument
def lint(paths: tuple[Path, ...]) -> int:
    """Check the form of the rules at PATHS (files or folders), or of the bundled rules. Exits with 1 on a fault.

    Each fault is told as file:line:column with the line itself. Nothing in a rule is ever executed.

    \b
    Example:
      advisor rules lint my-rules
    """
    from advisor.resources import rules_dir
    from advisor.rules import check
    from advisor.rules.cases import read_cases
    from advisor.rules.catalog import rule_files
    from advisor.rules.yaml_nodes import RuleError
    from advisor.transforms.registry import TRANSFORMS

    # Beside the bundled ones, whose ids are taken and whose order holds; told is what is at PATHS.
    files = {file.resolve() for path in paths or (rules_dir(),) for file in rule_files(path)}
    every, problems = check((rules_dir(), *paths), transforms=TRANSFORMS)
    found = [rule for rule in every if Path(rule.path).resolve() in files]
    faults: list[AdvisorError] = [problem for problem in problems if Path(problem.path).resolve() in files]
    for rule in found:
        try:
            read_cases(rule)
        except AdvisorError as error:
            faults.append(error)
    for fault in faults:
        _say(str(fault))
        if isinstance(fault, RuleError) and fault.excerpt:
            _say(fault.excerpt)
    _say(f"{counted(len(found), 'sound rule')}, {counted(len(faults), 'fault')}")
    return ExitCode.FINDINGS if faults else ExitCode.OK
