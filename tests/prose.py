"""Sentences of pages and texts, and how long they may be."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator

MEDIAN, MOST = 25, 40  # words


def blocks(text: str) -> Iterator[list[str]]:
    """The lines of each paragraph and list item; no code, tables, headings or pictures."""
    text = re.sub(r"^```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ +```.*?^ +```$", "", text, flags=re.DOTALL | re.MULTILINE)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if not line.strip() or re.match(r"\s*([|#!<]|---)", line):
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
    """The sentences of a page in Markdown, code in them as one word."""
    found = []
    for block in blocks(text):
        joined = " ".join(line.strip() for line in block)
        joined = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", joined))
        found += [s for s in re.split(r"(?<=[.!?:])\s+(?=[A-Z*\[(])", joined) if len(s.split()) > 2]
    return found


def too_long(found: Iterable[str]) -> list[str]:
    """The sentences above the limit; all of them, longest first, where their median is."""
    ordered = sorted(found, key=lambda sentence: -len(sentence.split()))
    if ordered and statistics.median(len(sentence.split()) for sentence in ordered) > MEDIAN:
        return ordered
    return [sentence for sentence in ordered if len(sentence.split()) > MOST]
