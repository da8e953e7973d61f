"""The catalogue is whole, names tests that exist, and the page says what was recorded."""

from __future__ import annotations

import page
import pytest


def test_every_number_is_there_once_and_says_what_is_tried() -> None:
    faults = [fault for area in page.catalogue() for fault in area["faults"]]
    assert [fault["number"] for fault in faults] == list(range(1, 103))
    for fault in faults:
        assert fault["fault"]
        assert fault["expected"]
        assert fault.get("tests") or fault.get("open"), fault["number"]
        assert set(fault) <= {"number", "fault", "expected", "tests", "open"}


@pytest.mark.parametrize("test", page.tests())
def test_what_the_catalogue_names_exists(test: str) -> None:
    assert page.exists(test)


def test_a_test_that_was_renamed_is_seen() -> None:
    assert not page.exists("tests/faults/test_fault_catalogue.py::test_that_never_was")
    assert not page.exists("tests/faults/no_such_file.py::test_a_test_that_was_renamed_is_seen")


def test_the_page_is_current() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run `python tests/faults/page.py`"


def test_nothing_on_record_failed_and_every_test_is_on_record() -> None:
    (cpu,) = [run for run in page.records() if run["machine"] == "cpu"]
    assert not [name for name, counts in cpu["tests"].items() if counts.get("failed")]
    missing = [test for test in page.tests() if test not in cpu["tests"] and "_gpu" not in test]
    assert not missing, "run `make reliability`"
