"""Which changes are put on together, first of all, and what is tried next where they do not hold together. Pure.

Tried one by one, each change pays for its own capture, check, warm-up and blocks, and a search of some minutes ends after three. What
is recommended and fits together is therefore tried as one. Where that is wrong, has no effect or is not faster, one class of
changes at a time is left out: first what is most often to blame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from advisor.core.findings import Recommendation
from advisor.core.transform_row import TOGETHER, Part
from advisor.core.transform_table import row
from advisor.core.verdict import Status, Verdict
from advisor.trials import planner

# In the order in which a proved whole loses them.
LEFT_OUT: tuple[Part, ...] = ("precision", "kernels", "graphs", "layout")
# And in which a whole that does not hold in the running loop is tried without them: first what is most often to blame, alone and then with
# the next, since where two are to blame leaving out either one would tell nothing.
WITHOUT: tuple[tuple[Part, ...], ...] = (
    ("precision",),
    ("precision", "kernels"),
    ("kernels",),
    ("precision", "kernels", "graphs"),
    ("graphs",),
    ("layout",),
)
# Where the numbers of the whole are off by `GROSS` times what is allowed or more, no rounding does that: a gradient that a replayed graph
# does not write is off by all of it.
GROSS = 3.0
WITHOUT_AT_GROSS: tuple[tuple[Part, ...], ...] = (
    ("graphs",),
    ("kernels",),
    ("kernels", "graphs"),
    ("layout",),
    ("precision",),
    ("precision", "kernels", "graphs"),
)
# Where the whole finds no memory graphs hold the most, and half precision takes less than the step had.
FULL = "out of memory"
WITHOUT_WHEN_FULL: tuple[tuple[Part, ...], ...] = (("graphs",), ("kernels", "graphs"), ("layout", "graphs"), *WITHOUT)


def members(
    candidates: Sequence[Recommendation], *, graphs_fit: bool = True, nhwc: bool = True
) -> tuple[Recommendation, ...]:
    """Of these, in order, what is put on together. The surest of rivals is the one with the larger prediction.

    Where the model is not in NHWC by itself (`nhwc`), kernels that need it bring channels_last.

    Left for later: what has parameters, what only fresh processes can try, what takes minutes to make (a compiler), changes for
    models that run without gradients, and CUDA graphs where memory does not hold them beside the step (`graphs_fit`).
    """
    wanted = [c for c in candidates if kind(c) and not c.parameters and _promises(c)]
    if not graphs_fit:
        wanted = [c for c in wanted if c.transform != planner.GRAPHS]
    names = {c.transform for c in wanted}
    if "amp_bf16" in names:  # the same rate, with more range
        wanted = [c for c in wanted if c.transform != "amp_fp16"]
    if names & planner.HALF:  # what half precision leaves in fp32 are small sums
        wanted = [c for c in wanted if c.transform != "tf32"]
    chosen: list[Recommendation] = []
    for candidate in sorted(wanted, key=lambda c: -planner.expected(c)):
        if not planner.rivals(candidate, chosen):
            chosen.append(candidate)
    return planner.with_layout(tuple(c for c in candidates if c in chosen), candidates, nhwc=nhwc)


def attempts(
    candidates: Sequence[Recommendation],
    *,
    graphs_fit: bool = True,
    nhwc: bool = True,
    without: Sequence[tuple[Part, ...]] = WITHOUT,
) -> Iterator[tuple[Recommendation, ...]]:
    """What is tried as one, in order, until one of these is kept: everything, then everything without one class or more.

    `without`: which, in order, as `to_leave_out` has it. Without layout there are no kernels either that need it, unless the model is in
    NHWC by itself (`nhwc`).
    """
    whole = members(candidates, graphs_fit=graphs_fit, nhwc=nhwc)
    if len(whole) > 1:
        yield whole
    tried = [whole]
    for left_out in without:
        without_nhwc = "layout" in left_out and not nhwc
        rest = tuple(
            c for c in whole if kind(c) not in left_out and not (without_nhwc and c.transform in planner.IN_NHWC)
        )
        if len(rest) > 1 and rest not in tried:
            tried.append(rest)
            yield rest


def to_leave_out(verdicts: Sequence[Verdict]) -> Sequence[tuple[Part, ...]]:
    """In which order the whole is tried with less, by what it came to."""
    if any(map(gross, verdicts)):
        return WITHOUT_AT_GROSS
    full = any(TOGETHER in v.transform and v.status == Status.FAILED and FULL in v.reason for v in verdicts)
    return WITHOUT_WHEN_FULL if full else WITHOUT


def gross(verdict: Verdict) -> bool:
    """Whether it says of several as one that their numbers are far off."""
    numerics = verdict.numerics
    if TOGETHER not in verdict.transform or numerics is None or numerics.passed is not False:
        return False
    return numerics.numbers.get("of_bound", 0.0) >= GROSS


def kind(candidate: Recommendation) -> Part:
    """The part of the whole that it is left out with; "" for what is never tried with others of other parts."""
    return kind_of(candidate.transform)


def kind_of(transform: str) -> Part:
    """As `kind`, of a transform's id."""
    return "" if TOGETHER in transform else row(transform).part


def _promises(candidate: Recommendation) -> bool:
    return candidate.predicted is None or candidate.predicted.high > 0.0
