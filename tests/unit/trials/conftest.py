"""What tests of the supervisors of a search have in common."""

from __future__ import annotations

import importlib
import pkgutil
import time

import pytest
from clocks import Clock

from advisor import trials


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What they read for the time, which stands still unless a test moves it: how long this machine takes decides nothing."""
    clock = Clock()
    for module in pkgutil.iter_modules(trials.__path__, f"{trials.__name__}."):
        if not module.ispkg and getattr(found := importlib.import_module(module.name), "time", None) is time:
            monkeypatch.setattr(found, "time", clock)
    return clock
