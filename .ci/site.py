"""A hook of MkDocs: links from a page to files outside docs/ (sources, the README) become their names, which the site does not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    folder = (DOCS / page.file.src_uri).parent
    return _LINK.sub(lambda found: _inside(found, folder), markdown)


def _inside(found: re.Match[str], folder: Path) -> str:
    text, target = found[1], found[2].partition("#")[0]
    if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
        return found[0]
    path = (folder / target).resolve()
    if path.is_dir() and (path / "README.md").is_file() and DOCS in path.parents:
        return f"[{text}]({target.rstrip('/')}/README.md)"
    # Sources below docs/ are not pages either.
    kept = DOCS in path.parents and path.suffix in (".md", ".svg", ".png", ".json")
    return found[0] if kept else text
