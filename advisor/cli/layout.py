"""Text laid out for the width of a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], width: int, *, below: int = 2) -> list[str]:
    """Rows in columns; where they are too wide together, the last columns, one or two, have a line of their own below each row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  " + "  ".join([*(f"{text:{w}}" for text, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    if max(map(len, lines)) <= width:
        return lines
    above = ["  " + "  ".join(f"{text:{w}}" for text, w in zip(row[:-below], widths, strict=False)) for row in rows]
    notes = [row[-1] + (f" ({row[-2]})" if below > 1 and row[-2] != "–" else "") for row in rows]
    return [f"{first.rstrip()}\n{wrapped(' ' * 6 + second, width)}" for first, second in zip(above, notes, strict=True)]


def wrapped(text: str, width: int) -> str:
    """Lines of Markdown no longer than `width` where words allow it; items of a list hang."""
    lines = []
    for line in text.splitlines():
        text = re.sub(r"^ *(?:- )?", "", line)
        mark = line.removesuffix(text)
        lines += textwrap.wrap(
            text,
            max(width, 40),
            initial_indent=mark,
            subsequent_indent=" " * len(mark),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


_STYLES = (
    (re.compile(r"^#+ (.*)$", re.MULTILINE), "\x1b[1m\\1\x1b[0m"),
    (re.compile(r"\*\*(.+?)\*\*", re.DOTALL), "\x1b[1m\\1\x1b[0m"),
    (re.compile(r"`([^`]+)`"), "\x1b[36m\\1\x1b[0m"),
    (re.compile(r"^( *)- ", re.MULTILINE), r"\1• "),
)


def rendered(text: str, *, color: bool) -> str:
    """Wrapped Markdown as a terminal shows it: bold and coloured in place of marks; as it is where colours are off."""
    if not color:
        return text
    for pattern, style in _STYLES:
        text = pattern.sub(style, text)
    return text
