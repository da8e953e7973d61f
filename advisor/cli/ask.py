"""Asks a person before each change."""

from __future__ import annotations

import sys
from typing import TextIO

from advisor.cli import output
from advisor.core.errors import AdvisorError
from advisor.core.findings import Recommendation
from advisor.reporting.terminal import question_text


def terminal() -> tuple[TextIO, TextIO]:
    """Streams to read answers from and write questions to: the controlling terminal if there is one.

    stdin may be meant for the script, so it is read only where it is a terminal itself.

    Raises:
        AdvisorError: when there is no terminal, so that nobody can answer.
    """
    if sys.stdin.isatty():
        return sys.stdin, sys.stderr
    try:
        return open("/dev/tty", encoding="utf-8"), open("/dev/tty", "w", encoding="utf-8")
    except OSError:
        raise _nobody() from None


def ask(recommendation: Recommendation) -> bool:
    """Put one recommendation to the person and return the answer.

    Raises:
        AdvisorError: when nobody is there to answer.
    """
    answers, questions = terminal()
    questions.write(f"\n{question_text(recommendation, output.width())}\n")
    while True:
        questions.write("Try it? [y/n] ")
        questions.flush()
        answer = answers.readline()
        if not answer:
            raise _nobody()
        if answer.strip().lower() in ("y", "yes", "n", "no"):
            return answer.strip().lower().startswith("y")


def _nobody() -> AdvisorError:
    return AdvisorError(
        "`apply` asks before each change, and nobody is there to answer",
        fix="Use --auto to try them all, or --dry-run to see them.",
    )
