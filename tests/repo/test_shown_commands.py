"""Commands that the pages show are advisor's: the command is there, and so is each of its options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from advisor.cli.main import cli

REPO = Path(__file__).resolve().parents[2]
PAGES = [
    page
    for page in sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md"), *(REPO / "skills").rglob("*.md")])
    if "reference" not in page.parts and "notes" not in page.parts
]


def shown(text: str) -> Iterator[str]:
    """Command lines in blocks of shell, and those between backticks, that begin with `advisor`."""
    fence = ""
    for line in text.splitlines():
        if found := re.match(r"\s*```(\w*)", line):
            fence = "" if fence else found[1] or "text"
        elif fence in {"sh", "bash", "yaml"} and (
            found := re.search(r"(?:^\s*|&& |\$\(|run: )(advisor .*)", line.split(" #")[0])
        ):
            yield found[1]
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for line in re.findall(r"(?<!`)`(advisor [^`]+)`(?!`)", re.sub(r"\s+", " ", prose)):
        if "…" not in line.split(" ")[1]:
            yield line


def unknown(line: str) -> str:
    """What of a command line advisor does not have, or an empty text."""
    words = shlex.split(re.sub(r" (?:>>?|[|&;]+) .*|[;)\\\\].*", "", line))[1:]
    command: click.Command = cli
    context = click.Context(command)
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        if found is None:
            return f"command {words[0]}"
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    options = {option: param for param in command.params for option in [*param.opts, *param.secondary_opts]}
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if word == "--" or word == "SCRIPT" or word.endswith((".py", ".ipynb")):
            return ""  # what follows is the script's
        if not word.startswith("-"):
            continue
        if name not in options and name not in {"--help", "--version"}:
            return f"option {name} of {command.name}"
        if name in options and not value and words and not getattr(options[name], "is_flag", False):
            words.pop(0)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(REPO)) for page in PAGES])
def test_commands_shown_are_there(page: Path) -> None:
    lines = set(shown(page.read_text(encoding="utf-8")))
    assert {line: unknown(line) for line in lines if unknown(line)} == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("advisor profile -q --steps 50 train.py --lr 0.1", ""),
        ("advisor profil train.py", "command profil"),
        ("advisor report last --fmt md > a.md", "option --fmt of report"),
        ("advisor rules lnt x", "command lnt"),
        ("advisor apply --plan last -- torchrun --nproc-per-node 8 train.py", ""),
    ],
)
def test_a_command_that_is_not_there_is_found(line: str, said: str) -> None:
    assert unknown(line) == said
