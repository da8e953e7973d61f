"""Lines of a terminal page: laid out for its width, coloured or not, with nothing in them that drives the terminal."""

from __future__ import annotations

import textwrap
import unicodedata
from dataclasses import dataclass

from advisor.core.units import unbroken

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "94", "cyan": "36"}
_EIGHTHS = " ▏▎▍▌▋▊▉"
MIN_WIDTH = 72


@dataclass(frozen=True, slots=True)
class Page:
    """Lines no longer than `width`, coloured or not."""

    width: int
    color: bool
    drawn: bool = False  # tables have lines around them: the page is for a terminal

    def paint(self, text: str, *styles: str) -> str:
        if not self.color or not text:
            return text
        return f"\x1b[{';'.join(_CODES[s] for s in styles)}m{text}\x1b[0m"

    def heading(self, text: str, note: str = "") -> str:
        room = self.width - len(text) - 2
        return self.paint(text, "bold") + ("  " + self.paint(clip(note, room), "dim") if note and room > 12 else "")

    def wrap(self, text: str, indent: int, *styles: str, first: int | None = None) -> list[str]:
        """`text` as indented lines that no number ends, its unit being on the next.

        A word longer than a line (a kernel's name) is cut, not run over the edge.
        """
        start = indent if first is None else first
        lines = textwrap.wrap(
            unbroken(printable(text)),
            max(self.width, indent + 20),
            initial_indent=" " * start,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
        lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
        return [self.paint(line, *styles) if styles else line for line in lines]


def printable(text: str) -> str:
    """One line without control characters: a kernel's or file's name must not be able to drive the terminal."""
    return "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)


def clip(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut at the end."""
    text = printable(text)
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def clip_path(text: str, width: int) -> str:
    """`text` in at most `width` columns, cut at the front, where paths and module names say least."""
    text = printable(text)
    return text if len(text) <= width else "…" + text[len(text) - max(width - 1, 0) :]


def bar(fraction: float, width: int) -> str:
    """A horizontal bar of exactly `width` columns in eighths of a column."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
