"""docs/architecture.md is short and true: its folders are there, in the order in which imports go, and so are its files."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

REPO = Path(__file__).resolve().parents[2]
TEXT = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_LINES = 80


def folders() -> list[str]:
    """What the table of folders names, from the top."""
    table = TEXT[TEXT.index("| folder |") : TEXT.index("## Where is")]
    return [
        name
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(advisor/[\w/]+)`", row.partition("| ")[2].split(" |")[0])
    ]


def layers() -> dict[str, int]:
    """How high each package of advisor's stands, by the import linter's contract; the highest is 0."""
    settings = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    found = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    return {name.strip(): height for height, names in enumerate(found) for name in names.split("|")}


def test_it_is_one_page() -> None:
    assert len(TEXT.splitlines()) <= MOST_LINES


def test_every_package_is_in_the_table_and_no_other() -> None:
    packages = {f"advisor/{path.parent.name}" for path in (REPO / "advisor").glob("*/__init__.py")}
    assert [name for name in folders() if not (REPO / name).is_dir()] == []
    assert packages - {"/".join(name.split("/")[:2]) for name in folders()} == set()


def test_the_table_has_the_order_of_imports() -> None:
    heights = layers()
    found = [heights[".".join(name.split("/")[:2])] for name in folders() if ".".join(name.split("/")[:2]) in heights]
    assert found == sorted(found)


@pytest.mark.parametrize(
    "question", ["bf16 decided", "block timed", "batch norm reach its kernel", "checkpoint kept safe"]
)
def test_a_new_reader_finds_where(question: str) -> None:
    (row,) = [line for line in TEXT.splitlines() if line.startswith("|") and question in line]
    files = re.findall(r"`((?:advisor|rules|kernels)/[\w./-]+)`", row)
    assert files
    assert [name for name in files if not (REPO / name).exists()] == []


def test_every_module_opens_with_what_it_does() -> None:
    sources = sorted((REPO / "advisor").rglob("*.py"))
    assert sources
    assert [str(path) for path in sources if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


def test_the_picture_names_what_is_there() -> None:
    picture = TEXT[: TEXT.index("## Folders")]
    named = re.findall(r"\b(?:profiling|trials)/[\w./]+", picture)
    assert len(named) >= 4
    assert [name for name in named if not (REPO / "advisor" / name).exists()] == []
