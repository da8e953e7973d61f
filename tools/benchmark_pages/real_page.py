"""docs/benchmarks/<gpu>/real.md: trainings that other people wrote, from the real.json beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

PAGE = "real.md"
_HEAD = """# Real trainings

{gpu}, torch {torch}, CUDA {cuda}; by `advisor bench real`. These are other people's repositories as they are published, each behind a
runner that makes its data. Their code is not here.

- *Proved*: the plan of `advisor apply --auto` is faster than the script as written in fresh runs, and trains alike. Where the
  step waits for its loader or for the host, the device's own time decides that, and the step must be no slower.
- *First proof* counts from the script's first step.
- *Device*: by how much the device's own time is shorter, where the step waits for its loader or the host's launches.
- *By hand*: bf16 autocast, channels_last, cuDNN autotuning and a fused optimizer, the better of without and with torch.compile, in runs
  right after. –: none worked, or none was run.

{summary}
"""


def page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = document["rows"]
    lines = [
        _HEAD.format(gpu=document["gpu"], torch=document["torch"], cuda=document["cuda"], summary=summary(rows)),
        "| training | proved | speed-up | device | first proof | as written ms | applied ms | by hand | kept | search | date |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|---:|---|",
        *(_line(row) for row in rows),
        "\n## What was not kept, and why\n",
        *(_why(row) for row in rows),
    ]
    return "\n".join(lines).rstrip() + "\n"


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many are proved, by how much in the mean, and after what time."""
    proved = [row for row in rows if row["proved"] and row["speedup"]]
    told = f"{len(proved)} of {len(rows)} proved"
    if not proved:
        return f"{told}."
    mean = math.exp(math.fsum(math.log(row["speedup"]) for row in proved) / len(rows))
    waits = sorted(row["first_proof_s"] for row in proved if row["first_proof_s"] is not None)
    after = f", the first plan after {median(waits):.0f} s (median), {waits[-1]:.0f} s at worst" if waits else ""
    return f"{told}; {mean:.2f} times as fast in the geometric mean of all, those without a proof as 1{after}."


def _line(row: Mapping[str, Any]) -> str:
    hand = f"{row['hand_speedup']:.2f} ×" if row["hand_speedup"] else "–"
    first = f"{row['first_proof_s']:.0f} s" if row["first_proof_s"] is not None else "–"
    search = f"{row['apply_s']:.0f} s" if row["apply_s"] is not None else "–"
    cells = (
        row["name"],
        "yes" if row["proved"] else "no",
        _bounds(row, "speedup"),
        _bounds(row, "device_speedup"),
        first,
        _ms(row["plain_ms"]),
        _ms(row["advisor_ms"]),
        hand,
        ", ".join(row["kept"]) or "nothing",
        search,
        row["date"],
    )
    return f"| {' | '.join(cells)} |"


def _why(row: Mapping[str, Any]) -> str:
    told = [row["fault"] and f"no result: {row['fault']}", *row["not_kept"], *row["notes"]]
    return "\n".join((f"- **{row['name']}**: {row['detail']}".rstrip(": "), *(f"  - {line}" for line in told if line)))


def _bounds(row: Mapping[str, Any], name: str) -> str:
    if row[name] is None:
        return "–"
    return f"{row[name]:.2f} ({row[f'{name}_low']:.2f} to {row[f'{name}_high']:.2f})"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
