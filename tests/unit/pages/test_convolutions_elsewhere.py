"""The table of other GPUs is that of the arithmetic, and the arithmetic is near what was measured."""

from __future__ import annotations

from pathlib import Path

from benchmark_pages import convolutions_elsewhere as elsewhere

PAGE = Path(__file__).parents[3] / "docs" / "convolutions.md"


def test_the_page_has_the_table_as_it_is() -> None:
    assert elsewhere.table() in PAGE.read_text("utf-8")


def test_the_chip_that_was_measured_comes_out_as_measured() -> None:
    (h200,) = (chip for chip in elsewhere.CHIPS if chip.name == "H200")
    assert abs(elsewhere.winograd(h200) - 1.42) < 0.08  # which has the filters' transform too
