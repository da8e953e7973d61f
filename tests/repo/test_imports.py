"""Importing advisor is cheap: no torch, no CuPy, and done before anybody notices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLI = Path(__file__).resolve().parents[2] / "advisor" / "cli"
MODULES = ["advisor.pipeline", *(f"advisor.cli.{path.stem}" for path in sorted(CLI.glob("[a-z]*.py")))]
HEAVY = ("torch", "cupy", "numpy", "jinja2", "yaml")
MOST_MS, MOST_MODULES = 100.0, 60
TRIES = 5

# Measured inside the process, so that the interpreter's own start does not count, and in the processor's time, so that other
# processes do not.
TIMED = """
import sys, time
before, begin = len(sys.modules), time.process_time()
import advisor
print((time.process_time() - begin) * 1000)
print(len(sys.modules) - before)
print(*(name for name in {heavy} if name in sys.modules))
"""
LOADED = """
import importlib, sys
importlib.import_module({module!r})
print(*(name for name in ("torch", "cupy") if name in sys.modules))
"""
HELP = """
import sys
sys.argv = ["advisor", *{words}]
try:
    from advisor.cli.main import main
    main()
except SystemExit as end:
    print("exit", end.code, file=sys.stderr)
print(*(name for name in ("torch", "cupy") if name in sys.modules), file=sys.stderr)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_importing_advisor_is_light() -> None:
    _, modules, loaded = python(TIMED.format(heavy=HEAVY)).stdout.splitlines()
    assert loaded == ""
    assert int(modules) < MOST_MODULES


@pytest.mark.long
def test_importing_advisor_is_quick() -> None:
    times = [float(python(TIMED.format(heavy=HEAVY)).stdout.splitlines()[0]) for _ in range(TRIES)]
    assert min(times) < MOST_MS, times


@pytest.mark.parametrize("module", MODULES)
def test_no_module_of_the_command_line_loads_torch(module: str) -> None:
    assert python(LOADED.format(module=module)).stdout.strip() == ""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["profile", "--help"], ["rules", "list"], ["kernels", "list"]]
)
def test_what_needs_no_torch_loads_none(words: list[str]) -> None:
    assert python(HELP.format(words=words)).stderr.splitlines() == ["exit 0", ""]
