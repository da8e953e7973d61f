from __future__ import annotations

from pathlib import Path

import click
import pytest

from advisor.cli.help import HelpContext
from advisor.cli.main import COMMANDS, cli
from advisor.cli.reference import commands, context_of, page

COMMITTED = Path(__file__).resolve().parents[3] / "docs" / "reference" / "cli.md"


def test_the_page_is_current() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == page(), "python -m advisor.cli.reference > docs/reference/cli.md"


def test_every_command_and_what_is_below_it_is_there() -> None:
    text = page()
    assert [name for name in COMMANDS if f"## advisor {name}\n" not in text] == []
    assert "## advisor rules test\n" in text
    assert "## advisor kernels verify\n" in text
    assert "--min-gain" in text


def test_the_page_does_not_depend_on_the_terminal(monkeypatch) -> None:
    first = page()
    monkeypatch.setenv("COLUMNS", "40")
    assert page() == first


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_help_fits_the_terminal_and_cuts_nothing(columns: int) -> None:
    for context in commands(cli, context_of(cli, "advisor", width=columns)):
        text = context.command.get_help(context)
        assert [line for line in text.splitlines() if len(line) > columns] == []
        assert "..." not in text.replace("...]", "").replace(
            "]...", ""
        )  # click's mark of repeated arguments is not a cut


def test_words_with_hyphens_and_commands_are_not_torn_apart() -> None:
    for width in range(40, 100):
        formatter = HelpContext(cli, max_content_width=width, terminal_width=width).make_formatter()
        formatter.write_dl([("--x", "As `apply --max-time` does, by one-off cuda-graphs. [default: 10m or so]")])
        formatter.write_text("As `apply --max-time` does, by one-off cuda-graphs.")
        text = formatter.getvalue()
        assert all(text.count(word) == 2 for word in ("`apply --max-time`", "one-off", "cuda-graphs"))
        assert "[default: 10m or so]" in text


def test_one_way_to_ask_for_json() -> None:
    """`--format` and `--json` come together, and no option that takes a file is called so."""
    for context in commands(cli, context_of(cli, "advisor")):
        options = {name: option for option in context.command.params for name in option.opts}
        assert ("--json" in options) == ("--format" in options), context.command_path
        if "--json" in options:
            option = options["--json"]
            assert isinstance(option, click.Option)
            assert option.is_flag
