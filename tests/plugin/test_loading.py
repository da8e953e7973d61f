"""What loading the plugin costs: a handful of modules of advisor, and nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from suites import PLUGIN

HEAVY = (
    "torch",
    "cupy",
    "numpy",
    "yaml",
    "jinja2",
    "click",
    "pynvml",
    "advisor.loop",
    "advisor.profiling",
    "advisor.analysis",
)
# Listed one by one: a module more is a decision, as every test run of every user pays for it.
AT_IMPORT = {"advisor", "advisor.testing", "advisor.testing.plugin"}
IN_A_RUN = AT_IMPORT | {"advisor.testing.options", "advisor.core", "advisor.core.errors"}


def test_importing_the_plugin_loads_three_modules() -> None:
    code = "import pytest, sys; before = set(sys.modules); import advisor.testing.plugin; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == AT_IMPORT | {"__future__"} & set(done.stdout.split())


def test_a_run_without_performance_tests_loads_hardly_more_and_says_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        import sys, pytest
        @pytest.hookimpl(trylast=True)
        def pytest_unconfigure():
            print("LOADED", *sorted(name for name in sys.modules if name.split(".")[0] in ("advisor", "torch", "cupy")))
        """
    )
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=1)
    (line,) = [line for line in result.outlines if line.startswith("LOADED")]
    assert set(line.split()[1:]) == IN_A_RUN
    assert not [name for name in HEAVY if name in line.split()]
    assert "advisor: performance" not in result.stdout.str()


def test_without_the_plugin_nothing_of_it_is_there(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_x(perf): pass")
    result = pytester.runpytest_inprocess("-p", "no:advisor", "-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fixture 'perf' not found*"])
