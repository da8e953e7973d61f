"""Pages for users are easy to read: short sentences, and lines that fit beside code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prose import MOST, blocks, cells, sentences, too_long

REPO = Path(__file__).resolve().parents[2]
COLUMNS = 100
# Written by commands, from results and sources; their texts are held where they are made.
GENERATED = (
    "docs/benchmarks/",
    "docs/reference/",
    "docs/causes.md",
    "docs/networks.md",
    "docs/numerics.md",
    "docs/reliability.md",
)
PAGES = [
    name
    for name in sorted(
        path.relative_to(REPO).as_posix() for path in [*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")]
    )
    if not name.startswith(GENERATED)
]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    assert too_long(sentences((REPO / page).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", PAGES)
def test_cells_of_tables_are_short(page: str) -> None:
    said = cells((REPO / page).read_text(encoding="utf-8"))
    assert [part for part in said if len(part.split()) > MOST] == []


@pytest.mark.parametrize("page", PAGES)
def test_lines_fit_beside_code(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    assert [line for block in blocks(text) for line in block if len(line) > COLUMNS and " " in line.strip()] == []


def test_a_long_sentence_and_a_long_line_are_found() -> None:
    long = "Word " + "word " * 40 + "end. A short one follows."
    assert [
        len(s.split()) for s in sentences(f"# Head\n\n{long}\n\n```sh\n{long}\n```\n\n- an item that counts\n")
    ] == [42, 4, 5]
    assert list(blocks("| a |\n\n1. one\n2. two\n   more\n")) == [["1. one"], ["2. two", "   more"]]


@pytest.mark.parametrize("page", PAGES)
def test_code_is_fenced(page: str) -> None:
    """Indented code is not told from the text of a list item, neither by readers nor by what wraps lines."""
    text = re.sub(r"^( *)```.*?^\1```", "", (REPO / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found, item = [], False
    for before, line in zip(["", *text.splitlines()], text.splitlines(), strict=False):
        item = bool(re.match(r"\s*([-*]|\d+\.) ", line)) or (item and (not line.strip() or line.startswith(" ")))
        if not before.strip() and line.startswith("    ") and not item:
            found.append(line)
    assert found == []
