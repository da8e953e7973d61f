"""The page's section on what a substituted operation costs beside the device's time: the host's, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from advisor.core.units import shape_text
from advisor.ops.family import Case, Family
from advisor.ops.moments_cases import APART
from benchmark_pages.gaps import Measured, Row

MOST_HOST_US = 10.0  # the goal: ours less eager's

_TEXT = f"""## Host and memory beside eager

What is dispatched, by family and pass. Comparisons of a convolution and a norm apart are left out.

- *Host*: ours less eager's, median, and in how many rows it is {MOST_HOST_US:.0f} µs or less. CUDA graphs take it away.
- *Memory*: the pass's peak over eager's, median; in how many rows it is more; and the most, with place and bytes.

A row is of the kernels alone. In the 3x3 and the strided 1x1 convolutions they also make those products that a training leaves to
PyTorch. Why, and what is allowed: [the note](../../notes/host-cost-of-a-call.md).
"""


def section(families: Sequence[tuple[Family, Measured]]) -> str:
    """In Markdown: a line a family and pass."""
    table = [
        f"| family | pass | rows | host µs | {MOST_HOST_US:.0f} or less | memory ÷ eager's | more in | most | where |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    everything: list[tuple[str, Case, Row]] = []
    for family, cases in families:
        dispatched = [
            (family.id, case, row)
            for case, rows in cases
            if not case.name.endswith(APART) and not case.wins()
            for row in rows
        ]
        everything += dispatched
        table += _lines(family.id, dispatched)
    again = _taken_again([row for *_, row in everything])
    return "\n".join([_TEXT, *([again] if again else []), *table, *_lines("all", everything)]) + "\n"


def _taken_again(rows: Sequence[Row]) -> str:
    """In how many rows the host's times are newer than the rest, and of when."""
    dates = sorted(row["host_date"] for row in rows if row.get("host_date"))
    if not dates:
        return ""
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"The host's times of {len(dates)} of these {len(rows)} rows were taken again by themselves, {when}.\n"


def _lines(title: str, rows: Sequence[tuple[str, Case, Row]]) -> list[str]:
    return [
        _line(title, way, [row for *_, row in rows if row["pass"] == way])
        for way in ("forward", "backward")
        if any(row["pass"] == way for *_, row in rows)
    ]


def _line(title: str, way: str, rows: Sequence[Row]) -> str:
    host = [row["advisor_host_us"] - row["eager_host_us"] for row in rows]
    near = sum(value <= MOST_HOST_US for value in host)
    memory = "– | – | – |"
    held = [row for row in rows if row.get("advisor_peak_bytes") is not None and row.get("eager_peak_bytes")]
    if held:
        over = [row for row in held if row["advisor_peak_bytes"] > row["eager_peak_bytes"]]
        memory = f"{median(map(share, held)):.2f} | {len(over)} of {len(held)} | "
        if over:
            worst = max(over, key=share)
            more = worst["advisor_peak_bytes"] - worst["eager_peak_bytes"]
            memory += f"{share(worst):.2f} | {worst['name']} {worst['dtype']} {shape_text(worst['shape'])}: +{more / 2**20:.1f} MiB"
        else:
            memory += "– |"
    return f"| {title} | {way} | {len(rows)} | {median(host):+.0f} | {near} of {len(rows)} | {memory} |"


def share(row: Row) -> float:
    """Peak memory of the pass over eager's."""
    return float(row["advisor_peak_bytes"] / row["eager_peak_bytes"])
