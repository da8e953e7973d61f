"""What a terminal shows: a pty of a known width, and its output laid out as xterm and its like do."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_ERASE = re.compile(r"\x1b\[(2?)K")


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, int]]:
    """A stream that writes to a terminal of so many columns, and the descriptor that `shown` reads from."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(slave, "w", encoding="utf-8") as stream:
        yield stream, master
    os.close(master)


def shown(master: int, columns: int) -> list[str]:
    """The lines on the screen, of what was written so far."""
    data = b""
    while select.select([master], [], [], 0.1)[0]:
        data += os.read(master, 65536)
    return laid_out(data.decode(), columns)


def laid_out(text: str, columns: int) -> list[str]:
    """Lines without their trailing blanks. At the last column the cursor waits, and the next character begins a line."""
    lines: list[list[str]] = [[]]
    row = column = place = 0
    while place < len(text):
        if erase := _ERASE.match(text, place):
            lines[row] = [] if erase[1] else lines[row][:column]
            place = erase.end()
            continue
        character = text[place]
        place += 1
        if character == "\r":
            column = 0
            continue
        if character == "\n" or column == columns:
            row, column = row + 1, 0 if character != "\n" else column
            lines += [[] for _ in range(row + 1 - len(lines))]
        if character != "\n":
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = character
            column += 1
    return ["".join(line).rstrip() for line in lines]
