"""The process that was profiled goes on as the first search process: a start less, which takes a real script ten seconds and more."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from advisor.core import storage
from advisor.core.findings import Findings
from advisor.core.profile import StepProfile
from advisor.loop.records import NEXT_FILE
from advisor.loop.session import Session
from advisor.profiling.beside.launcher import Exit
from advisor.trials.processes import Handed
from advisor.trials.search import Search

ENDS = ""  # the mode in orders for a process that is not to go on


class Handover:
    """The supervisor's side, for one profile.

    begin: makes the search and the first process's orders of what was measured; None where nothing is to be tried.
    """

    def __init__(self, begin: Callable[[StepProfile, Findings], tuple[Search, Session] | None], run_dir: Path) -> None:
        self._begin, self._run_dir = begin, run_dir
        self._launched = time.monotonic()
        self._since = 0.0  # when it was handed over
        self._progress: tuple[object, ...] = ()
        self.search: Search | None = None
        self.first_step: float | None = None  # `time.monotonic()` of it

    def give(self, profile: StepProfile | None, findings: Findings | None) -> None:
        """The process waits for its orders: it has them, or it is told to end."""
        begun = self._begin(profile, findings) if profile is not None and findings is not None else None
        orders = Session(mode=ENDS, run_dir=str(self._run_dir), script="")
        if begun is not None:
            self.search, orders = begun
            self._since = time.monotonic()
            self._progress = self.search.processes.progress()
        storage.save(self._run_dir / NEXT_FILE, orders)

    def timeout_s(self) -> float | None:
        """What the process may take in all; None while it is profiled."""
        return None if self.search is None else self._since - self._launched + self.search.processes.timeout_s

    def ended(self, ended: Exit) -> None:
        """The process has ended, and the user's files are as they were."""
        if self.search is not None:
            found = self.search.script.ended(ended, time.monotonic() - self._since, started=False)
            self.search.processes.handed = Handed(found, self._progress, verdicts=0)
