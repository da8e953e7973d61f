"""How `--help` is laid out: nothing is cut off, and no option, command or default is torn apart at the end of a line."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click

_HYPHEN, _SPACE = "\N{NON-BREAKING HYPHEN}", "\N{NO-BREAK SPACE}"
_TOGETHER = re.compile(r"`[^`\n]{1,40}`|\[default: [^\]\n]*\]")


def _whole(text: str) -> str:
    """The text as `textwrap` may not break it: in words with hyphens, in `commands` and in defaults."""
    text = _TOGETHER.sub(lambda found: found[0].replace(" ", _SPACE), text)
    return re.sub(r"(?<=\w)-(?=\w)", _HYPHEN, text)


class Formatter(click.HelpFormatter):
    """click's, with words kept whole."""

    def write_text(self, text: str) -> None:
        super().write_text(_whole(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(first, _whole(second)) for first, second in rows], col_max, col_spacing)

    def getvalue(self) -> str:
        return super().getvalue().replace(_HYPHEN, "-").replace(_SPACE, " ")


class HelpContext(click.Context):
    """Help comes from our formatter."""

    formatter_class = Formatter


class Command(click.Command):
    """Every command of ours."""

    context_class = HelpContext


class HelpGroup(click.Group):
    """Lists its commands with the whole first sentence of each one's help."""

    context_class = HelpContext
    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
