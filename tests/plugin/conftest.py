"""Fixtures that run a test suite in a folder of its own."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE), str(HERE.parent / "unit" / "testing")]
sys.path[:0] = PATHS

from suites import CONFTEST, PLUGIN, REPO, Run, made_up  # noqa: E402 – found by the path set above

# pytester forgets modules that a run in this process has loaded: those that hold classes and patches are loaded before.
for _name in ("marker", "options", "perf", "records", "section", "storing"):
    importlib.import_module(f"advisor.testing.{_name}")
importlib.import_module("advisor.reporting.html")


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes in other folders import this checkout's advisor; neither flags nor other plugins of the user's reach them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # each one is compiled anew by every run in this process


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the suite in `test_made_up.py` with these flags, in this process or `apart`."""
    from advisor.testing.perf import Perf

    monkeypatch.setattr(Perf, "measure_here", made_up)

    def run(*flags: str, tests: str = "", apart: bool = False) -> pytest.RunResult:
        if tests:
            pytester.makepyfile(test_made_up=tests)
        if apart:
            pytester.makeconftest(CONFTEST.format(paths=PATHS))
            return pytester.runpytest_subprocess(*PLUGIN, *flags)
        # Without the plugin that collects all of this process's garbage, five times over, at the end of each run.
        return pytester.runpytest_inprocess(*PLUGIN, "-p", "no:unraisableexception", *flags)

    return run
