"""The plugin as its users run it: markers, flags, outcomes, baselines, the terminal section, xdist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from suites import Run

from advisor.core import storage
from advisor.testing.baselines import Baseline
from advisor.testing.records import RecordedRun as Written

SUITE = """
import unittest
import pytest

def test_within(perf):
    result = perf.measure(16)
    result.assert_kernel_count(max=40)
    result.assert_memory(max="4 GiB")

@pytest.mark.parametrize("calls", [2, 3])
def test_parametrised(perf, calls):
    perf.measure(calls)

class TestUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _perf(self, perf):
        self.perf = perf

    @pytest.mark.perf(max_kernels=36)
    def test_method(self):
        self.perf.measure(16)

def test_plain():
    pass
"""


def test_a_suite_of_all_kinds_runs_and_shows_what_it_measured(suite: Run) -> None:
    result = suite(tests=SUITE, apart=True)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(
        [
            "*advisor: performance*",
            "test_made_up.py::test_within  step 1.00 ms  kernels 36  syncs 3  memory 3.00 GiB  (0.1 s)",
            "    kernel count: 36 of at most 40, 90 % used",
            "    peak memory: 3.00 GiB of at most 4.00 GiB, 75 % used",
            "test_made_up.py::test_parametrised[[]2]  step*kernels 22*",
            "test_made_up.py::test_parametrised[[]3]  step*kernels 23*",
            "test_made_up.py::TestUnittest::test_method*",
            "    kernel count: 36 of at most 36, 100 % used",
            "measured on NVIDIA H200, torch 2.11.0",
        ]
    )


FAILING = """
import unittest
import pytest

def test_past(perf):
    perf.measure(16).assert_kernel_count(max=20)

@pytest.mark.perf(max_kernels=20, max_memory="1 GiB", max_step_ms=0.5, no_sync=True)
def test_marked(perf):
    perf.measure(16)

@pytest.mark.perf(max_kernels=20)
def test_measures_nothing(perf):
    pass

