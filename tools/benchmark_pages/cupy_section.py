"""The page's section on what `advisor bench cupy` has written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from advisor.bench import cupy_trainings

_TEXT = f"""## Loops of CuPy alone

Steps of training loops without PyTorch: docs/examples, and trainings that other people wrote. *Exact*: with
{", ".join(cupy_trainings.EXACT)}. *All*: with fp32 for accidental fp64 and TF32 products too. The median of
{cupy_trainings.RUNS} fresh processes' medians, arms by turns; in brackets the processes' range. *Off*: the loss behind as many steps,
from equal seeds, in parts of the plain run's. *Settling*: what finding, recording and judging the step takes beyond plain
steps, once. cupy_products is a loop that nothing but precision speeds up. By `advisor bench cupy`.
"""


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, a line a loop; empty without rows."""
    if not rows:
        return ""
    lines = [
        _TEXT,
        "| loop | as written ms | exact ms | | off | all ms | | off | settling s | CuPy | date |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
        *(_line(row) for row in rows if row["plain_ms"] is not None),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    plain = row["plain_ms"]
    parts = [row["name"], _times(plain, row["plain_range"])]
    for arm, error in (("exact", row["error"]), ("all", row["all_error"])):
        ms = row[f"{arm}_ms"]
        parts += [_times(ms, row[f"{arm}_range"]), f"{plain / ms:.2f} ×" if ms else "–"]
        parts += [f"{error:.0e}" if error is not None else "–"]
    parts += [f"{row['settled_s'] - row['settled_steps'] * plain / 1e3:.1f}", row["cupy"], row["date"]]
    return f"| {' | '.join(parts)} |"


def _times(middle: float | None, span: Sequence[float]) -> str:
    return "–" if middle is None else f"{middle:.3f} ({span[0]:.3f} to {span[-1]:.3f})"
