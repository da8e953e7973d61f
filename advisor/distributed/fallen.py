"""Which rank's end has ended the others, of all that have told or been seen to fail. In the supervisor.

When one rank goes, those that wait for it raise: "Connection closed by peer", often before anybody has seen the first one end. So the
order in which failures are told does not tell who began.
"""

from __future__ import annotations

import re
import signal
from typing import Any

from advisor.distributed import place

# What a rank raises because another one has gone or does not come, by gloo, NCCL and the store.
_FOR_ANOTHERS = re.compile(
    r"(?i)connection (was )?(closed|reset|refused)|broken pipe|remote (worker|process)|ncclRemoteError|ncclInternalError|"
    r"socket timeout|timed out|watchdog|aborted"
)
_SENT_BY_AGENT = (
    signal.SIGTERM,
    signal.SIGKILL,
)  # to the ranks that are left, the second where the first does not help


class Fallen:
    """Collects events of one start."""

    def __init__(self) -> None:
        self._raised: dict[int, str] = {}  # by rank, in the order in which they told
        self._codes: dict[int, int] = {}

    def note(self, event: dict[str, Any]) -> None:
        """One event of any kind."""
        if event.get("event") == place.FAILED and isinstance(event.get("rank"), int):
            self._raised.setdefault(event["rank"], str(event.get("error")))
        if event.get("event") == place.ENDED and isinstance(event.get("codes"), dict):
            self._codes = {int(rank): int(code) for rank, code in event["codes"].items()}

    @property
    def rank(self) -> int | None:
        """The one that began; None where none has failed."""
        own = [rank for rank, error in self._raised.items() if not _FOR_ANOTHERS.search(error)]
        silent = [rank for rank in self._codes if rank not in self._raised]
        signalled = [rank for rank in silent if self._codes[rank] < 0 and -self._codes[rank] != signal.SIGTERM]
        # One that was killed while others raised of their own has been killed by the agent.
        killed = [rank for rank in signalled if not own or -self._codes[rank] not in _SENT_BY_AGENT]
        left = [rank for rank in silent if self._codes[rank] > 0]
        return next(iter([*killed, *own, *left, *self._raised, *silent]), None)

    @property
    def told(self) -> str:
        """Its number and how it ended; "" where none has failed."""
        rank = self.rank
        if rank is None:
            return ""
        if rank in self._raised:
            return f"rank {rank}: {self._raised[rank]}"
        return f"rank {rank} {ended(self._codes[rank])}"


def ended(code: int) -> str:
    """What an exit code says, that of a signal below 0."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
