"""Which of many alike cases run always."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def covering(cases: Sequence[Mapping[str, int]]) -> set[int]:
    """Numbers of cases, each {parameter: what tells its value}, in which all values come: few, and values as evenly as may be."""
    kept: set[int] = set()
    left = {value for case in cases for value in case.items()}
    used: Counter[tuple[str, int]] = Counter()
    while left:
        gains = [(len(left & set(case.items())), -sum(used[v] for v in case.items())) for case in cases]
        best = gains.index(max(gains))
        kept.add(best)
        used.update(cases[best].items())
        left -= set(cases[best].items())
    return kept
