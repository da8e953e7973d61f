"""Predicted beside measured, for every trial ever made here: one JSON line each, only ever added to. Wholes that were proved have lines of
their own there (proved_before.py).

The file lies in the user's cache folder, or where `ADVISOR_LEDGER` says. It tells `advisor doctor` how far predictions can
be trusted on this machine, and whoever mends a prediction what it has to explain.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from advisor.core import storage
from advisor.core.cache import cache_dir
from advisor.core.errors import AdvisorError
from advisor.core.findings import Interval
from advisor.core.profile import StepProfile
from advisor.core.units import counted, percent_text
from advisor.core.verdict import Status, TrialLog, Verdict
from advisor.profiling.machine import environment
from advisor.trials import planfile

FILE_NAME, VARIABLE = "predictions.jsonl", "ADVISOR_LEDGER"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One change on one machine. Both intervals are shares of the step that the prediction was made from: the plain
    script's in the first round, the one profiled anew in a later round.
    """

    date: str  # ISO 8601, UTC
    machine: str
    transform: str
    predicted: Interval
    measured: Interval
    status: Status

    @property
    def held(self) -> bool:
        """Whether the prediction and the measurement have values in common."""
        return self.measured.low <= self.predicted.high and self.predicted.low <= self.measured.high

    @property
    def error(self) -> float:
        """Distance of the two middles, a share of the step."""
        middles = (0.5 * (i.low + i.high) for i in (self.predicted, self.measured))
        return abs(next(middles) - next(middles))


def path() -> Path:
    """Where the ledger is."""
    return Path(os.environ.get(VARIABLE) or cache_dir() / FILE_NAME)


def entries(log: TrialLog, profile: StepProfile) -> tuple[LedgerEntry, ...]:
    """What the trials of `log` say about the predictions made from `profile` and, in later rounds, from their own profiles."""
    if profile.step_us is None or not profile.step_us.median > 0:
        return ()
    steps = {found.number: found.step_us for found in log.rounds} | {1: profile.step_us.median}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = planfile.environment_text(profile.environment)
    return tuple(
        LedgerEntry(
            date=now,
            machine=machine,
            transform=verdict.transform,
            predicted=verdict.predicted,
            measured=_of_profiled(verdict, steps[verdict.round]),
            status=verdict.status,
        )
        for verdict in log.verdicts
        if verdict.predicted is not None and verdict.gain is not None and steps.get(verdict.round, 0.0) > 0
    )


def _of_profiled(verdict: Verdict, profiled_us: float) -> Interval:
    """The gain as a share of the profiled step: what was kept since has made the step that it was measured on shorter."""
    assert verdict.gain is not None  # the caller has looked
    off = [t for t in verdict.blocks.off_us if math.isfinite(t) and t > 0]
    share = min(1.0, median(off) / profiled_us) if off else 1.0
    return Interval(low=verdict.gain.low * share, high=verdict.gain.high * share, basis=verdict.gain.basis)


def append(found: Sequence[Any]) -> None:
    """Add to the ledger, each line in one write. Never raises: a full disk must not spoil a search that is done."""
    if not found:
        return
    with contextlib.suppress(OSError):
        handle = os.open(path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            for entry in found:
                os.write(handle, (json.dumps(storage.to_plain(entry)) + "\n").encode())
        finally:
            os.close(handle)


def lines(file: Path | None = None) -> tuple[str, ...]:
    """Every line, oldest first."""
    try:
        return tuple((file or path()).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return ()


def read(file: Path | None = None) -> tuple[LedgerEntry, ...]:
    """Every line that can be read, oldest first; a line cut off by a crash is passed over."""
    found = []
    for line in lines(file):
        with contextlib.suppress(ValueError, AdvisorError):
            found.append(storage.from_plain(LedgerEntry, json.loads(line)))
    return tuple(found)


def summary(found: Sequence[LedgerEntry], machine: str = "") -> str:
    """How well predictions have held, in a sentence; of one machine, or of all for an empty name."""
    here = [entry for entry in found if not machine or entry.machine == machine]
    # An interval that noise made wide meets nearly every prediction: nothing was measured there.
    chosen = [entry for entry in here if entry.status != Status.INCONCLUSIVE]
    hidden = len(here) - len(chosen)
    told = f"{counted(hidden, 'inconclusive trial')} not counted" if hidden else ""
    if not chosen:
        return "no change with a prediction has been measured here yet" + (f" ({told})" if told else "")
    held = sum(entry.held for entry in chosen)
    error = median([entry.error for entry in chosen])
    return (
        f"{held} of {len(chosen)} measured gains lay where they were predicted; "
        f"the middle of the prediction was off by {percent_text(error)} of the step (median)"
        + (f"; {told}" if told else "")
    )


def told_here() -> str:
    """The summary of this machine's own entries."""
    try:
        machine = planfile.environment_text(environment.probe())
    except AdvisorError as error:
        return f"this machine is not known: {error.found}"
    return summary(read(), machine)
