"""Tables drawn for a terminal, by the library rich; pipes and files get the plain columns of terminal.py."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence

from advisor.reporting.page import Page


def table(page: Page, head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Lines of a table no wider than the page. Cells may be painted; what does not fit is folded within its column.

    Args:
        page: its `width`, and whether colours are wanted.
        head: a title a column.
        rows: one text a column.
        right: the columns of numbers, which are aligned to the right and never folded.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    file = io.StringIO()
    console = Console(
        file=file,
        width=page.width,
        force_terminal=True,
        color_system="standard" if page.color else None,
        no_color=not page.color,
        highlight=False,
        legacy_windows=False,
    )
    drawn = Table(box=box.ROUNDED, border_style="dim", header_style="dim")
    for number, title in enumerate(head):
        numeric = number in right
        drawn.add_column(title, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text.from_ansi(cell) for cell in row))
    console.print(drawn)
    return [line.rstrip() for line in file.getvalue().splitlines()]
