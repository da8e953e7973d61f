"""What tests of the supervisors of a search have in common."""

from __future__ import annotations

import importlib

import pytest
from clocks import Clock

SUPERVISORS = ("budget", "fresh", "pairs", "processes", "prove", "rounds", "script", "search", "stack")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What they read for the time, which stands still unless a test moves it: how long this machine takes decides nothing."""
    clock = Clock()
    for name in SUPERVISORS:
        module = importlib.import_module(f"advisor.trials.{name}")
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", clock)
    return clock
