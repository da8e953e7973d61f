"""Thresholds as people write them ("15 %", "30 us", "1 GiB") to a metric's own unit, and back."""

from __future__ import annotations

import re

from advisor.core import units
from advisor.core.metric_spec import MetricSpec

# metric unit → suffix as written → factor to the metric's unit. "" stands for no suffix.
SUFFIXES: dict[str, dict[str, float]] = {
    "frac": {"%": 0.01},
    "us": {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6},
    "bytes": {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30},
    "gbps": {"MB/s": 1e-3, "GB/s": 1.0, "TB/s": 1e3},
    "count": {"": 1.0},
    "percent_c": {"C": 1.0, "°C": 1.0},
    "watt": {"W": 1.0},
    "mhz": {"MHz": 1.0, "GHz": 1e3},
    "tflops": {"TFLOP/s": 1.0},
    "": {"": 1.0},
}
_EXAMPLES = {
    "frac": "15 %",
    "us": "30 us",
    "bytes": "1 GiB",
    "gbps": "20 GB/s",
    "percent_c": "85 C",
    "watt": "300 W",
    "mhz": "1500 MHz",
    "tflops": "400 TFLOP/s",
}
# At most 15 digits: exact in a double. No exponents, underscores, octal or base 60: YAML 1.1 reads those in surprising ways.
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?)\s*([^\s0-9].*)?")


def example(spec: MetricSpec) -> str:
    """How a value of this metric is written."""
    if spec.kind == "flag":
        return "true or false"
    if spec.kind == "text":
        return "a text"
    return _EXAMPLES.get(spec.unit, "a plain number such as 20")


def parse_number(text: str, spec: MetricSpec) -> float:
    """The value of `text` in the unit of the metric.

    Raises:
        ValueError: with a clause that says what was found.
    """
    match = _NUMBER.fullmatch(text.strip())
    if re.fullmatch(r"[-+0-9.]+[eE][-+]?[0-9]+", text.strip()):
        raise ValueError(f"{text!r} is written with an exponent, which YAML 1.1 reads as text")
    if match is None:
        raise ValueError(f"{text!r} is no plain decimal number")
    suffix = (match.group(2) or "").strip()
    factors = SUFFIXES.get(spec.unit, {"": 1.0})
    if suffix not in factors:
        known = ", ".join(s for s in factors if s)
        found = f"the unit {suffix!r}" if suffix else "a number without a unit"
        raise ValueError(f"{text!r} has {found}" + (f" where {known} fits" if known else " where none fits"))
    return float(match.group(1)) * factors[suffix]


def text_of(value: float | str | bool, spec: MetricSpec) -> str:
    """A metric's value as people read it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value or "none"
    if spec.unit == "frac":
        return units.percent_text(value)
    if spec.unit == "us":
        return units.time_text(value)
    if spec.unit == "bytes":
        return units.bytes_text(value)
    if spec.unit == "gbps":
        return units.rate_text(value)
    if spec.unit == "percent_c":
        return f"{value:.0f} °C"
    if spec.unit == "watt":
        return f"{value:.0f} W"
    if spec.unit == "mhz":
        return f"{value:.0f} MHz"
    return units.count_text(value)
