"""`advisor explain`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from advisor.cli import completion, layout, output
from advisor.cli.help import Command
from advisor.cli.parameters import rules_option
from advisor.core.errors import AdvisorError, meant
from advisor.core.transform_row import Row
from advisor.core.transform_table import ROWS
from advisor.rules.rule import Rule

if TYPE_CHECKING:
    from advisor.runs import LoadedRun


@click.command(cls=Command)
@rules_option
@click.argument("what", metavar="[RULE|CHANGE|RUN]", default="last", shell_complete=completion.explained)
@click.argument("run", metavar="[RUN]", default="last", shell_complete=completion.runs)
def explain(what: str, run: str, *, rules_dirs: tuple[Path, ...]) -> None:
    """Explain a rule, a change, or what was found in a run.

    \b
    RULE    did it fire in the run, on which values, where, and why it matters
    CHANGE  what it does to the numbers, how its trials ended, how to write it
            by hand
    RUN     each finding that fired, and each of its conditions with its value

    RUN is a run's folder, its name, or `last` (the default).

    \b
    Examples:
      advisor explain
      advisor explain convolutions-in-nchw
      advisor explain amp_bf16
      advisor explain launch-bound advisor-runs/train-20261120-1
    """
    from advisor.rules import load

    rules = {rule.id: rule for rule in load(rules_dirs)}
    if what in rules:
        _rule(rules[what], run)
    elif what in ROWS:
        _change(ROWS[what], run, tuple(rules.values()))
    else:
        _run(what, (*rules, *ROWS))


def _loaded(run: str) -> LoadedRun | None:
    """The run, or None where none was named and there is none here: a rule and a change can be explained without one."""
    from advisor import runs

    try:
        return runs.load_run(run)
    except AdvisorError:
        if run != "last":
            raise
        return None


def _rule(rule: Rule, run: str) -> None:
    from advisor.reporting.explained import rule_in_run
    from advisor.rules.docs import rule_text

    width, color = output.width(), output.color(sys.stdout)
    loaded = _loaded(run)
    if loaded is not None and loaded.findings is not None:
        found = next((f for f in loaded.findings.findings if f.rule == rule.id), None)
        output.say(rule_in_run(found, loaded.run_dir.name, width, color) + "\n", sys.stdout)
    output.say(layout.rendered(layout.wrapped(rule_text(rule, cases=False), width), color=color), sys.stdout)


def _change(row: Row, run: str, rules: tuple[Rule, ...]) -> None:
    from advisor.reporting.explained import change_in_run, change_text
    from advisor.trials.snippets import SNIPPETS

    width, color = output.width(), output.color(sys.stdout)
    asking = [rule.id for rule in rules if rule.transform == row.id]
    by_hand = SNIPPETS[row.id]({}) if row.id in SNIPPETS else ()
    output.say(change_text(row, asking, by_hand, width, color), sys.stdout)
    loaded = _loaded(run)
    if loaded is not None:
        told = change_in_run(row.id, loaded.findings, loaded.trials, loaded.run_dir.name, width, color)
        output.say(f"\n{told}", sys.stdout)
    output.say(f"\nTo try it: {output.program()} try --change {row.id} SCRIPT", sys.stdout)


def _run(what: str, known: tuple[str, ...]) -> None:
    from advisor import runs

    try:
        loaded = runs.load_run(what)
    except AdvisorError as error:
        if what == "last" or Path(what).exists():
            raise
        fix = (
            meant(what, known) or "`advisor rules list` lists rules with the changes they ask for, `advisor runs` runs."
        )
        raise AdvisorError(f"{what!r} is no rule, no change and no run here", fix=fix) from error
    text = output.run_text(
        "text",
        loaded.profile,
        loaded.findings,
        loaded.trials,
        stream=sys.stdout,
        explain="fired",
        run_dir=loaded.run_dir,
    )
    output.say(text, sys.stdout)
