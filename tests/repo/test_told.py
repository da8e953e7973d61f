"""What the program itself tells is easy to read: help, rules, messages and reports, in the words of docs/glossary.md; and docstrings."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
import pytest
from prose import too_long

import advisor
from advisor.cli.main import COMMANDS, AdvisorGroup, cli
from advisor.core.findings import Semantics
from advisor.core.verdict import STATUSES
from advisor.rules import load

ROOT = Path(advisor.__file__).parent
GLOSSARY = ROOT.parent / "docs" / "glossary.md"
# What people who work on the kernels read: pages and tables of measurements.
INTERNAL = ("ops/", "bench/", "profiling/trace/")
LEAST_WORDS = 4  # of a text that is a sentence, or a part of one
# What people read otherwise → the one name of the glossary, or the usual word.
NOT = {
    r"fresh process": "fresh run",
    r"end to end": "in fresh runs",
    r"foretold|foretell": "predicted, prediction",
    r"\bthe stack\b(?! trace)|\bthe whole\b(?! \w)": "the plan",
    r"\banew\b": "again",
    r"for want of": "because there is no …",
    r"\bto be had\b": "available",
    r"\bof advisor's own\b": "advisor's",
    r"\bnobody\b": "no one, or a sentence without it",
    r"\bmeanwhile\b": "at the same time",
}


def commands(group: click.Group, path: str = "advisor") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield f"{path} {name}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{path} {name}")


def helps() -> Iterator[tuple[str, str]]:
    """Where and what, of each paragraph and option of every command's help."""
    assert isinstance(cli, AdvisorGroup)
    for name, (_, _, line) in COMMANDS.items():
        yield f"advisor --help {name}", line
    for name, command in commands(cli):
        for paragraph in (command.help or "").split("\n\n"):
            if not paragraph.lstrip().startswith("\b"):
                yield f"{name} --help", " ".join(paragraph.split())
        for option in command.params:
            if isinstance(option, click.Option) and option.help:
                yield f"{name} {option.opts[0]}", option.help


def ruled() -> Iterator[tuple[str, str]]:
    for rule in load():
        yield from ((f"{rule.id}: {part}", getattr(rule, part)) for part in ("title", "message", "rationale"))
        yield from ((f"{rule.id}: counter example", example.text) for example in rule.counter_examples)


def documented(tree: ast.AST) -> set[int]:
    """Identities of the docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = (node.body[0] for node in ast.walk(tree) if isinstance(node, owners) and node.body)
    return {id(first.value) for first in firsts if isinstance(first, ast.Expr)}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string that may be told, values in it as `{}`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    left_out = documented(tree) | {id(part) for node in formatted for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(text.split()) >= LEAST_WORDS and re.search(r"[a-z]{2} [a-z]", text):
            yield node.lineno, text


@functools.cache
def told() -> tuple[tuple[str, str], ...]:
    return tuple(_told())


def _told() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(INTERNAL):
            yield from ((f"{name}:{line}", text) for line, text in texts(path))
    for path in sorted((ROOT / "reporting" / "templates").glob("*.jinja")):
        plain = re.sub(r"{#.*?#}|{%.*?%}|<[^>]*>", "\n", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for number, line in enumerate(plain.splitlines(), 1):
            if len(line.split()) >= LEAST_WORDS:
                yield f"{path.name}:{number}", re.sub(r"{{.*?}}", "{}", line)


def described() -> Iterator[tuple[str, str]]:
    """The docstrings of what is public, by paragraphs, arguments and rows of lists."""
    public = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, public) or getattr(node, "name", "").startswith("_"):
                continue
            text = ast.get_docstring(node) or ""
            if "\b" in text:
                continue  # a command's help, which is read as it is shown
            for part in re.split(r"\n\s*\n|\n(?=\s*- )|\n(?=    )|\n(?=[\w.*]+: )", text):
                yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", " ".join(part.split())


SOURCES = {"help": helps, "rules": ruled, "messages": told}


def split(text: str) -> list[str]:
    return re.split(r"(?<=[.!?:;])\s+|\n", text)


@pytest.mark.parametrize("texts_of", [*SOURCES.values(), described])
def test_sentences_are_short(texts_of: Callable[[], Iterable[tuple[str, str]]]) -> None:
    found = [f"{where}\t{sentence}" for where, text in texts_of() for sentence in split(text)]
    assert too_long(sentence.partition("\t")[2] for sentence in found) == []


@pytest.mark.parametrize("source", SOURCES)
def test_the_words_are_the_glossarys(source: str) -> None:
    found = [
        f"{where}: {match[0]!r} is {better!r}: {text}"
        for where, text in SOURCES[source]()
        for words, better in NOT.items()
        if (match := re.search(words, text, re.IGNORECASE))
    ]
    assert found == []


def test_help_speaks_of_changes_as_the_glossary_does() -> None:
    assert [where for where, text in helps() if re.search(r"\btransforms?\b", text)] == []


def test_the_glossary_has_what_the_code_names() -> None:
    rows = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", GLOSSARY.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"trial", "block", "pair", "plan", "gate", "effect", "kind", "site", "step", "fresh run"} <= set(rows)
    assert [status for status in STATUSES if status not in rows["verdict"]] == []
    assert [one.value for one in Semantics if f"*{one.value}*" not in rows["semantics"]] == []


def test_a_long_sentence_and_another_name_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        f'"""Doc of many words."""\nx = f"it was {{y}} in a fresh process"\nz = "{"w " * 41}"'
    )
    found = dict(texts(tmp_path / "a.py"))
    assert found == {2: "it was {} in a fresh process"}
    assert too_long([*split("A short one. " + "Word " * 41), "b"]) == ["Word " * 41]
    assert re.search(next(iter(NOT)), found[2])
