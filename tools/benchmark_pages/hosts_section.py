"""The page's section on what `advisor bench hosts` has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from advisor.bench import hosts

_TEXT = f"""## Steps that the host bounds

What a step costs the host without CUDA graphs: torchvision's networks, {hosts.BATCH} images of {hosts.SIZE} x {hosts.SIZE}, bf16 autocast, channels_last, loss and
backward. *As written* and *with the kernels* by turns, from an idle GPU until the step's last call has returned; medians, with
(p90 - p10) / median as spread. *Calls*: into the kernels, a step. By `advisor bench hosts`.
"""


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, a line a network; empty without rows."""
    if not rows:
        return ""
    lines = [
        _TEXT,
        "| network | calls | as written ms | spread | with the kernels ms | spread | as written ÷ with | date |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
        *(
            f"| {row['name']} | {sum(row['ran'].values())} | {row['plain_ms']:.2f} | {row['plain_spread']:.0%} | {row['advisor_ms']:.2f} "
            f"| {row['advisor_spread']:.0%} | {row['plain_ms'] / row['advisor_ms']:.2f} | {row['date']} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"
