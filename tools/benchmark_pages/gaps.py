"""The page's section on goals: which cases reach them, and for the others what holds them, by the units that were counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from advisor.bench import units
from advisor.bench.goals import DTYPE, GOALS, LARGE_BYTES, Goal
from advisor.core.units import percent_text, shape_text
from advisor.ops.family import Case, Family

Row = Mapping[str, Any]
Measured = list[tuple[Case, list[Row]]]

FULL = 0.75  # of a unit's peak, while SMs have work: an addition of large tensors gets 0.85 of an H200's memory
IDLE = 0.1  # of the time, from which on SMs without work are told
NOT_COUNTED = "no counters on file"

TEXT = f"""## Goals

The share of the limit (limit ÷ ours) that kernels should reach in {DTYPE}, NHWC, on tensors of {LARGE_BYTES / 1e6:.0f} MB and more,
where they are dispatched. Then come the cases below it, the largest gap first, with the share of each unit's peak that our kernels used:
the {units.SHOWN} busiest units, the share of time in which an SM had work, and the share of the warps that it can hold.

*Held by* is the busiest unit while SMs had work, if that unit is at {FULL * 100:.0f} % of its peak or more. Otherwise it is latency: no
unit is full. Time in which SMs had no work (the tail of a launch, and the beginning of the next) is added from {IDLE * 100:.0f} % on.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A case's pass that is to reach a goal."""

    case: Case
    row: Row
    goal: float

    @property
    def reached(self) -> float:
        """Share of the limit."""
        return float(self.row["limit_ms"] / self.row["advisor_ms"])


def places(goal: Goal, way: str, families: Iterable[tuple[Family, Measured]]) -> list[Place]:
    """What was measured of a goal in one pass."""
    return [
        Place(case, row, goal.shares[way])
        for family, cases in families
        for case, rows in cases
        if rows and goal.holds_for(family.id, case)
        for row in rows
        if row["pass"] == way
    ]


def section(families: Sequence[tuple[Family, Measured]]) -> str:
    """In Markdown: a line a goal and pass, and one for each case that is short of its goal."""
    lines = [
        TEXT,
        "| operation | pass | goal | cases | reach it | limit ÷ ours, median | least |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    short: list[Place] = []
    for goal in GOALS:
        for way, share in goal.shares.items():
            found = places(goal, way, families)
            below = [place for place in found if place.reached < share]
            short += below
            reached = [place.reached for place in found]
            figures = f"{median(reached):.3f} | {min(reached):.3f}" if reached else "– | –"
            lines.append(
                f"| {goal.title} | {way} | {share:.2f} | {len(found)} | {len(found) - len(below)} | {figures} |"
            )
    return "\n".join(lines) + "\n" + (_short(short) if short else "")


def _short(found: Iterable[Place]) -> str:
    lines = [
        "\n| short of its goal | shape | pass | limit ÷ ours | goal | eager ÷ ours | units | held by |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for place in sorted(found, key=lambda place: place.reached - place.goal):
        case, row, counted = place.case, place.row, place.row.get("units")
        lines.append(
            f"| {case.name} | {shape_text(case.shape)} | {row['pass']} | {place.reached:.3f} | {place.goal:.2f} "
            f"| {row['eager_ms'] / row['advisor_ms']:.2f} | {units.text(counted) if counted else '–'} "
            f"| {held_by(counted) if counted else NOT_COUNTED} |"
        )
    return "\n".join(lines) + "\n"


def held_by(shares: Mapping[str, float]) -> str:
    """What keeps a kernel from its limit, by the rule that the section states."""
    working = shares.get("sms") or 1.0
    # To the digits on file, so that what is told does not hang on a float's last bit.
    found = [(round(shares[name] / working, 3), name) for name in units.THROUGHPUT if name in shares]
    at, busiest = max(found, default=(0.0, ""))
    idle = round(1 - working, 3)
    if at >= FULL:
        told = f"{units.UNITS[busiest].label}, {percent_text(at)} of its peak while SMs work"
    else:
        # Up to the next whole per cent: "nothing above" must hold.
        told = f"latency: nothing above {math.ceil(round(at * 100, 1))} % while SMs work"
        told += f", {percent_text(shares['warps'])} of the warps" if "warps" in shares else ""
    return f"{told}; no work {percent_text(idle)} of the time" if idle >= IDLE else told
