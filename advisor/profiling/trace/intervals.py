"""Sets of time as sorted, disjoint half-open intervals of nanoseconds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time covered by at least one of `intervals`."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> int:
    """Length of disjoint intervals together."""
    return sum(end - start for start, end in intervals)


def clip(intervals: list[Interval], start: int, end: int) -> list[Interval]:
    """The part of sorted, disjoint intervals inside [start, end)."""
    first = max(bisect_right(intervals, (start, start)) - 1, 0)
    found = []
    for a, b in intervals[first:]:
        if a >= end:
            break
        if b > start:
            found.append((max(a, start), min(b, end)))
    return found


def subtract(intervals: list[Interval], removed: list[Interval]) -> list[Interval]:
    """The part of sorted, disjoint `intervals` outside sorted, disjoint `removed`."""
    left: list[Interval] = []
    for start, end in intervals:
        position = start
        for a, b in clip(removed, start, end):
            if a > position:
                left.append((position, a))
            position = b
        if position < end:
            left.append((position, end))
    return left


def gaps(intervals: list[Interval], start: int, end: int) -> list[Interval]:
    """The time in [start, end) that sorted, disjoint intervals leave free."""
    return subtract([(start, end)], intervals) if end > start else []


def overlap_ns(intervals: Iterable[Interval]) -> int:
    """Time during which two or more of `intervals` run at once."""
    spans = [(start, end) for start, end in intervals if end > start]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    depth = covered = last = 0
    for time, change in edges:
        if depth >= 2:
            covered += time - last
        depth, last = depth + change, time
    return covered
