"""Pages for users are easy to read: short sentences, and lines that fit beside code."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
COLUMNS, MEDIAN, MOST = 100, 25, 40
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


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of each paragraph and list item; no code, tables, headings or pictures."""
    text = re.sub(r"^```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ +```.*?^ +```$", "", text, flags=re.DOTALL | re.MULTILINE)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or re.match(r"\s*([|#!<]|---|\*\*Exit codes)", line):
            if block:
                yield block
            block = []
        elif re.match(r"\s*([-*]|\d+\.) ", line) and block:
            yield block
            block = [line]
        else:
            block.append(line)


def cells(text: str) -> list[str]:
    """What the cells of tables say, in parts of a sentence; links and code are words."""
    found = []
    for line in re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE).splitlines():
        if line.lstrip().startswith("|"):
            shown = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", line))
            found += [part for cell in re.split(r"(?<!\\)\|", shown) for part in re.split(r"(?<=[.!?:;])\s+", cell)]
    return found


def sentences(text: str) -> list[str]:
    found = []
    for block in blocks(text):
        joined = " ".join(line.strip() for line in block)
        joined = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", joined))
        found += [s for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z*\[(])", joined) if len(s.split()) > 2]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    lengths = {s: len(s.split()) for s in sentences((REPO / page).read_text(encoding="utf-8"))}
    assert [s for s, words in lengths.items() if words > MOST] == []
    assert not lengths or statistics.median(lengths.values()) <= MEDIAN


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
