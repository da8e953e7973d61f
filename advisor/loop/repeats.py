"""Whether a call stands in a loop: what it does, the script does again."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType


def in_loop(frame: FrameType | None) -> bool:
    """Whether this frame, or one that has called it, is between the head of a `for` or `while` loop and the jump back to it.

    A loop over the result of the call itself does not count: its head comes after the call.
    """
    while frame is not None:
        at = frame.f_lasti
        if any(head <= at < back for head, back in _loops(frame.f_code)):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=512)
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Head and jump back of each loop, as offsets into the bytecode."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    found = ((item.argval, item.offset) for item in dis.get_instructions(code) if item.opcode in jumps)
    return tuple((head, back) for head, back in found if head < back)
