"""Message templates: `{metric}` or `{metric:form}`, nothing else. No `str.format`, so no attribute or index can be reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from advisor.core import units
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.rules.units import text_of

# form → (metric units it is for, how it prints)
FORMS: dict[str, tuple[tuple[str, ...], Callable[[float], str]]] = {
    "pct": (("frac",), units.percent_text),
    "time": (("us",), units.time_text),
    "long": (("us",), units.duration_text),
    "bytes": (("bytes",), units.bytes_text),
    "rate": (("gbps",), units.rate_text),
    "count": (("count", ""), units.count_text),
    "times": (("count", "frac"), lambda value: f"{value:.3g}×"),
}
_PLACEHOLDER = re.compile(r"\{([a-z0-9_]+)(?::([a-z]+))?\}")
_COUNTED = re.compile(_PLACEHOLDER.pattern + r"((?: loader| backward)? [a-z]{2,}s\b)?")


def faults(template: str) -> Iterator[str]:
    """A description of everything in braces that is not a known placeholder."""
    covered = [match.span() for match in _PLACEHOLDER.finditer(template)]
    for brace in re.finditer(r"[{}]", template):
        if not any(start <= brace.start() < end for start, end in covered):
            yield "a brace that is no {metric} or {metric:form}"
    for match in _PLACEHOLDER.finditer(template):
        name, form = match.groups()
        if name not in BY_NAME:
            yield f"the placeholder of an unknown metric {name!r}"
        elif form is not None and form not in FORMS:
            yield f"the unknown form {form!r}"
        elif form is not None and BY_NAME[name].unit not in FORMS[form][0]:
            yield f"the form {form!r}, which does not fit {name} ({BY_NAME[name].unit or 'no unit'})"


def metrics_in(template: str) -> tuple[str, ...]:
    """Metrics that the template shows, in order, each once."""
    return tuple(dict.fromkeys(name for name, _ in _PLACEHOLDER.findall(template)))


def fill(template: str, table: MetricTable) -> str:
    """The template with values from the table; a missing one reads "(not measured)".

    Of one thing the noun behind it is in the singular: "{cpu_threads} threads" becomes "1 thread".
    Shares of device time are told as shares of the step, as all else in a report is: of a step that waits half of its time, half.
    """
    work = table.number("work_frac")

    def value_of(match: re.Match[str]) -> str:
        name, form, noun = match.groups(default="")
        value = table[name].value
        if value is None:
            return f"(not measured){noun}"
        if work is not None and isinstance(value, float) and BY_NAME[name].of_device_time:
            value *= work
        told = FORMS[form][1](value) if form and isinstance(value, float) else text_of(value, BY_NAME[name])
        one = isinstance(value, float) and told == "1"
        return told + (re.sub(r"(?<=ch|ss)es$|s$", "", noun) if one else noun)

    return _COUNTED.sub(value_of, template)
