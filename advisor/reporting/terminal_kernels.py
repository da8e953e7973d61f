"""The bundled kernels in a terminal: what each takes the place of, and what became of its checks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from advisor.core.units import counted
from advisor.reporting.page import MIN_WIDTH, Page


def kernels_text(records: Sequence[Mapping[str, object]], width: int = 100, color: bool = False) -> str:
    """The bundled kernels by family: what it replaces, then each source with the start of its hash and its entries."""
    page = Page(max(width, MIN_WIDTH), color)
    lines: list[str] = []
    for family, group in itertools.groupby(records, key=lambda record: str(record["family"])):
        sources = list(group)
        lines += [*([""] if lines else []), page.heading(family, counted(len(sources), "source"))]
        lines += page.wrap(f"in place of {sources[0]['replaces']}", 4, first=2)
        longest = max(len(str(source["kernel"])) for source in sources)
        for source in sources:
            lines.append(f"  {source['kernel']!s:<{longest}}  " + page.paint(f"sha256 {source['sha256']}", "dim"))
            lines += page.wrap(str(source["entries"]), 6, "dim")
    return "\n".join(lines)


def verification_text(records: Sequence[Mapping[str, object]], width: int = 100, color: bool = False) -> str:
    """What became of kernels' cases, a line a family; each that is wrong with what is, and once why others are left to PyTorch."""
    page = Page(max(width, MIN_WIDTH), color)
    longest = max((len(str(record["family"])) for record in records), default=0)
    lines: list[str] = []
    for family, group in itertools.groupby(records, key=lambda record: str(record["family"])):
        cases = list(group)
        lines.append(f"{family:<{longest}}  " + _verdict(cases, page))
        for case in cases:
            if case["passed"] is False:
                lines += page.wrap(f"{case['case']}: {case['detail']}", 6, "red", first=4)
        for reason in dict.fromkeys(str(case["detail"]) for case in cases if case["passed"] is None):
            lines += page.wrap(reason, 6, "dim", first=4)
    return "\n".join([*lines, "", _verdict(records, page)])


def _verdict(cases: Sequence[Mapping[str, object]], page: Page) -> str:
    passed, wrong, left = (sum(case["passed"] is verdict for case in cases) for verdict in (True, False, None))
    told = [page.paint(f"{passed:,} right", "green")] if passed else []
    told += [page.paint(f"{wrong:,} wrong", "red", "bold")] if wrong else []
    told += [f"{left:,} left to PyTorch"] if left else []
    return f"{counted(len(cases), 'case')}: " + ", ".join(told)
