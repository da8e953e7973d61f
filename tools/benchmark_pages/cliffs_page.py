"""The page of one GPU's `advisor bench conv`: sizes at which the installed cuDNN takes longer than for a convolution of as much work or more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from advisor.bench.sweep import CLIFF
from advisor.core.units import counted, percent_text

PAGE = "cliffs.md"
Row = dict[str, Any]


def page(document: Row) -> str:
    """The whole page, of the file's document."""
    rows = document["rows"]
    versions = ", ".join(sorted({f"cuDNN {row['cudnn']}, torch {row['torch']}, {row['date']}" for row in rows}))
    parts = [
        f"# Where cuDNN is slow: {document['gpu']}\n",
        f"By `advisor bench conv` ({versions}). A sweep changes one size of a convolution; all else stays. A product is off a cliff "
        f"where another value of the same sweep does as much work or more, and takes less than 1 / {CLIFF:g} of its time. "
        f"`cudnn.benchmark` is on, so no choice of a heuristic is to blame. Times are the device's own.\n",
        f"{summary(rows)}\n",
    ]
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        parts.append(_section(sweep, [row for row in rows if row["sweep"] == sweep]))
    return "\n".join(parts).rstrip() + "\n"


def summary(rows: Sequence[Row]) -> str:
    """How many products fall off, and of which sweeps."""
    off = Counter(row["sweep"] for row in rows if row["faster"] is not None)
    if not off:
        return f"None of {counted(len(rows), 'product')} is off a cliff."
    named = ", ".join(f"{count} by {sweep}" for sweep, count in off.most_common())
    return f"{off.total()} of {counted(len(rows), 'product')} are off a cliff: {named}."


def _section(sweep: str, rows: Sequence[Row]) -> str:
    """The sweep's cliffs, the steepest first."""
    off = sorted((row for row in rows if row["faster"] is not None), key=lambda row: row["faster_ms"] / row["ms"])
    values = ", ".join(map(str, dict.fromkeys(row["value"] for row in rows)))
    lines = [f"## {sweep}\n", f"Values: {values}.\n"]
    if not off:
        return "\n".join([*lines, "No cliff.\n"])
    lines += [
        "| value | dtype | layout | product | ms | faster at | ms | of the time |",
        "|---:|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['value']} | {'tf32' if row['tf32'] else row['dtype']} | {row['layout'].upper()} | {row['product']} | {row['ms']:.3f} "
        f"| {row['faster']} | {row['faster_ms']:.3f} | {percent_text(row['faster_ms'] / row['ms'])} |"
        for row in off
    ]
    return "\n".join([*lines, ""])
