"""Links between the pages lead somewhere, to the heading too; so do files and decisions that text names."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(REPO)) for page in PAGES]
SOURCES = sorted(
    path
    for folder, pattern in (("advisor", "*.py"), ("rules", "*.yaml"), ("kernels", "*.cu*"), ("docs", "*.md"))
    for path in (REPO / folder).rglob(pattern)
)


def prose(page: Path) -> str:
    """The page without its blocks of code, in which nothing is a link or a heading."""
    return re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The fragments that lead into the page, as GitHub makes them of its headings, and those that it sets itself."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^ {0,3}#{1,6} +(.*?)(?: +#+)? *$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        count = found.setdefault(slug, 0)
        found[slug] += 1
        if count:
            found[f"{slug}-{count}"] = 1
    return {*found, *re.findall(r'<\w+ (?:id|name)="([^"]+)"', prose(page))}


def dead(page: Path) -> list[str]:
    """Links to files that are not there, or to headings that their page does not have."""
    text = prose(page)
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)", text)  # [text](target "title")
    targets += re.findall(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)", text, re.MULTILINE)  # [name]: target
    targets += re.findall(r'<(?:a|img) [^>]*?(?:href|src)="([^"]+)"', text)
    found = []
    for target in targets:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, hash_, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (hash_ and (file.suffix != ".md" or anchor not in anchors(file))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert dead(page) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_named_in_the_text_are_there(page: Path) -> None:
    named = re.findall(r"`((?:advisor|tests|kernels|rules|docs)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (REPO / name).exists()] == []


def test_decisions_and_pages_named_in_sources_are_there() -> None:
    found = []
    for source in SOURCES:
        for name, anchor in re.findall(
            r"(?<![\w./-])(docs/(?:decisions/\d{4}|[\w./-]+\.md))(#[\w-]+)?", source.read_text(encoding="utf-8")
        ):
            pages = list(REPO.glob(name if name.endswith(".md") else f"{name}-*.md"))
            if not pages or (anchor and anchor[1:] not in anchors(pages[0])):
                found.append(f"{source.relative_to(REPO)}: {name}{anchor}")
        found += [
            f"{source.relative_to(REPO)}: decision {number}"
            for number in re.findall(r"decisions? (\d{4})", source.read_text(encoding="utf-8"))
            if not list(REPO.glob(f"docs/decisions/{number}-*.md"))
        ]
    assert found == []


@pytest.mark.parametrize(
    ("link", "alive"),
    [
        ("[a](other.md)", True),
        ("[a](gone.md)", False),
        ("[a](other.md#the-kernels-bn-and-16-bits)", True),
        ("[a](other.md#twice-1)", True),
        ("[a](other.md#twice-2)", False),
        ("[a](other.md#in-code)", False),
        ("[a](other.md#set-here)", True),
        ("[a](#here)", True),
        ("[a](#gone)", False),
        ("[a]: gone.md", False),
        ('<img src="gone.svg">', False),
        ("[a](https://example.org/gone)", True),
        ("```\n[a](gone.md)\n```", True),
    ],
)
def test_a_dead_link_is_found(tmp_path: Path, link: str, alive: bool) -> None:
    headings = '# The `kernels`: BN and 16 bits\n## Twice\n## Twice\n```sh\n# in code\n```\n<a id="set-here"></a>\n'
    (tmp_path / "other.md").write_text(headings)
    (tmp_path / "page.md").write_text(f"# Here\n\n{link}\n")
    assert bool(dead(tmp_path / "page.md")) is not alive
