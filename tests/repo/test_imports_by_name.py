"""What is imported by a text goes one way too: the layers of pyproject.toml hold for `import_module` as they do for `import`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

REPO = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
LAYERS = [[name.strip() for name in layer.split("|")] for layer in CONTRACTS[0]["layers"]]
# Python itself starts the bootstrap in the script's process, below which nothing of advisor's is: what it hands over to, by name.
BOOTSTRAP = "advisor/profiling/bootstrap/sitecustomize.py"
HANDS_OVER_TO = {"advisor.pipeline", "advisor.distributed.place", "advisor.userfiles.guard"}


def named(text: str) -> Iterator[str]:
    """The modules of advisor's that a source imports by a text, as far as it is one: `advisor.cli.` of f"advisor.cli.{name}"."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.JoinedStr):
                first = first.values[0]
            if isinstance(first, ast.Constant) and str(first.value).startswith("advisor."):
                yield first.value


def height(module: str) -> int:
    """How high its layer is; the lowest is 0."""
    found = [i for i, layer in enumerate(LAYERS) if any(f"{module}.".startswith(f"{name}.") for name in layer)]
    return len(LAYERS) - found[0] if found else len(LAYERS) + 1


def upwards(path: str, text: str) -> list[str]:
    own = height(path.removesuffix(".py").replace("/", "."))
    return [f"{path}: {name}" for name in named(text) if height(name) > own]


def test_no_import_by_name_goes_up() -> None:
    found = []
    for path in sorted((REPO / "advisor").rglob("*.py")):
        name = path.relative_to(REPO).as_posix()
        if name != BOOTSTRAP:
            found += upwards(name, path.read_text(encoding="utf-8"))
    assert found == []


def test_what_the_bootstrap_hands_over_to_is_what_is_said_here() -> None:
    assert set(named((REPO / BOOTSTRAP).read_text(encoding="utf-8"))) == HANDS_OVER_TO


def test_an_import_that_goes_up_is_found() -> None:
    text = 'importlib.import_module("advisor.pipeline"); import_module(f"advisor.core.{name}"); import_module("torch")'
    assert upwards("advisor/trials/a.py", text) == ["advisor/trials/a.py: advisor.pipeline"]
    assert upwards("advisor/cli/a.py", text) == []
