"""Beside the plugins that people have already: no flag, fixture or marker of one name, and all of them in one run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from suites import PLUGIN

from advisor.testing import marker, options, plugin

# Public names of each plugin's documentation (pytest-benchmark 5, pytest-memray 1.8, pytest-codspeed 4, pytest-perf 0.15,
# pytest-asyncio 1, pytest-xdist 3, pytest-timeout 2, pytest-cov 6, pytest-mock 3, pytest-randomly 3).
OTHERS = {
    "flags": [
        "--benchmark-min-time",
        "--benchmark-max-time",
        "--benchmark-min-rounds",
        "--benchmark-timer",
        "--benchmark-warmup",
        "--benchmark-disable",
        "--benchmark-skip",
        "--benchmark-only",
        "--benchmark-save",
        "--benchmark-autosave",
        "--benchmark-compare",
        "--benchmark-compare-fail",
        "--benchmark-storage",
        "--benchmark-json",
        "--benchmark-sort",
        "--benchmark-histogram",
        "--memray",
        "--no-memray",
        "--memray-bin-path",
        "--memray-bin-prefix",
        "--most-allocations",
        "--hide-memray-summary",
        "--stacks",
        "--native",
        "--trace-python-allocators",
        "--fail-on-increase",
        "--codspeed",
        "--codspeed-mode",
        "--codspeed-warmup-time",
        "--codspeed-max-time",
        "--codspeed-max-rounds",
        "--perf-target",
        "--perf-baseline",
        "--asyncio-mode",
        "--asyncio-debug",
        "--dist",
        "--numprocesses",
        "--maxfail",
        "--timeout",
        "--cov",
        "--cov-report",
        "--randomly-seed",
    ],
    "fixtures": [
        "benchmark",
        "benchmark_weave",
        "codspeed_benchmark",
        "event_loop_policy",
        "unused_tcp_port",
        "worker_id",
        "testrun_uid",
        "cov",
        "mocker",
        "no_cover",
    ],
    "markers": [
        "benchmark",
        "codspeed_benchmark",
        "limit_memory",
        "limit_leaks",
        "asyncio",
        "timeout",
        "xdist_group",
        "no_cover",
    ],
}


def own_flags() -> set[str]:
    return set(re.findall(r'"(--[\w-]+)"', Path(options.__file__).read_text(encoding="utf-8")))


def test_no_name_is_another_plugins() -> None:
    assert own_flags() & set(OTHERS["flags"]) == set()
    assert plugin.FIXTURES & set(OTHERS["fixtures"]) == set()
    assert plugin.MARKER not in OTHERS["markers"]
    assert len(own_flags()) == 11
    assert len(marker.KEYWORDS) == 8


@pytest.mark.parametrize("other", ["pytest_benchmark", "pytest_memray", "pytest_codspeed", "pytest_asyncio"])
def test_in_one_run_with_another_plugin(pytester: pytest.Pytester, other: str) -> None:
    if importlib.util.find_spec(other) is None:
        pytest.skip(f"{other} is not installed")
    pytester.makepyfile(
        """
        def test_both(request, perf):
            perf.measure(lambda: sum(range(100)), warmup=0, steps=3)
            if "benchmark" in request.fixturenames:
                request.getfixturevalue("benchmark")(lambda: None)
        def test_other(request):
            pass
        """
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", f"{other}.plugin")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*advisor: performance*", "*::test_both  step*"])
