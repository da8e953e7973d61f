"""Errors that users see, and the exit codes they lead to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What `advisor` exits with, where the script's own exit code does not apply."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    OWN_FAULT = 3
    INCONCLUSIVE = 4
    GPU_REQUIRED = 5


INTERRUPTED = 128 + 2  # as a shell reports SIGINT


class AdvisorError(Exception):
    """A problem told in one line: what was found, what was expected, what to do.

    Args:
        found: what is wrong, as a clause without a full stop.
        expected: what would have been right; may be empty.
        fix: what the user can do next; may be empty.
        exit_code: the process's exit code when this error ends it.
    """

    def __init__(self, found: str, *, expected: str = "", fix: str = "", exit_code: ExitCode = ExitCode.USAGE) -> None:
        self.found, self.expected, self.fix, self.exit_code = found, expected, fix, exit_code
        super().__init__(str(self))

    def __str__(self) -> str:
        text = self.found
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix:
            text += f". {self.fix}"
        return text


def meant(word: str, known: Iterable[str]) -> str:
    """ "Did you mean …?", or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else ""


def unknown(what: str, word: str, known: Iterable[str]) -> AdvisorError:
    """A word that is none of these: `no transform 'amp'; expected one of …`, or with the nearest alone."""
    words = list(known)
    fix = meant(word, words)
    return AdvisorError(f"no {what} {word!r}", expected="" if fix else "one of " + ", ".join(words), fix=fix)


def cause(error: Exception) -> str:
    """Why a file cannot be read or written, in the system's words, without the file's name, which stands beside it."""
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


def first_line(error: BaseException) -> str:
    """An error's kind and what it says, in a line: `ValueError: no such name`."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
