"""The user's source line that led to a call: the innermost frame that belongs to neither torch nor advisor."""

from __future__ import annotations

import os
import sys
import sysconfig

_LIBRARIES = tuple(
    {
        os.path.join(os.path.realpath(path), "")
        for key in ("stdlib", "purelib", "platlib")
        for path in (sysconfig.get_path(key),)
    }
)
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")


def user_line() -> str:
    """ "path/train.py:42", relative to the working directory where it lies below it; "" when no such frame exists."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith("<"):
            path = os.path.realpath(name)
            if not path.startswith(_LIBRARIES) and not path.startswith(_OWN):
                relative = os.path.relpath(path)
                return f"{path if relative.startswith('..') else relative}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
