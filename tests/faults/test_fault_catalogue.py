"""The catalogue is whole, names tests that exist, and the page says what was recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import page
import pytest


def test_every_number_is_there_once_and_says_what_is_tried() -> None:
    faults = [fault for area in page.catalogue() for fault in area["faults"]]
    assert [fault["number"] for fault in faults] == list(range(1, len(faults) + 1))
    for fault in faults:
        assert fault["fault"]
        assert fault["expected"]
        assert bool(fault.get("tests")) is not bool(fault.get("not_applicable")), fault["number"]
        assert set(fault) <= {"number", "fault", "expected", "tests", "open", "not_applicable"}
    assert len(faults) > page.PLANNED


@pytest.mark.parametrize("test", page.tests())
def test_what_the_catalogue_names_exists(test: str) -> None:
    assert page.exists(test)


def test_a_test_that_was_renamed_is_seen() -> None:
    assert not page.exists("tests/faults/test_fault_catalogue.py::test_that_never_was")
    assert not page.exists("tests/faults/no_such_file.py::test_a_test_that_was_renamed_is_seen")


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `python tests/faults/page.py`"


@pytest.mark.parametrize("machine", page.records())
def test_nothing_on_record_failed_and_every_test_is_on_record_once(machine: str) -> None:
    on_record = [(name, counts) for run in page.records()[machine] for name, counts in run["tests"].items()]
    assert not [name for name, counts in on_record if counts.get("failed")]
    expected, found = set(page.named(machine)), {name for name, _ in on_record}
    again = f"run `python tests/faults/page.py --run {machine}`"
    assert found <= expected, again
    # Not everybody who adds a test has a GPU: the page says then that it was not run.
    assert found == expected or machine == "gpu", again
    assert len(found) == len(on_record)


def test_a_gpu_test_that_was_not_run_is_told() -> None:
    gpu, cpu = "tests/faults/test_fault_x_gpu.py::test_a", "tests/faults/test_fault_x.py::test_b"
    runs = {"cpu": [_run(cpu, passed=2)]}
    assert page._happened({"tests": [gpu, cpu]}, runs) == "cpu: 2 passed; gpu: 1 not run yet"
    runs["gpu"] = [_run(gpu, passed=1)]
    assert page._happened({"tests": [gpu, cpu]}, runs) == "cpu: 2 passed; gpu: 1 passed"


def test_each_test_is_told_of_the_machine_that_ran_it_last() -> None:
    older, newer = _run("a", "b", device="H200", passed=1), _run("b", device="H100", passed=1)
    assert [(run["device"], *run["tests"]) for run in page.with_run([older], newer)] == [("H200", "a"), ("H100", "b")]
    assert page.with_run([newer], _run("b", device="H200", passed=1)) == [_run("b", device="H200", passed=1)]
    # One that was made in parts is one run.
    (whole,) = page.with_run([older], _run("b", "c", device="H200", skipped=1))
    assert whole["tests"] == {"a": {"passed": 1}, "b": {"skipped": 1}, "c": {"skipped": 1}}
    assert whole["told"] == {"a": "told", "b": "told", "c": "told"}


def _run(*tests: str, device: str = "", **counts: int) -> dict[str, Any]:
    held = {"tests": dict.fromkeys(tests, counts), "told": dict.fromkeys(tests, "told") if device else {}}
    return {"device": device, "python": "3.12", "torch": "2.11", "date": "2026-11-26", **held}


def test_what_does_not_apply_says_why() -> None:
    assert page._happened({"not_applicable": "No such files."}, {}) == "does not apply: No such files."


def test_the_records_are_of_a_cpu_and_of_a_gpu() -> None:
    machines = set(page.records())
    assert "cpu" in machines
    assert machines <= {"cpu", "gpu"}
    assert set(page.named("cpu")) | set(page.named("gpu")) == set(page.tests())


@pytest.mark.parametrize("file", sorted(page.CATALOGUE.parent.glob("test_fault_*_gpu.py")), ids=lambda path: path.stem)
def test_every_gpu_test_has_a_number_and_is_skipped_without_a_gpu(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    functions = re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)
    where = file.relative_to(page.ROOT).as_posix()
    assert functions
    assert not [name for name in functions if f"{where}::{name}" not in page.tests()]
    assert "pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available()" in text