class TestUnittest(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _perf(self, perf):
        self.perf = perf

    @pytest.mark.perf(max_kernels=20)
    def test_method(self):
        self.perf.measure(16)

    def test_own_failure(self):
        self.perf.measure(16)
        self.fail("of its own")

def test_two_of_one_name(perf):
    perf.measure(1, name="a")
    perf.measure(1, name="a")
"""


def test_failures_name_what_is_at_fault(suite: Run, pytester: pytest.Pytester) -> None:
    result = suite("--perf-report-dir=reports", "--perf-json=out.json", tests=FAILING)
    result.assert_outcomes(failed=6)
    text = result.stdout.str()
    assert "AssertionError: kernel count: 36 a step, at most 20 wanted" in text
    assert "20 × sm90_xmma_fprop_tensorop from aten::convolution  ResNet.layer1.0.conv1  model.py:10" in text
    for budget in ("peak memory: 3.00 GiB", "step time: 1.00 ms", "host synchronisations: 3 a step", "train.py:7"):
        assert budget in text
    assert "measured nothing" in text
    assert "of its own" in text
    assert "two measurements of this test are named 'a'" in text
    assert "FAILED" in text
    (report,) = (pytester.path / "reports").glob("test_made_up.py_test_past-*.html")
    assert "ResNet.layer1.0.conv1" in report.read_text()
    assert f"report: reports/{report.name}" in text
    written = storage.load(pytester.path / "out.json", Written)
    outcomes = {test.test: test.outcome for test in written.tests}
    assert outcomes["test_made_up.py::test_marked"] == "failed"
    (record,) = next(test.records for test in written.tests if test.test.endswith("test_past"))
    assert record.entry is not None
    assert record.entry.values["kernels"] == 36
    assert [(budget.title, budget.passed) for budget in record.budgets] == [("kernel count", False)]


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ("@pytest.mark.perf(max_kernel=3)\ndef test_x(perf): pass", "Did you mean 'max_kernels'"),
        ("@pytest.mark.perf(max_memory='2 GHz')\ndef test_x(perf): pass", "max_memory is '2 GHz'"),
        ("@pytest.mark.perf('2 GiB')\ndef test_x(perf): pass", "positional argument"),
        ("@pytest.mark.perf(max_kernels=3)\ndef test_x(): pass", "does not use the fixture `perf`"),
        ("@pytest.mark.perf(max_kernels=3)\nclass TestX:\n    @pytest.mark.perf(typo=1)\n    def test_x(self, perf): pass", "no keyword 'typo'"),
    ],
)  # fmt: skip
def test_a_marker_without_effect_is_an_error_at_collection(suite: Run, tests: str, told: str) -> None:
    result = suite("--collect-only", tests=f"import pytest\n{tests}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert told in result.stderr.str()


def test_collecting_measures_nothing(suite: Run) -> None:
    result = suite("--collect-only", "-q", tests=SUITE)
    assert result.ret == 0
    assert "test_made_up.py::test_within" in result.stdout.str()
    assert "advisor: performance" not in result.stdout.str()


def test_performance_tests_are_chosen_or_skipped(suite: Run) -> None:
    suite("--perf-only", tests=SUITE).assert_outcomes(passed=4, deselected=1)
    suite("--perf-skip").assert_outcomes(passed=1, skipped=4)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--perf-only", "--perf-skip"), "leave nothing to run"),
        (("--perf-compare-fail=dram:5%",), "without --perf-compare"),
        (("--perf-update",), "does not say what to update"),
        (("--perf-save=a/b",), "baseline name"),
        (("--perf-compare=main", "--perf-compare-fail=steps:5%"), "quantity:limit"),
    ],
)
def test_flags_without_effect_are_errors(suite: Run, flags: tuple[str, ...], told: str) -> None:
    result = suite(*flags, tests="def test_x(): pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert told in result.stderr.str()


BASELINE = """
import pytest

def test_counts(perf):
    perf.measure(16)

@pytest.mark.perf(baseline="main", tolerance="5%")
def test_marked(perf):
    perf.measure(16)

def test_fixture(perf, perf_baseline):
    perf.measure(16).assert_kernel_count(baseline=perf_baseline("main"))
"""
MORE = BASELINE.replace("16", "18")


def kernels(path: Path) -> dict[str, float]:
    stored = storage.load(path, Baseline)
    return {test.rpartition("::")[2]: entries[0].values["kernels"] for test, entries in stored.tests.items()}


def test_a_baseline_is_stored_compared_and_updated(
    suite: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pytester.path / "perf-baselines" / "main.json"
    missing = suite(tests=BASELINE)
    missing.assert_outcomes(passed=1, failed=2)
    assert "--perf-save=main" in missing.stdout.str()

    first = suite("--perf-save=main")
    first.assert_outcomes(passed=3)
    first.stdout.fnmatch_lines(["baseline 'main' stored: *main.json"])
    assert kernels(path) == {"test_counts": 36, "test_marked": 36, "test_fixture": 36}

    worse = suite("--perf-compare=main", "--perf-compare-fail=kernels:0,memory:2%", tests=MORE)
    worse.stdout.no_fnmatch_line("*traceback entries are hidden*")
    worse.assert_outcomes(failed=3)
    text = worse.stdout.str()
    assert "kernel count: 38 a step, 36 in baseline 'main'" in text
    assert "2 × vectorized_elementwise_kernel from aten::add_  ResNet.layer1.0  model.py:31" in text
    assert "kernel count: 38, 36 in 'main' (+5.6%)" in text
    lenient = suite("--perf-compare", "--perf-compare-fail=kernels:10%")
    lenient.assert_outcomes(passed=1, failed=2)  # the marker and the fixture have limits of their own

    updated = suite("--perf-compare=main", "--perf-update", "-k", "counts or fixture")
    updated.assert_outcomes(passed=2, deselected=1)
    assert kernels(path) == {"test_counts": 38, "test_marked": 36, "test_fixture": 38}

    monkeypatch.setenv("SLOWER", "1")
    refused = suite("--perf-compare=main", "--perf-compare-fail=step:5%", "-k", "counts or fixture")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    slower = suite("--perf-compare=main", "--perf-compare-fail=kernels:0", "-k", "counts or fixture")
    slower.assert_outcomes(passed=2, deselected=1)
    assert "step time" not in slower.stdout.str()
    monkeypatch.setenv("ELSEWHERE", "1")
    mixed = suite("--perf-compare=main", "--perf-update", "-k", "counts or fixture")
    mixed.assert_outcomes(passed=2, deselected=1)
    assert mixed.ret == pytest.ExitCode.TESTS_FAILED
    assert "1 of its 3 tests were not measured here" in mixed.stdout.str()
    assert kernels(path) == {"test_counts": 38, "test_marked": 36, "test_fixture": 38}

    monkeypatch.setenv("ON_CPU", "1")
    on_cpu = suite("--perf-compare=main", "-k", "counts or fixture")
    on_cpu.assert_outcomes(passed=1, failed=1, deselected=1)
    assert "is of a step on cuda, this one ran on cpu" in on_cpu.stdout.str()
    suite("--perf-compare=main", "--perf-compare-fail=kernels:0", "-k", "counts").assert_outcomes(
        failed=1, deselected=2
    )


def test_workers_of_xdist_send_what_they_measured(suite: Run, pytester: pytest.Pytester) -> None:
    failing = """
def test_past(perf):
    perf.measure(16).assert_kernel_count(max=1)

@pytest.mark.perf(max_kernel=3)
def test_typo(perf):
    pass
"""
    result = suite(
        "-p",
        "xdist",
        "-n2",
        "--perf-save=main",
        "--perf-storage=kept",
        "--perf-json=out.json",
        tests=SUITE + failing,
        apart=True,
    )
    result.assert_outcomes(passed=5, failed=1, errors=1)
    assert "Did you mean 'max_kernels'" in result.stdout.str()
    stored = storage.load(pytester.path / "kept" / "main.json", Baseline)
    assert len(stored.tests) == 4  # what failed enters no baseline
    assert len(json.loads((pytester.path / "out.json").read_text())["tests"]) == 5
    assert len(re.findall(r"^test_made_up\.py::\S+  step", result.stdout.str(), re.MULTILINE)) == 5


PASSED_AND_FAILED = """
def test_good(perf):
    perf.measure(16)

def test_past(perf):
    perf.measure(16).assert_kernel_count(max=20)
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n2")], ids=["here", "xdist"])
def test_a_failure_is_told_where_its_report_cannot_be_written(
    suite: Run, pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    (pytester.path / "reports").write_text("a file in the way")
    result = suite(*workers, "--perf-report-dir=reports", tests=PASSED_AND_FAILED, apart=bool(workers))
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*kernel count: 36 a step, at most 20 wanted", "report could not be written: *reports*"]
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--perf-storage=taken", "--perf-save=a"), "baseline 'a' was not stored: *taken*"),
        (("--perf-json=taken/y.json",), "what was measured was not written: *taken*"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_below_the_failures(
    suite: Run, pytester: pytest.Pytester, flags: tuple[str, ...], told: str
) -> None:
    (pytester.path / "taken").write_text("a file in the way")
    result = suite(*flags, "--junitxml=j.xml", tests=PASSED_AND_FAILED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*= FAILURES =*", told])
    assert "test_past" in (pytester.path / "j.xml").read_text()
    alone = suite(*flags, "-k", "good")
    alone.assert_outcomes(passed=1, deselected=1)
    assert alone.ret == pytest.ExitCode.TESTS_FAILED


def test_a_baseline_that_cannot_be_updated_is_told_before_anything_runs(suite: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "perf-baselines").mkdir()
    (pytester.path / "perf-baselines" / "main.json").write_text("<<<<<<< HEAD")
    result = suite("--perf-compare=main", "--perf-update", tests=PASSED_AND_FAILED)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "main.json:1:1: cut off, or no JSON" in result.stderr.str()


OUTCOMES = """
import pytest

@pytest.mark.parametrize("name", ["a:b", "a/b"])
def test_past(perf, name):
    perf.measure(16).assert_kernel_count(max=20)

@pytest.mark.xfail
def test_expected(perf):
    perf.measure(16).assert_kernel_count(max=20)

@pytest.fixture
def held(perf):
    perf.measure(16).assert_kernel_count(max=20)

def test_in_its_setup(held):
    pass

def test_good(perf):
    perf.measure(16)
"""


def test_what_fails_is_told_and_not_stored_wherever_it_fails(suite: Run, pytester: pytest.Pytester) -> None:
    result = suite("--perf-report-dir=reports", "--perf-json=out.json", "--perf-save=main", tests=OUTCOMES)
    result.assert_outcomes(passed=1, failed=2, xfailed=1, errors=1)
    assert kernels(pytester.path / "perf-baselines" / "main.json") == {"test_good": 36}
    assert (
        len(list((pytester.path / "reports").iterdir())) == 3
    )  # one each: of two names with other punctuation, and a setup
    written = storage.load(pytester.path / "out.json", Written)
    outcomes = {test.test.rpartition("::")[2]: test.outcome for test in written.tests}
    assert outcomes["test_expected"] == "xfailed"
    assert outcomes["test_in_its_setup"] == "failed"
    result.stdout.fnmatch_lines(
        ["test_made_up.py::test_in_its_setup  step*", "    kernel count: 36 of at most 20*FAILED"]
    )
