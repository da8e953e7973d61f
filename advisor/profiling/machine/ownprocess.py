"""Advisor's own modules run as processes of their own: what crashes or hangs there harms nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from advisor.loop.session import DISABLE_VARIABLE

_ROOT = Path(__file__).resolve().parents[3]  # the folder that holds the package


def run_module(
    module: str, *arguments: str, timeout_s: float, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """`python -m module arguments` has ended; its output is captured and advisor's hooks were off in it.

    It runs in the folder that holds the package: there it finds this copy of advisor, and the files of the user's
    folder (a `json.py`, say) are not imported by mistake.

    Raises:
        OSError: the interpreter does not start.
        subprocess.TimeoutExpired: it did not end in time and was killed.
    """
    return subprocess.run(
        [python, "-m", module, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
        cwd=_ROOT,
        env={**os.environ, DISABLE_VARIABLE: "1"},
        stdin=subprocess.DEVNULL,
    )


def last_words(child: subprocess.CompletedProcess[str]) -> str:
    """Why a child failed, in one line: its last line on stderr, else its exit code or signal."""
    if child.returncode < 0:
        return f"signal {-child.returncode}"
    return (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
