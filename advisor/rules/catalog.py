"""The rules of one or more folders as one catalogue: files found, read, checked against each other."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from advisor.core.errors import AdvisorError, cause
from advisor.resources import rules_dir
from advisor.rules.rule import AREAS, Rule
from advisor.rules.schema import read_rule
from advisor.rules.yaml_nodes import RuleError, YamlMark

CASES_SUFFIX = ".cases.yaml"
MAX_FILES = 2000


def rule_files(folder: Path) -> tuple[Path, ...]:
    """Rule files at or below a path, sorted. Links to folders are not followed, so a loop of links ends.

    Raises:
        AdvisorError: when the path does not exist, cannot be read or holds no rule.
    """
    try:
        if folder.is_file():
            return (folder,)
        if not folder.is_dir():
            raise AdvisorError(
                f"no rules at {folder}", expected="a folder with rules/<area>/<defect>.yaml, or one such file"
            )
    except (OSError, RuntimeError) as error:
        raise AdvisorError(f"{folder} cannot be read ({cause(error)})", expected="a folder of rules") from None

    def refuse(error: OSError) -> None:
        raise AdvisorError(f"{error.filename} cannot be read ({error.strerror})", expected="a readable folder of rules")

    found = [
        Path(root) / name
        for root, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if name.endswith((".yaml", ".yml")) and not name.endswith((CASES_SUFFIX, ".cases.yml"))
    ]
    if not found:
        raise AdvisorError(f"no rules in {folder}", expected="files named <defect>.yaml")
    if len(found) > MAX_FILES:
        raise AdvisorError(f"{len(found)} rule files in {folder}", expected=f"at most {MAX_FILES}")
    return tuple(sorted(found))


def check(paths: Iterable[Path]) -> tuple[tuple[Rule, ...], tuple[RuleError, ...]]:
    """Every sound rule at the paths, and every fault found, in the order of lines; a file given twice is read once.

    Raises:
        AdvisorError: when a path is no readable folder or file.
    """
    rules: dict[str, Rule] = {}
    problems: list[RuleError] = []
    seen: set[Path] = set()
    for folder in paths:
        for path in rule_files(folder):
            real = path.resolve()
            if real in seen:
                continue
            seen.add(real)
            rule = read_rule(path, str(path), problems)
            if rule is None:
                continue
            if rule.id in rules:
                found = f"the id {rule.id} is taken by {rules[rule.id].path}"
                problems.append(_whole_file(rule, found, "an id of its own"))
                continue
            rules[rule.id] = rule
    return tuple(sorted(rules.values(), key=lambda rule: (list(AREAS).index(rule.area), rule.id))), in_order(problems)


def in_order(problems: Iterable[RuleError]) -> tuple[RuleError, ...]:
    """Faults file by file, a rule's cases behind the rule, each in the order of lines."""

    def place(problem: RuleError) -> tuple[str, bool, int, int]:
        rule = problem.path.removesuffix(CASES_SUFFIX)
        return rule.removesuffix(".yaml"), rule != problem.path, problem.mark.line, problem.mark.column

    return tuple(sorted(problems, key=place))


def load(paths: Iterable[Path] = (), *, shipped: bool = True) -> tuple[Rule, ...]:
    """The shipped rules and those at `paths` (folders or files), ordered by area and id.

    Raises:
        RuleError: for the first fault in a file, with its place; the text says how many more there are.
        AdvisorError: when a path is no readable folder of rules.
    """
    folders = [rules_dir()] if shipped else []
    rules, problems = check([*folders, *paths])
    if problems:
        first = problems[0]
        if len(problems) > 1:
            more = f"({len(problems) - 1} more; `advisor rules lint` lists them.)"
            first.fix = f"{first.fix} {more}".strip()
        raise first
    return rules


def _whole_file(rule: Rule, found: str, expected: str) -> RuleError:
    return RuleError(rule.path, YamlMark(1, 1), found, expected=expected)
