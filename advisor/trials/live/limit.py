"""The time that one trial may take: asked between steps, and enforced by the kernel where nobody can be asked."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from advisor.loop.session import Session
from advisor.trials.budget import LATE

# Over a trial's own limit the process is ended by the kernel: a compiler that hangs cannot be asked to stop.
ALARM_GRACE_S = 20.0


class OutOfTime(Exception):
    """The trial or the whole search has used up its time, for the reason given."""


@dataclass(frozen=True, slots=True)
class Limit:
    """`ends_at` is `time.monotonic()`; `why` says what is over then."""

    ends_at: float
    why: str = ""

    @classmethod
    def of(cls, session: Session) -> Limit:
        """A trial that begins now: its own limit, and not beyond the search's."""
        now, trial_s = time.monotonic(), session.trial_timeout_s
        search_s = session.deadline_unix_s - time.time() if session.deadline_unix_s else trial_s
        why = LATE if search_s < trial_s else f"the {trial_s:.0f} s of a trial are over"
        return cls(now + min(trial_s, search_s), why)

    def check(self) -> None:
        """
        Raises:
            OutOfTime: when it is over, with the reason.
        """
        if time.monotonic() > self.ends_at:
            raise OutOfTime(self.why)

    @contextlib.contextmanager
    def alarm(self) -> Iterator[None]:
        """The kernel ends this process when what is inside takes longer than the trial may, whatever it waits for."""
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
            yield  # the script uses the alarm itself
            return
        seconds = max(1.0, self.ends_at - time.monotonic()) + ALARM_GRACE_S
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        except (OSError, ValueError):
            yield
            return
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
