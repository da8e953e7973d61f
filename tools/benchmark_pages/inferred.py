"""The page's sections on dispatch: which kinds of call run our kernels without a row of their own on file, and what is asked of size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from advisor.core.units import bytes_text, shape_text
from advisor.ops import storage
from advisor.ops.family import Family
from benchmark_pages.gaps import Measured

_TEXT = """## Dispatched without a row of their own

What is dispatched is measured here, or inferred from a kind that is. Each kind of call without a row is below, by dtype, with the kind
that stands for it and the reason. The list is `like` in `advisor/ops/dispatch_table.json`, next to what the rows show. A test holds both to
the rows.
"""

_SIZES = """### Sizes

What the table asks of a call's size. Within that a family is dispatched at every size that its kernels support, also larger and smaller than
the sizes on file. By family: kinds dispatched, kinds with rows, and the smallest input among the cases measured and dispatched.
"""


def section(families: Sequence[tuple[Family, Measured]]) -> str:
    """In Markdown: a line for each of the lists' entries, and one a family on sizes."""
    return _inferred(families) + "\n" + _sizes(families)


def _inferred(families: Sequence[tuple[Family, Measured]]) -> str:
    lines = [_TEXT, "| family | kind | dtype | inferred from | because |", "|---|---|---|---|---|"]
    for family, _ in families:
        for entry in family.inferred:
            like = " ".join(filter(None, (entry.like or "the same", entry.like_dtype and f"in {entry.like_dtype}")))
            lines.append(
                f"| {family.id} | {'; '.join(entry.names)} | {', '.join(entry.dtypes)} | {like} | {entry.because} |"
            )
    return "\n".join(lines) + "\n"


def _sizes(families: Sequence[tuple[Family, Measured]]) -> str:
    lines = [_SIZES, "| family | asked | kinds | on file | smallest dispatched | |", "|---|---|---:|---:|---|---:|"]
    for family, cases in families:
        won = [case for case, rows in cases if rows and case.kind and not case.wins()]
        on_file = {(case.kind, case.dtype) for case in won}
        smallest = "– | –"
        if won:
            nbytes, case = min(
                ((math.prod(case.shape) * storage.itemsize(case.dtype), case) for case in won),
                key=lambda found: found[0],
            )
            smallest = f"{case.name} {case.dtype} {shape_text(case.shape)} | {bytes_text(nbytes)}"
        asked = "; ".join(entry.text for entry in family.sizes if entry.text) or "nothing"
        lines.append(f"| {family.id} | {asked} | {len(family.kinds)} | {len(on_file & family.kinds)} | {smallest} |")
    return "\n".join(lines) + "\n"
