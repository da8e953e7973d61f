"""Which calls the bundled kernels take: the one switch over what each family's `wins` says, and counts of what came of it.

A family's kernels take a call where they support it and where measurements on file say that they win; everything else runs
PyTorch's own operation. Needs neither torch nor CuPy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

UNMEASURED = "no measurement on file"

# What a family's `wins` tells apart beside sizes: the name that its rows on file have, without sizes, and the dtype.
Kind = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Kinds that are dispatched without a row of their own on file: each is taken to do as another kind, which has one.

    In dispatch_table.json, as `like`. A test holds it to the rows (tests/kernels/test_results_on_file.py), and the page of benchmarks shows it.

    Attributes:
        names, dtypes: of the kinds, each name in each dtype, as far as `wins` takes it.
        like: name of the kind that they are taken to do as; empty: the same name, in another dtype.
        like_dtype: its dtype; empty: the same one.
        because: what speaks for it, as far as anything does.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    like: str = ""
    like_dtype: str = ""
    because: str

    @property
    def pairs(self) -> tuple[tuple[Kind, Kind], ...]:
        """Each kind, with the one that it is taken to do as."""
        return tuple(
            ((name, dtype), (self.like or name, self.like_dtype or dtype))
            for name, dtype in product(self.names, self.dtypes)
        )


def with_moments(kind: str) -> str:
    """Name of a convolution's kind with a batch norm behind it, which takes its statistics from the convolution."""
    return f"{kind}+bn"


# By family: how often the kernels ran, by variant; and why they did not, by reason. Read by the effect check and the report.
engaged: dict[str, Counter[str]] = {}
fell_back: dict[str, Counter[str]] = {}

times_forced = _none = 0


def counters(family: str) -> tuple[Counter[str], Counter[str]]:
    """The family's `engaged` and `fell_back`, the same objects at every call."""
    return engaged.setdefault(family, Counter()), fell_back.setdefault(family, Counter())


@contextmanager
def everything() -> Iterator[None]:
    """Inside, kernels take every call that they support, whether they win or not: for benchmarks, verification and tests."""
    global times_forced
    times_forced += 1
    try:
        yield
    finally:
        times_forced -= 1


@contextmanager
def nothing() -> Iterator[None]:
    """Inside, every call runs PyTorch's own operations, which kernels are held against; no counter moves."""
    global _none
    before = [(counter, counter.copy()) for counter in (*engaged.values(), *fell_back.values())]
    _none += 1
    try:
        yield
    finally:
        _none -= 1
        for counter, counts in before:
            counter.clear()
            counter.update(counts)


def refusal(unsupported: str, wins: str) -> str:
    """Why a call runs PyTorch's own operation; empty when the kernels take it.

    Args:
        unsupported: what `spec.unsupported` says, empty when the kernels can take the call.
        wins: what `spec.wins` says, empty where they are measured to be faster. Not asked inside `everything()` and `nothing()`.
    """
    return unsupported or ("held against the kernels" if _none else "" if times_forced else wins)


def forced() -> bool:
    """Whether it is inside `everything()`."""
    return times_forced > 0


def clear() -> None:
    """Set all counters to zero."""
    for counter in (*engaged.values(), *fell_back.values()):
        counter.clear()


def told(family: str, most: int = 3) -> str:
    """In words, what the counters of this family hold: "ran 106 times; 2 calls ran PyTorch's own: dtype float64"."""
    ran, not_ran = counters(family)
    text = f"the kernels ran {sum(ran.values())} times"
    if not_ran:
        reasons = ", ".join(reason for reason, _ in not_ran.most_common(most))
        text += f"; {sum(not_ran.values())} calls ran PyTorch's own: {reasons}"
    return text
