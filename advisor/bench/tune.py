"""`advisor bench tune`: the constants of a family's launches, tried in every combination on its cases, so that they can be chosen.

A family's `spec.TUNABLE` names them with the values worth trying. Combinations take turns, a few at a time and the present one in each of
these groups, so that what the GPU does meanwhile falls on all alike. Nothing is changed by the result: choose, write the constant and its
reason into spec, and measure with `advisor bench ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from advisor.bench import op_rows, ops, results, timing
from advisor.core.errors import AdvisorError, ExitCode, first_line
from advisor.core.profile import Spread
from advisor.ops import dispatch, nvrtc, verify
from advisor.ops.family import Case, Family

# For one combination on one pass of a case: a difference of a per cent shows in half a second on an idle H200.
PASS_BUDGET_S = 0.5
AT_ONCE = 8  # combinations that take turns: each keeps what its backward needs
ERROR_BATCH = 2
SHOWN = 8  # combinations a case, the fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTrial:
    """One combination on one case. Times are medians in milliseconds by pass; `wrong` says why it is out of the question.

    `share`: of the present combination's time, by turns with it; empty where that does not run. `ms` is that share of its time.
    """

    family: str
    case: str
    constants: dict[str, int]
    ms: dict[str, float]
    share: dict[str, float]
    spread: dict[str, float]
    present: bool
    wrong: str = ""

    @property
    def total_ms(self) -> float:
        """All passes together."""
        return sum(self.ms.values()) if not self.wrong else float("inf")

    def line(self) -> str:
        """What is printed of it."""
        constants = " ".join(f"{name}={value}" for name, value in self.constants.items())
        mark = "*" if self.present else " "
        if self.wrong:
            return f" {mark} {constants}  {self.wrong}"
        times = "  ".join(
            f"{kind} {ms:.4f} ms"
            + (f" {self.share[kind]:.3f} x" if self.share else "")
            + f" (±{self.spread[kind]:.0%})"
            for kind, ms in self.ms.items()
        )
        return f" {mark} {constants}  {times}"


def combinations(tunable: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every choice of one value for each name."""
    return [dict(zip(tunable, values, strict=True)) for values in itertools.product(*tunable.values())]


class Setting:
    """A family's constants, and of what the family keeps by call (plans, geometries) the part that was made with them.

    Inside, the family's `spec` has these constants. Entered again, it finds what it has made: that may be done call by call.

    Raises:
        AdvisorError: when `spec` has no such constant.
    """

    def __init__(self, family: Family, values: Mapping[str, int]) -> None:
        spec = family.spec
        unknown = [name for name in values if not hasattr(spec, name)]
        if unknown:
            raise AdvisorError(f"{family.id}: spec has no {', '.join(unknown)}")
        self._inside: list[tuple[Any, str, Any]] = [(spec, name, value) for name, value in values.items()]
        for module in (spec, family.module("cuda"), family.module("api")):
            for name, member in vars(module).items():
                if hasattr(member, "cache_clear") and member.__module__.startswith(f"advisor.ops.{family.id}."):
                    size = member.cache_parameters()["maxsize"]
                    self._inside.append((module, name, lru_cache(maxsize=size)(member.__wrapped__)))
        self._outside: list[list[tuple[Any, str, Any]]] = []  # one for each time it was entered

    def __enter__(self) -> None:
        self._outside.append([(module, name, getattr(module, name)) for module, name, _ in self._inside])
        for module, name, value in self._inside:
            setattr(module, name, value)

    def __exit__(self, *_: object) -> None:
        for module, name, value in self._outside.pop():
            setattr(module, name, value)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, made inside."""

        def inside(*arguments: Any) -> Any:
            with self:
                return call(*arguments)

        return inside


def run(*, pattern: str, out: Path | None, say: Callable[[str], None]) -> int:
    """Try every combination on the cases that `pattern` chooses; print the fastest of each case; write all, case by case.

    Raises:
        AdvisorError: without a GPU (exit code 5), or when `pattern` matches nothing.
    """
    cases = op_rows.chosen(pattern)
    reason = nvrtc.unavailable()
    if reason:
        raise AdvisorError(f"no tuning here: {reason}", exit_code=ExitCode.GPU_REQUIRED)
    done: list[TunedTrial] = []
    say("compiling")
    nvrtc.warm(_variants(cases))
    for number, (family, case) in enumerate(cases):
        say(f"tuning {family.id}: case {number + 1} of {len(cases)}")
        trials = tune(family, case)
        print(f"{family.id} {case.label}", *(trial.line() for trial in trials[:SHOWN]), sep="\n", flush=True)
        done += trials
        if out is not None:
            results.write(out, "tuning", [asdict(trial) for trial in done])
    return ExitCode.OK


def _variants(cases: Sequence[tuple[Family, Case]]) -> Iterator[tuple[str, dict[str, int]]]:
    """What the cases may ask for under each combination."""
    for family in dict.fromkeys(family for family, _ in cases):
        for values in combinations(family.spec.TUNABLE):
            with Setting(family, values):
                yield from family.variants(nvrtc.arch(0))


Times = dict[str, Spread]  # by pass


@dataclass(slots=True)
class _Tried:
    """A combination, and what came of it: times of the first group it was in, and its share of the present one's in the last."""

    values: dict[str, int]
    setting: Setting
    wrong: str
    times: Times = field(default_factory=dict)
    share: dict[str, float] = field(default_factory=dict)


