"""Numbers in words: shares, gains, times, rates, with their units."""

from __future__ import annotations

from collections.abc import Callable

from advisor.core.findings import Interval
from advisor.core.metrics import BY_NAME
from advisor.core.profile import Spread
from advisor.core.units import bounds_text, bytes_text, percent_text, rate_text, time_text
from advisor.core.verdict import StackVerdict

TOLD_LOSS = 0.01  # of the step: what no search tells from nothing (--min-gain) is not told as a loss
LEAST = "<0.1"  # what would else read as nothing, in per cent
_BY_UNIT: dict[str, Callable[[float], str]] = {
    "frac": percent_text,
    "us": time_text,
    "bytes": bytes_text,
    "gbps": rate_text,
}


def interval(low: float, high: float) -> str:
    """Two shares as `24–58 %`; one where both read the same; a minus sign, not a dash, before a loss."""
    first, second = (_number(100 * v) for v in (low, high))
    if (first, second) == ("0", LEAST):
        return f"{LEAST} %" if low >= 0 else "0 %"
    if first == second:
        return f"{first} %"
    return f"{first} to {second} %" if "−" in first + second else f"{first}–{second} %"


def _number(percent: float) -> str:
    if percent < -1000:  # what no table needs to the digit
        return "<−1000"
    if 0 < percent < 0.05:
        return LEAST
    text = f"{percent:.0f}" if abs(percent) >= 10 else f"{percent:.1f}"
    text = text.removesuffix(".0")
    return "0" if text == "-0" else text.replace("-", "−")


def gain(value: Interval | None) -> str:
    """A gain interval as a share of the step, `–` where there is none."""
    return interval(value.low, value.high) if value is not None else "–"


def saves(predicted: Interval) -> str:
    """A predicted gain within a sentence: `24–58 % of the step`, `up to 12 % of the step`, and where it may lose more than a trial
    could tell from nothing, `up to 22 % of the step, or cost up to 47 %`."""
    if predicted.low == predicted.high == 0:
        return "nothing"
    if predicted.low <= 0 < predicted.high:
        saved = f"up to {share(predicted.high)} of the step"
        return f"{saved}, or cost up to {share(-predicted.low)}" if predicted.low <= -TOLD_LOSS else saved
    return f"{gain(predicted)} of the step"


def duration(value_us: float, beside_us: float = 0.0) -> str:
    """A step time with four digits, for times whose spread stands beside them: `116.6 ms`; in the unit of the one that it stands beside."""
    like = beside_us or value_us
    size, suffix = (1e6, "s") if like >= 1e6 else (1e3, "ms") if like >= 1e3 else (1.0, "µs")
    value = value_us / size
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3}f} {suffix}"


def value(metric: float | str | bool | None, unit: str) -> str:
    """A metric's value with its unit, as people read it."""
    if metric is None:
        return "not known"
    if isinstance(metric, bool):
        return "yes" if metric else "no"
    if isinstance(metric, str):
        return metric or "none"
    if (known := _BY_UNIT.get(unit)) is not None:
        return known(metric)
    suffix = {"watt": " W", "mhz": " MHz", "percent_c": " °C", "tflops": " TFLOP/s"}.get(unit, "")
    return (f"{metric:,.0f}" if metric == int(metric) or abs(metric) >= 100 else f"{metric:.3g}") + suffix


def unit(metric: str) -> str:
    """The unit of a metric in the registry, empty for others."""
    spec = BY_NAME.get(metric)
    return spec.unit if spec is not None else ""


def share(fraction: float) -> str:
    """A share with a proper minus sign: `−2 %`, `0.5 %`, `40 %`."""
    return f"{_number(100 * fraction)} %"


def kernel_name(name: str) -> str:
    """A kernel's name without return type, namespaces, arguments and template arguments.

    `void at::native::vectorized_elementwise_kernel<4, …>(int, …)` → `vectorized_elementwise_kernel<…>`.
    """
    text = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    opening = min((i for i in (text.find("<"), text.find("(")) if i > 0), default=len(text))
    if text[opening - 1 : opening] == " ":  # "Memcpy HtoD (Pageable -> Device)" is no function
        return text
    base = text[:opening] if text.startswith("aten::") else text[:opening].rsplit("::", 1)[-1]
    return (base or text) + ("<…>" if text[opening : opening + 1] == "<" else "")


def spread(measured: Spread) -> str:
    """`p10–p90 116.5–117.3 ms, n = 20`; a single time has no spread: `n = 1`."""
    if measured.n == 1:
        return "n = 1"
    low, high = duration(measured.p10, measured.median), duration(measured.p90, measured.median)
    return f"p10–p90 {low.split()[0]}–{high}, n = {measured.n}"


def factor(value: float) -> str:
    """A speed-up factor: `3.10×`."""
    return f"{value:.2f}×"


def device_speedup(stack: StackVerdict) -> str:
    """`the device's time 1.62× shorter (1.58 to 1.66): this step waits for its loader`; "" where it is as long, or the step tells all."""
    found, low, high = stack.device_speedup, stack.device_speedup_low, stack.device_speedup_high
    if found is None or low is None or high is None or low <= 1.0 <= high:
        return ""
    than, power = ("as long", -1) if high < 1.0 else ("shorter", 1)
    bounds = bounds_text(*sorted((max(low, 1e-3) ** power, high**power)))
    return f"the device's time {factor(found**power)} {than} ({bounds}): this step waits for {stack.waits_for or 'its loader'}"
