"""Tests use what is public, so that code can be rearranged behind it. `private_names.txt` says how often a test file still uses a
private name of another module: it may only become less.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
ALLOWED = Path(__file__).with_name("private_names.txt")
PACKAGES = ("advisor", "benchmark_pages")
BY_NAME = ("setattr", "delattr", "getattr", "hasattr", "object")  # monkeypatch's, mock.patch.object, and Python's own


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def root(node: ast.expr) -> str:
    """`a` of `a.b.c`; empty for what begins otherwise."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Of each import of the packages: what it takes, and the name that the file has for it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            yield from ((alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.partition(".")[0] in PACKAGES]
            yield from ((alias.name, alias.asname or alias.name.partition(".")[0]) for alias in ours)


def private_names(text: str) -> list[str]:
    """Private names that a source imports from the packages, or reads or sets on what it has imported of them.

    Those of an object that a test has made are not seen: nobody knows its class here.
    """
    tree = ast.parse(text)
    taken = list(imports(tree))
    ours = {name for _, name in taken}
    found = [name for name, _ in taken if is_private(name.rpartition(".")[2])]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and root(node.value) in ours:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and root(node.args[0]) in ours:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else root(node.func)
            match node.args[1]:
                case ast.Constant(value=str(name)) if called in BY_NAME and is_private(name):
                    found.append(f"{ast.unparse(node.args[0])}.{name}")
    return found


def test_tests_use_no_more_private_names() -> None:
    allowed = {}
    for line in ALLOWED.read_text(encoding="utf-8").splitlines():
        path, _, count = line.rpartition(" ")
        allowed[path] = int(count)
    found = {
        path.relative_to(REPO).as_posix(): private_names(path.read_text(encoding="utf-8"))
        for path in sorted((REPO / "tests").rglob("*.py"))
    }
    more = {path: names for path, names in found.items() if len(names) > allowed.get(path, 0)}
    assert more == {}, "test it through what is public, or give it a public name"
    fewer = {path: len(found.get(path, ())) for path, count in allowed.items() if len(found.get(path, ())) < count}
    assert fewer == {}, "fewer by now: write these counts into private_names.txt, and leave out a file with none"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from advisor.core.units import _text", ["_text"]),
        ("from advisor.core.units import _text as text", ["_text"]),
        ("from advisor.core import units\nunits._text(1)", ["units._text"]),
        ("from advisor.core import units as u\nu.Kind._text", ["u.Kind._text"]),
        ("import advisor.core.units\nadvisor.core.units._text", ["advisor.core.units._text"]),
        ("from advisor.core import units\nmonkeypatch.setattr(units, '_text', 1)", ["units._text"]),
        ("from advisor.core import units\ngetattr(units, '_text')", ["units._text"]),
        ("from advisor.core import units\nunits.text(1), units.__name__, units.text('_a')", []),
        ("import os\nos._exit(0)\nself._text", []),
    ],
    ids=["imported", "renamed", "read", "class", "dotted", "patched", "by-name", "public", "others"],
)
def test_a_private_name_is_found(text: str, expected: list[str]) -> None:
    assert private_names(text) == expected