def tune(family: Family, case: Case) -> list[TunedTrial]:
    """Every combination on one case, the fastest first; those that fail or compute something else come last, with the reason."""
    now = {name: getattr(family.spec, name) for name in family.spec.TUNABLE}
    tried = []
    for values in combinations(family.spec.TUNABLE):
        setting = Setting(family, values)
        tried.append(_Tried(values, setting, what_is_wrong(family, case, setting)))
    present = next((one for one in tried if one.values == now and not one.wrong), None)
    others = [one for one in tried if one is not present and not one.wrong]
    step = AT_ONCE - 1
    for begin in range(0, max(1, len(others)), step):
        _take_turns(case, present, others[begin : begin + step])
    trials = [
        TunedTrial(
            family=family.id,
            case=case.label,
            constants=one.values,
            ms={
                kind: one.share[kind] * (present or one).times[kind].median if one.share else spread.median
                for kind, spread in one.times.items()
            },
            share=one.share,
            spread={kind: (spread.p90 - spread.p10) / spread.median for kind, spread in one.times.items()},
            present=one.values == now,
            wrong=one.wrong,
        )
        for one in tried
    ]
    return sorted(trials, key=lambda trial: trial.total_ms)


def _take_turns(case: Case, present: _Tried | None, others: Sequence[_Tried]) -> None:
    """Time them by turns. Where that fails, of memory most likely, the others are wrong."""
    group = [*([present] if present else []), *others]
    if not group:
        return
    named = {str(i): one for i, one in enumerate(group)}
    found: dict[str, Times] = {name: {} for name in named}
    try:
        with dispatch.everything():
            for way, runs, sets in ops.contests(
                case, {name: one.setting.around(case.ours) for name, one in named.items()}
            ):
                inside = {name: one.setting.around(runs[name]) for name, one in named.items()}
                for name, spread in timing.interleaved(inside, sets, budget_s=PASS_BUDGET_S * len(group)).items():
                    found[name][way] = spread
    except Exception as error:
        for one in others:
            one.wrong = first_line(error)
        return
    for name, one in named.items():
        one.times = one.times or found[name]
        if present:
            one.share = {way: spread.median / found["0"][way].median for way, spread in found[name].items()}


def what_is_wrong(family: Family, case: Case, setting: Setting) -> str:
    """Why this setting is out of the question for the case; empty where it is not."""
    before = sum(family.engaged.values())
    batch = min(case.shape[0], ERROR_BATCH)
    try:
        with dispatch.everything(), setting:
            mine, theirs = verify.errors(case, (case.ours, case.eager), ops.DEVICE, batch=batch, seed=1)
    except Exception as error:  # more threads than registers allow, or more shared memory than there is
        return first_line(error)
    if sum(family.engaged.values()) == before:
        return dispatch.told(family.id)
    return verify.accepted(case.dtype, mine, theirs)
