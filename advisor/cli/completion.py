"""What a shell offers when Tab is pressed: scripts and plans by their files, runs, rules and changes by their names."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from advisor.core import transform_table

RUNS = "advisor-runs"


def files(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The shell's own completion of files: scripts, and what a script takes."""
    return [CompletionItem(begun, type="file")]


def changes(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Changes by their ids, each with its title where the shell shows one."""
    return [
        CompletionItem(name, help=row.title) for name, row in transform_table.ROWS.items() if name.startswith(begun)
    ]


def rules(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Rules by their ids, each with its title."""
    from advisor.rules import load

    return [CompletionItem(rule.id, help=rule.title) for rule in load() if rule.id.startswith(begun)]


def runs(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """`last`, and the runs here by their folders; other folders are the shell's to complete."""
    from advisor.runs.listing import listed

    names = ["last", *(f"{RUNS}/{run.folder.name}" for run in listed())]
    return _begun(names, begun) or [CompletionItem(begun, type="dir")]


def explained(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """All that `advisor explain` takes."""
    found = [*changes(context, parameter, begun), *rules(context, parameter, begun)]
    return [*found, *runs(context, parameter, begun)]


def _begun(names: Iterable[str], begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(begun)]
