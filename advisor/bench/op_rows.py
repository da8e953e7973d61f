"""Rows of `bench ops`: what each says, which are on file, and which cases a run is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from advisor.bench import goals
from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.ops import catalog, family
from advisor.ops.family import Case, Family
from advisor.ops.moments_cases import APART

# Inductor compiles anew for each shape and dtype, seconds each: it is asked in the dtype in which training happens most.
COMPILED_DTYPES = ("bfloat16",)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One measurement. Times are medians in milliseconds; `spread` is (p90 - p10) / median of advisor's own."""

    name: str
    pass_: str  # forward, backward
    shape: tuple[int, ...]
    dtype: str
    layout: str
    advisor_ms: float
    eager_ms: float
    compile_ms: float | None
    limit_ms: float
    spread: float
    eager_spread: float
    n: int
    advisor_host_us: float  # host time of the call itself
    eager_host_us: float
    error: float
    baseline_error: float
    kernel_sha: str
    torch: str
    date: str
    # Most device memory in use in the pass beyond its inputs: in the forward with what it keeps for the backward.
    advisor_peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    host_date: str = ""  # of the host's times, where they were taken after the rest (`--host-only`)
    # Of each hardware unit's peak the share that advisor's kernels use, where it was counted: see units.py.
    units: dict[str, float] | None = None

    def _named(self) -> str:
        return f"{self.name:24} {self.pass_:8} {self.dtype:8} {'x'.join(map(str, self.shape)):18}"

    def line(self) -> str:
        """What is printed of it."""
        text = (
            f"{self._named()} {self.advisor_ms:8.4f} ms  "
            f"limit/ours {self.limit_ms / self.advisor_ms:4.2f}  eager/ours {self.eager_ms / self.advisor_ms:5.2f}"
        )
        if self.advisor_peak_bytes is not None and self.eager_peak_bytes:
            text += f"  memory {self.advisor_peak_bytes / self.eager_peak_bytes:4.2f}"
        if self.compile_ms is not None:
            text += f"  compile/ours {self.compile_ms / self.advisor_ms:5.2f}"
        return text

    def host_line(self) -> str:
        """What is printed of its host's times."""
        return (
            f"{self._named()} host {self.advisor_host_us:5.0f} us  "
            f"eager {self.eager_host_us:5.0f} us  {self.advisor_host_us - self.eager_host_us:+5.0f}"
        )


Key = tuple[str, str, tuple[int, ...], str]


def key(row: Mapping[str, Any]) -> Key:
    """What a row on file is the measurement of: name, pass, shape, dtype."""
    return row["name"], row["pass"], tuple(row["shape"]), row["dtype"]


def keys(case: Case) -> tuple[Key, ...]:
    """The rows that a case gives."""
    return tuple((case.name, kind, case.shape, case.dtype) for kind in case.passes)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], known: Sequence[Key]) -> list[dict[str, Any]]:
    """`new` in the place of `old` rows of the same key, in the order of `known`; rows of cases that are gone are dropped."""
    by_key = {key(row): row for row in (*old, *new)}
    return [by_key[k] for k in dict.fromkeys(known) if k in by_key]


def chosen(pattern: str) -> list[tuple[Family, Case]]:
    """Benchmark cases whose family and label ("batchnorm_act bn+relu bfloat16 256x64x112x112") hold all words of `pattern`.

    Raises:
        AdvisorError: when there is none.
    """
    words = pattern.split()
    found = [
        (kind, case)
        for kind in catalog.FAMILIES
        for case in kind.benchmark
        if all(word in f"{kind.id} {case.label}" for word in words)
    ]
    if not found:
        raise AdvisorError(
            f"nothing is named like {pattern!r}", expected="a family, or words of a name such as bn+relu"
        )
    return found


