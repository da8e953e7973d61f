"""The script's standard error, from inside its process."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line. Never raises: the script may have closed the stream."""
    try:
        sys.stderr.write(f"[advisor] {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass
