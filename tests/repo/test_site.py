"""The docs as a site: every page has its place, links to sources become names, and the strict build is sound."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
SITE = runpy.run_path(str(REPO / ".ci" / "site.py"))


class _Loader(yaml.SafeLoader):
    """MkDocs' settings name a Python function, which is not called here."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def in_nav(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [page for value in values for page in in_nav(value)]


def test_every_page_has_its_place() -> None:
    settings = yaml.load((REPO / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_Loader)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = in_nav(settings["nav"])
    assert len(set(listed)) == len(listed)
    assert sorted(set(listed) - pages) == []
    # What is not in the navigation is led to by a page.
    linked = {link for page in pages for link in links(DOCS / page)}
    left = pages - set(listed) - linked
    assert sorted(left) == []


def links(page: Path) -> set[str]:
    """The pages below docs/ that this one leads to; for a folder its README."""
    found = set()
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        path = path / "README.md" if path.is_dir() else path
        if DOCS in path.parents:
            found.add(path.relative_to(DOCS).as_posix())
    return found


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("[a](glossary.md#x)", "[a](glossary.md#x)"),
        ("[base.py](../advisor/transforms/base.py)", "base.py"),
        ("[a](../README.md)", "a"),
        ("[results](benchmarks)", "[results](benchmarks/README.md)"),
        ("[a](https://example.org)", "[a](https://example.org)"),
        ("[a](#here)", "[a](#here)"),
        ("![p](pictures/report.png)", "![p](pictures/report.png)"),
    ],
)
def test_links_out_of_the_docs_become_names(text: str, becomes: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert SITE["on_page_markdown"](text, page=page) == becomes


@pytest.mark.long
def test_the_site_builds_without_a_dead_link_or_anchor(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: make docs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "first-training.html").is_file()