def outdated(
    cases: Sequence[tuple[Family, Case]], rows: Sequence[Mapping[str, Any]], baselines: Sequence[str] = ("eager",)
) -> list[tuple[Family, Case]]:
    """Of these cases those of which a row is missing or lacks one of `baselines`, or whose kernels have changed since it was measured.

    And with each its counterpart: one case made together and apart is compared with itself, which two runs or machines cannot tell.
    """
    measured = {(*key(row), row["kernel_sha"]) for row in rows}
    beside = {(*key(row), row["kernel_sha"]) for row in rows if row["compile_ms"] is not None}
    missing = {
        _together(case)
        for _, case in cases
        if any(
            (*row, family.kernel_sha(work)) not in (beside if is_compiled(case, baselines) else measured)
            for row, work in zip(keys(case), case.passes.values(), strict=True)
        )
    }
    return [(kind, case) for kind, case in cases if _together(case) in missing]


def _together(case: Case) -> tuple[object, ...]:
    return case.name.removesuffix(APART), case.shape, case.dtype


def is_compiled(case: Case, baselines: Sequence[str]) -> bool:
    """Whether torch.compile is measured beside it: of two counterparts, which PyTorch makes alike, once."""
    return "compile" in baselines and case.dtype in COMPILED_DTYPES and not case.name.endswith(APART)


def parted(cases: Sequence[tuple[Family, Case]], part: tuple[int, int]) -> list[tuple[Family, Case]]:
    """Part `part[0]`, from 1 on, of `part[1]`: each `part[1]`-th case, with its counterpart (see `outdated`).

    Which that is depends on no results: parts that begin one after the other, and see each other's rows, leave nothing out.
    """
    number, parts = part
    place = {key: index for index, key in enumerate(dict.fromkeys(_together(case) for _, case in cases))}
    return [(kind, case) for kind, case in cases if place[_together(case)] % parts == number - 1]


def short(cases: Sequence[tuple[Family, Case]], rows: Sequence[Mapping[str, Any]]) -> list[tuple[Family, Case]]:
    """Of these cases those that `rows` show short of a goal."""
    measured = {key(row): row for row in rows}
    return [
        (kind, case)
        for kind, case in cases
        if any(goals.missed(kind.id, case, measured[k]) for k in keys(case) if k in measured)
    ]


def uncounted(
    cases: Sequence[tuple[Family, Case]], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[Family, Case, list[OpRow]]]:
    """Of these cases those with a row that has no units' shares, each with its rows."""
    measured = {key(row): row for row in rows}
    found = [(kind, case, [measured[k] for k in keys(case) if k in measured]) for kind, case in cases]
    return [
        (kind, case, [storage.from_plain(OpRow, row) for row in of])
        for kind, case, of in found
        if any(row.get("units") is None for row in of)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """Which cases are asked for: by `pattern`, of those with `changed` only what is `outdated` on file, with `short_only` what is `short` of a
    goal there; of all that the `part`.
    """

    pattern: str = ""
    changed: bool = False
    short_only: bool = False
    part: tuple[int, int] = (1, 1)

    def left(
        self,
        rows: Sequence[Mapping[str, Any]],
        baselines: Sequence[str],
        *,
        counters: bool = False,
        host_only: bool = False,
    ) -> Left:
        """What is to be done, given these rows on file.

        Raises:
            AdvisorError: when `pattern` matches nothing.
        """
        cases = parted(chosen(self.pattern), self.part)
        again = self.changed or host_only
        stale = outdated(cases, rows, baselines if self.changed else ("eager",)) if again else cases
        if self.short_only:
            cases = short(cases, rows)
            if not cases:
                return Left(why_nothing="no row is short of a goal")
        current = [one for one in cases if one not in stale]
        only_count = uncounted(current, rows) if counters else []
        if host_only:
            return Left(current, only_count, "" if current else "no row is of the kernels as they are")
        if self.changed:
            cases = [one for one in cases if one in stale]
            if not cases and not only_count:
                also = ", counted" if counters else ""
                why = f"every row is of the kernels as they are, beside {' and '.join(baselines)}{also}"
                return Left(why_nothing=why)
        return Left(cases, only_count)


@dataclass(frozen=True, slots=True)
class Left:
    """Cases to be timed, and those with rows that are only to be counted; or why there are neither."""

    cases: Sequence[tuple[Family, Case]] = ()
    only_count: Sequence[tuple[Family, Case, list[OpRow]]] = ()
    why_nothing: str = ""
