from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from advisor.profiling.trace.intervals import clip, gaps, overlap_ns, subtract, total, union

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {t for a, b in intervals for t in range(a, b)}


@given(spans)
def test_union_covers_the_same_time_without_overlap(intervals: list[tuple[int, int]]) -> None:
    merged = union(intervals)
    assert covered(merged) == covered(intervals)
    assert total(merged) == len(covered(intervals))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(spans, spans)
def test_subtract_and_clip_agree_with_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert covered(subtract(union(first), union(second))) == covered(first) - covered(second)
    assert covered(clip(union(first), 10, 40)) == covered(first) & set(range(10, 40))
    assert covered(gaps(union(first), 5, 50)) == set(range(5, 50)) - covered(first)


@given(spans)
def test_overlap_is_the_time_with_two_or_more(intervals: list[tuple[int, int]]) -> None:
    counts = [sum(a <= t < b for a, b in intervals) for t in range(60)]
    assert overlap_ns(intervals) == sum(n >= 2 for n in counts)
