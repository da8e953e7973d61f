"""Progress on stderr while a script runs."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
import time
from typing import Literal, TextIO

from advisor.core.units import unbroken

PREFIX = "[advisor] "
_NUMBERS = re.compile(r"\d[\d.,]*")
_COUNT = re.compile(r"(\d+) of (\d+)")
BAR = 24  # columns of the bar of a message that counts on
LONG_S = 5.0  # what takes longer in all says how long it still takes
REPEAT_AFTER_S = 10.0  # how long a message that only counts on stays unsaid where lines cannot be replaced


class ProgressLine:
    """Call it with one line of text.

    Messages that differ only in their numbers ("step 3 of 20", "step 4 of 20") are one message that counts on. With
    `live`, and on a terminal, it is redrawn in place; elsewhere it is printed when it first comes and then at most
    every ten seconds, so that logs stay short. Other messages get a line each. `live` is for commands that own the
    terminal: where the script prints beside us, redrawing would run into its output. There a message, and what follows the
    last one, starts on a line of its own, whatever the script has left on the current one (a bar of tqdm's).
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool = False, quiet: bool = False, verbose: bool = False):
        self._stream = stream or sys.stderr
        self._live = live and not verbose and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._quiet, self._verbose = quiet, verbose
        self._from = (0, 0.0)  # the count that a message began with, and when
        self._shape, self._said_at, self._open, self._cut, self._barred, self._said = "", 0.0, False, "", "", False

    def __call__(self, text: str) -> None:
        if self._quiet:
            return
        line = PREFIX + " ".join(text.split())
        shape = _NUMBERS.sub("#", line)
        line += self._left(line, shape)
        try:
            if self._live:
                self._redraw(line, same=shape == self._shape)
            elif self._verbose or shape != self._shape or time.monotonic() - self._said_at >= REPEAT_AFTER_S:
                self._stream.write(self._fresh_line() + self._laid_out(line) + "\n")
                self._said = True
                self._said_at = time.monotonic()
            self._stream.flush()
        except (OSError, ValueError):  # a closed or full stderr must not end a training run
            self._quiet = True
        self._shape = shape

    def _left(self, line: str, shape: str) -> str:
        """For a message that counts on, how long it still takes at the pace so far; "" where that is short or not known."""
        found, now = _COUNT.search(line), time.monotonic()
        if found is None:
            return ""
        done, total = map(int, found.groups())
        if shape != self._shape or done < self._from[0]:
            self._from = (done, now)
            return ""
        begun, since = self._from
        if done == begun or done >= total:
            return ""
        left = (total - done) * (now - since) / (done - begun)
        return f", about {left:.0f} s left" if now - since + left >= LONG_S and left >= 1 else ""

    def _redraw(self, line: str, *, same: bool) -> None:
        if self._open and not same:
            self._finish()
        width = self._columns()
        shown = line if len(line) < width else line[: max(width - 2, 1)] + "…"
        self._cut = line if shown != line else ""
        found = _COUNT.search(line)
        # The bar is gone once the line stays: only what counts on has one.
        utf = (getattr(self._stream, "encoding", None) or "").lower().startswith("utf")
        self._barred = line if found and utf and len(line) + BAR + 3 < width else ""
        if found and self._barred:
            shown += "  " + _bar(*map(int, found.groups()))
        self._stream.write(f"\r\x1b[2K{shown}")
        self._open = True

    def _finish(self) -> None:
        """The line now shown stays, in full: only while it can still change must it fit on one."""
        again = self._cut or self._barred
        self._stream.write(f"\r\x1b[2K{self._laid_out(again)}\n" if again else "\n")

    def _laid_out(self, line: str) -> str:
        """On a terminal no word is torn apart at its edge; a log has one line for one message."""
        if not self._stream.isatty():
            return line
        indent = " " * len(PREFIX)
        width = max(self._columns(), 2 * len(indent))
        lines = textwrap.wrap(
            unbroken(line), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")

    def _fresh_line(self) -> str:
        """What moves the cursor to the start of an empty line, and not at all where it is there.

        Nobody can ask a terminal where its cursor is without reading the script's input. As many blanks as it has columns fill
        the line where the cursor is at its start, and run over into the next one where it is not; then back to that line's start.
        """
        if self._live or not self._stream.isatty() or os.environ.get("TERM") == "dumb":
            return ""
        return " " * self._columns() + "\r\x1b[K"

    def _columns(self) -> int:
        """Of the terminal that is written to: stdout, which `shutil` asks, may be a file."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or shutil.get_terminal_size().columns
        except (OSError, ValueError):
            return shutil.get_terminal_size().columns

    def close(self) -> None:
        """End the live line, or the script's last one, so that what follows starts on a line of its own."""
        try:
            if self._open:
                self._open = False
                self._finish()
            elif self._said and not self._quiet:
                self._stream.write(self._fresh_line())
            self._stream.flush()
        except (OSError, ValueError):
            self._quiet = True

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _bar(done: int, total: int) -> str:
    """How far a count has come, drawn by rich."""
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    colors: Literal["standard"] | None = None if os.environ.get("NO_COLOR") else "standard"
    file = io.StringIO()
    console = Console(file=file, width=BAR, force_terminal=True, color_system=colors, legacy_windows=False)
    console.print(ProgressBar(total=max(total, 1), completed=min(done, total), width=BAR), end="")
    return file.getvalue().rstrip("\n")
