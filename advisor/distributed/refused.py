"""Leaving a script that does not divide, from inside one of its ranks, with the reason and the line."""

from __future__ import annotations

import os
from typing import NoReturn

from advisor.core.stderr import say
from advisor.distributed import place
from advisor.loop.session import from_environment, tell


class Refused(SystemExit):
    """Ends a rank of the script, in good order, so that torchrun has nothing to tell; the command ends as wrong usage does."""


def refuse(why: str, line: str = "", fix: str = "") -> NoReturn:
    """Say why, once, and end this rank. All ranks run the same code, and come here together.

    Raises:
        Refused: always.
    """
    told = f"{line}: {why}" if line else why
    session = from_environment()
    if place.rank() == 0:
        say(f"--gpus {place.ranks()} refused: {told}. {fix}".rstrip())
        if session is not None:
            tell(session, place.REFUSED, text=told, fix=fix, pid=os.getpid())
    raise Refused(0)
