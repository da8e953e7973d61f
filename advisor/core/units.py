"""Numbers as people read them. Pure formatting, no arithmetic on measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

FACTOR_MOST = 100.0  # no bound of a speed-up is told above it
_UNITS = "%|B|[KMGTP]iB|ns|µs|ms|s|min|h|[GT]B/s|[kMGTP]?FLOP(?:/s)?|W|MHz|°C|pairs?|steps?|×"


_TIMES = ((1e6, "s"), (1e3, "ms"))


def _scaled(value: float, base: float, suffixes: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return "–"
    magnitude, index = abs(value), 0
    while magnitude >= base * 0.9995 and index + 1 < len(suffixes):
        magnitude /= base
        value /= base
        index += 1
    digits = 0 if magnitude >= 100 or (index == 0 and value == int(value)) else 1 if magnitude >= 10 else 2
    return f"{value:.{digits}f} {suffixes[index]}"


def bytes_text(value: float) -> str:
    """`1536` → `1.50 KiB`."""
    return _scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB"))


def time_text(value_us: float, beside_us: float = 0.0) -> str:
    """Microseconds → `870 ns`, `12.3 µs`, `54.8 ms`, `1.20 s`.

    beside_us: a longer time that it stands beside, whose unit it has then: 62.4 ms of 9.49 s are `0.062 s`. What would be less than a
    thousandth so has a unit of its own.
    """
    size, suffix = next((unit for unit in _TIMES if beside_us >= 0.9995 * unit[0]), (1.0, "µs"))
    if not value_us:
        return f"0 {suffix}"
    if beside_us and 0.0005 * size <= abs(value_us) < 0.9995 * size:
        return f"{value_us / size:.3f} {suffix}"
    if 0 < abs(value_us) < 1:
        return f"{value_us * 1e3:.0f} ns"
    return _scaled(value_us, 1000.0, ("µs", "ms", "s"))


def duration_text(value_us: float) -> str:
    """Microseconds that may be long → `40 s`, `12 min`, `5.2 h`, `3.1 days`."""
    for unit, seconds in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value_us >= seconds * 1.5e6:
            value = value_us / 1e6 / seconds
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return time_text(value_us)


def flops_text(value: float) -> str:
    """Floating-point operations → `3.1 TFLOP`."""
    return _scaled(value, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def rate_text(value_gbps: float) -> str:
    """GB/s (10^9 bytes per second) → `4.24 TB/s`."""
    return _scaled(value_gbps, 1000.0, ("GB/s", "TB/s"))


def percent_text(fraction: float) -> str:
    """`0.3141` → `31 %`; below ten per cent one digit is kept, and what that would show as nothing is `<0.1 %`."""
    if not math.isfinite(fraction):
        return "–"
    value = fraction * 100
    if 0 < abs(value) < 0.05:
        return "<0.1 %" if value > 0 else "0 %"
    return (f"{value:.0f} %" if abs(value) >= 10 or value == 0 else f"{value:.1f} %").replace("-", "−")


def bounds_text(low: float, high: float) -> str:
    """The interval of a factor, without its unit: `1.55 to 4.88`; what noise has made boundless is cut off: `0.00 to above 100`."""
    least = f"{low:.2f}" if low < FACTOR_MOST else f"above {FACTOR_MOST:.0f}"
    most = f"{high:.2f}" if high < FACTOR_MOST else f"above {FACTOR_MOST:.0f}"
    return f"{least} to {most}"


def shape_text(sizes: Iterable[int]) -> str:
    """`256×64×112×112`."""
    return "×".join(map(str, sizes))


def counted(count: int, what: str) -> str:
    """`1 place`, `2 places`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def unbroken(text: str) -> str:
    """`text` in which no line may end between a number and its unit, nor in `n = 20`: no-break spaces stand there."""
    text = re.sub(rf"(?<=\d) (?=(?:{_UNITS})(?!\w))", "\N{NO-BREAK SPACE}", text)
    return text.replace("n = ", "n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")


def samples_text(per_second: float) -> str:
    """Samples a second → `0.41`, `3.2`, `9,784`: two digits at least, as a volume or a detector's batch takes seconds."""
    digits = 2 if per_second < 0.995 else 1 if per_second < 9.95 else 0
    return f"{per_second:,.{digits}f}"


def count_text(value: float) -> str:
    """`1234567` → `1,234,567`; fractions keep one digit."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
