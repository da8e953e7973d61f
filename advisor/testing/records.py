"""What a test has measured, as plain data: it travels with the test's report, from xdist's workers too."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from advisor.core import storage
from advisor.testing.baselines import BaselineEntry, Machine
from advisor.testing.judged import JudgedBudget

XFAILED = "xfailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement or comparison. `against` has a line for each quantity that a baseline was compared in."""

    label: str
    entry: BaselineEntry | None = None
    machine: Machine | None = None
    budgets: tuple[JudgedBudget, ...] = ()
    gain: tuple[float, ...] = ()  # of a comparison: low, point, high
    pairs: int = 0
    seconds: float = 0.0
    against: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    report: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """Everything that one test has measured. `outcome` is pytest's, or XFAILED for one that failed as it was to."""

    test: str
    outcome: str
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What `--perf-json` writes."""

    advisor: str
    created: str
    tests: tuple[Tested, ...] = field(default_factory=tuple)


def write(path: Path, run: RecordedRun) -> None:
    """One JSON file, with its schema version."""
    storage.save(path, run)
