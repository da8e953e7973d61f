"""Amounts as people write them: read right, or refused with what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from advisor.core.errors import AdvisorError
from advisor.testing import amounts


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        ("2 GiB", "bytes", 2 * 2**30),
        ("1.5MB", "bytes", 1.5e6),
        (4096, "bytes", 4096),
        ("12 ms", "us", 12_000),
        ("800us", "us", 800),
        ("85 %", "frac", 0.85),
        (0.85, "frac", 0.85),
        ("0%", "frac", 0),
        (1, "frac", 1),
        (180, "count", 180),
        ("180", "count", 180),
    ],
)
def test_amounts_are_read_in_their_unit(value: Any, unit: str, expected: float) -> None:
    assert amounts.parse(value, unit) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        ("2 GiB", "us"),
        ("2", "bytes"),
        ("5", "frac"),
        (5, "frac"),
        ("180 kernels", "count"),
        ("-1 ms", "us"),
        (-1, "count"),
        (math.nan, "count"),
        (math.inf, "bytes"),
        (True, "count"),
        (None, "bytes"),
        ("", "us"),
        ("five %", "frac"),
    ],
)
def test_what_is_no_amount_is_refused(value: Any, unit: str) -> None:
    with pytest.raises(AdvisorError, match=r"budget is .*expected"):
        amounts.parse(value, unit, "budget")


def test_an_amount_is_shown_as_people_read_it() -> None:
    shown = [amounts.text(v, u) for v, u in [(12_345, "us"), (1536, "bytes"), (0.5, "frac"), (180, "count")]]
    assert shown == ["12.3 ms", "1.50 KiB", "50 %", "180"]
