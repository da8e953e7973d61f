"""Asks a person before each change."""

from __future__ import annotations

import sys
from typing import TextIO

from advisor.cli import output
from advisor.core.errors import AdvisorError
from advisor.core.findings import Recommendation
from advisor.reporting.terminal import question_text
from advisor.trials.choosing import Answer

MEANS = """\
  y  try it
  n  leave it out
  a  try it and all that follow
  q  leave it out, and all that follow
"""


def terminal(
    asker: str = "`apply`", fix: str = "Use --auto to try them all, or --dry-run to see them."
) -> tuple[TextIO, TextIO]:
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
        raise AdvisorError(f"{asker} asks first, but there is no terminal to answer", fix=fix) from None


def ask(recommendation: Recommendation) -> Answer:
    """Put one recommendation to the person and return the answer; the end of the input (Ctrl-D) is `QUIT`.

    Raises:
        AdvisorError: when nobody is there to answer.
    """
    answers, questions = terminal()
    questions.write(f"\n{question_text(recommendation, output.width())}\n")
    while True:
        questions.write("Try it? [y]es, [n]o, [a]ll, [q]uit: ")
        questions.flush()
        line = answers.readline()
        found = _read(line)
        if found is not None:
            return found
        questions.write((f"{line.strip()!r} is no answer:\n" if line.strip() else "") + MEANS)


def confirm(question: str) -> bool:
    """Put a question to the person that has no for an answer unless they say yes.

    Raises:
        AdvisorError: when nobody is there to answer.
    """
    answers, questions = terminal("`runs clean`", "Use --yes to remove them, or --dry-run to see them.")
    questions.write(f"{question} [y]es, [N]o: ")
    questions.flush()
    return answers.readline().strip().lower() in ("y", "yes")


def _read(line: str) -> Answer | None:
    """The answer in a line, by its word or first letter; None for what is neither. No line at all is the input's end."""
    word = line.strip().lower()
    if not line:
        return Answer.QUIT
    return next((answer for answer in Answer if word in (answer.value, answer.value[0])), None)
