"""Amounts as people write them in a test ("2 GiB", "12 ms", "5 %") to numbers in a quantity's unit, and back."""

from __future__ import annotations

import math
import re

from advisor.core import units
from advisor.core.errors import AdvisorError
from advisor.rules.units import SUFFIXES

_TEXT = re.compile(r"\s*([-+]?\d+(?:\.\d+)?)\s*(\D*?)\s*")
_EXAMPLES = {"us": "12 ms", "bytes": "2 GiB", "frac": "85 %", "count": "180"}
Amount = float | str


def parse(value: Amount, unit: str, what: str = "an amount") -> float:
    """`value` in `unit`: us, bytes, frac or count. A bare number is in that unit already; a text needs a suffix.

    Raises:
        AdvisorError: for anything else, a negative amount, or a share that is written as a bare number above 1.
    """
    expected = f"a number or a text such as {_EXAMPLES[unit]!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise AdvisorError(f"{what} is {value!r}", expected=expected)
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        factor = SUFFIXES[unit].get(match[2]) if match else None
        if match is None or factor is None:
            known = ", ".join(suffix for suffix in SUFFIXES[unit] if suffix)
            raise AdvisorError(
                f"{what} is {value!r}", expected=expected + (f" with one of {known}" if known else ", no unit")
            )
        number = float(match[1]) * factor
    else:
        number = float(value)
        if unit == "frac" and number > 1:
            raise AdvisorError(
                f"{what} is {value!r}", expected="a share", fix=f"Write '{value} %' or a fraction below 1."
            )
    if not math.isfinite(number) or number < 0:
        raise AdvisorError(f"{what} is {value!r}", expected="an amount of zero or more")
    return number


def share(value: Amount, what: str = "a tolerance") -> float:
    """A share: `"5 %"` or `0.05`.

    Raises:
        AdvisorError: for anything else.
    """
    return parse(value, "frac", what)


def text(value: float, unit: str) -> str:
    """The amount as a person reads it."""
    if unit == "us":
        return units.time_text(value)
    if unit == "bytes":
        return units.bytes_text(value)
    return units.percent_text(value) if unit == "frac" else units.count_text(value)
