"""The first page leads to the answers of common questions, and the glossary names what is in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_told import NOT

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"

# What somebody asks, the row of the first page that they would take, and what the section that it leads to has to say.
QUESTIONS = [
    ("which GPU", "works on my GPU", r"H200, H100 \(sm_90\) \| tested"),
    ("what is the risk of bf16", "risk of bf16", r"8\s+bits of precision[\s\S]*--skip amp_bf16"),
    ("how do I undo it", "undo a plan", r"ADVISOR_DISABLE=1[\s\S]*`skipped`"),
    ("where is my checkpoint", "find my checkpoint", r"your checkpoints \| where your script writes them"),
    ("why inconclusive", "inconclusive", r"noise was larger than the gain"),
    ("on a cluster", "run on a cluster", r"advisor run --plan plan\.yaml"),
    ("in CI", "regression in CI", r"--fail-on-regression"),
    ("my own rule", "my own rule", r"--rules my-rules"),
    ("my own kernel", "my own rule", r"`cuda\.py`, the launches|\*\*`cuda\.py`\*\*"),
    ("how do I uninstall", "uninstall", r"pip uninstall cnn-advisor"),
]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def section(target: str) -> str:
    """The text that a link from docs/index.md leads to: the page, or its section from the heading to the next of its level."""
    name, _, anchor = target.partition("#")
    text = (DOCS / name).read_text(encoding="utf-8")
    if not anchor:
        return text
    for heading in re.finditer(r"^(#+) +(.+)$", text, re.MULTILINE):
        if slug(heading[2]) == anchor:
            rest = text[heading.end() :]
            end = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
            return rest[: end.start()] if end else rest
    raise AssertionError(f"docs/{name} has no heading {anchor}")


@pytest.mark.parametrize(("question", "row", "answer"), QUESTIONS, ids=[q for q, _, _ in QUESTIONS])
def test_an_answer_is_one_click_away(question: str, row: str, answer: str) -> None:
    lines = [
        line for line in (DOCS / "index.md").read_text(encoding="utf-8").splitlines() if row in line.split("](")[0]
    ]
    assert lines, row
    targets = [target for line in lines for target in re.findall(r"\]\(([^)]+)\)", line)]
    assert any(re.search(answer, section(target)) for target in targets), targets


def test_terms_of_the_glossary_are_in_the_code() -> None:
    found = re.findall(
        r"^\| \*\*([\w ]+)\*\* \|.*\| (.*) \|$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.M
    )
    assert len(found) > 20
    for term, where in found:
        for name, file in re.findall(r"`(\w+)` in `([\w/.]+)`", where):
            assert re.search(rf"^class {name}\b", (REPO / file).read_text(encoding="utf-8"), re.MULTILINE), term


WRITTEN = {
    r"\bcandidates?\b": "change",
    r"\bbut for\b": "except",
    r"\b(?:is|are|was|were) told\b": "shown, named, counted",
}
FOR_USERS = [
    REPO / "README.md",
    *(p for p in sorted(DOCS.glob("*.md")) if p.stem not in {"networks", "reliability", "causes", "numerics"}),
    *(page for folder in ("guides", "decisions", "notes") for page in sorted((DOCS / folder).rglob("*.md"))),
]


@pytest.mark.parametrize("page", FOR_USERS, ids=[str(p.relative_to(REPO)) for p in FOR_USERS])
def test_one_word_for_one_thing(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = [f"{match[0]!r}: {better}" for word, better in (NOT | WRITTEN).items() for match in re.finditer(word, text)]
    assert found == []


def test_messages_quoted_by_symptom_are_advisors() -> None:
    """What a table quotes as `it says` stands in the sources, so that somebody who searches for it finds it."""
    said = "\n".join(
        path.read_text(encoding="utf-8")
        for folder, kind in (("advisor", "*.py"), ("rules", "*.yaml"))
        for path in sorted((REPO / folder).rglob(kind))
    )
    quoted = []
    for page in FOR_USERS:
        for table in re.findall(r"^\| it says \|.*\n\|[-|: ]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.M):
            quoted += [row.split("|")[1].strip() for row in table.splitlines()]
    assert len(quoted) > 5
    parts = [part.strip() for text in quoted for part in re.split(r", |…|`[^`]*`|\bN\b|\(|\)", text)]
    assert [part for part in parts if len(part.split()) > 2 and part not in said] == []
