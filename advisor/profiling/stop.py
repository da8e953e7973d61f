"""Ending the user's script from inside a step, as if it had called `sys.exit(0)`.

`StopTraining` is a SystemExit: `finally` blocks, `atexit` handlers and the script's own clean-up run, and the exit code
is 0. A script whose `except:` swallows it meets it again at its next step; after three times the process is ended
with `os._exit(0)`, its streams flushed, because it would otherwise train on for hours with the measurement done.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

from advisor.profiling.session import LEAVING, Session, tell

MAX_RAISES = 3


class StopTraining(SystemExit):
    """Raised inside `Optimizer.step()` when advisor has what it came for. `code` is 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class _Request:
    """The stop that was asked for, if any; one a process."""

    reason: str = ""
    raised: int = 0


def stop(session: Session, reason: str) -> None:
    """End the script: call from a `Training.on_step` listener, once everything is written.

    Raises:
        StopTraining: always. The `stopped` event is in `progress.jsonl` before.
    """
    if not _Request.reason:
        tell(session, "stopped", reason=reason, pid=os.getpid())
    _Request.reason = reason or "done"
    insist()


def tell_of_the_end(session: Session) -> None:
    """Tell the supervisor when a script that was stopped has run its clean-up: what is left is native code's.

    To be called early: handlers that are registered later run before this one.
    """
    process = os.getpid()

    def leaving() -> None:
        if os.getpid() == process and requested():
            tell(session, LEAVING, pid=process)

    atexit.register(leaving)


def requested() -> bool:
    """True from the first `stop` on."""
    return bool(_Request.reason)


def insist() -> None:
    """Raise the stop again when it was swallowed; called at each step boundary.

    Raises:
        StopTraining: when a stop was asked for and the script is still training.
    """
    if not _Request.reason:
        return
    _Request.raised += 1
    if _Request.raised > MAX_RAISES:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(0)
    raise StopTraining(_Request.reason)


def forget() -> None:
    """Withdraw the stop (tests)."""
    _Request.reason, _Request.raised = "", 0
