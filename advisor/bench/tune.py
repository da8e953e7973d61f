"""`advisor bench tune`: the constants of a family's launches, tried in every combination on its cases, so that they can be chosen.

A family's `spec.TUNABLE` names them with the values worth trying. Nothing is changed by the result: choose, write the constant
and its reason into spec, and measure with `advisor bench ops`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from advisor.bench import ops, results
from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import dispatch, nvrtc, verify
from advisor.ops.family import Case, Family

# For one combination on one case: a difference of two per cent shows in a second on an idle H200.
COMBINATION_BUDGET_S = 1.0
ERROR_BATCH = 2
SHOWN = 8  # combinations a case, the fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One combination on one case. Times are medians in milliseconds by pass; `wrong` says why it is out of the question."""

    family: str
    case: str
    constants: dict[str, int]
    ms: dict[str, float]
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
        times = "  ".join(f"{kind} {ms:.4f} ms (±{self.spread[kind]:.0%})" for kind, ms in self.ms.items())
        return f" {mark} {constants}  {times}"


def combinations(tunable: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Every choice of one value for each name."""
    return [dict(zip(tunable, values, strict=True)) for values in itertools.product(*tunable.values())]


@contextmanager
def constants(family: Family, values: Mapping[str, int]) -> Iterator[None]:
    """Inside, the family's `spec` has these constants, and nothing that was cached with others is used.

    Raises:
        AdvisorError: when `spec` has no such constant.
    """
    spec = family.spec
    unknown = [name for name in values if not hasattr(spec, name)]
    if unknown:
        raise AdvisorError(f"{family.id}: spec has no {', '.join(unknown)}")
    before = {name: getattr(spec, name) for name in values}
    try:
        for name, value in values.items():
            setattr(spec, name, value)
        _forget(family)
        yield
    finally:
        for name, value in before.items():
            setattr(spec, name, value)
        _forget(family)


def _forget(family: Family) -> None:
    for module in (family.spec, family.module("cuda"), family.module("api")):
        for member in vars(module).values():
            clear = getattr(member, "cache_clear", None)
            if clear is not None and getattr(member, "__module__", "").startswith(f"advisor.ops.{family.id}."):
                clear()


def run(*, pattern: str, json_out: Path | None, say: Callable[[str], None]) -> int:
    """Try every combination on the cases that `pattern` chooses; print the fastest of each case; write all, case by case.

    Raises:
        AdvisorError: without a GPU (exit code 5), or when `pattern` matches nothing.
    """
    cases = ops.chosen(pattern)
    reason = nvrtc.unavailable()
    if reason:
        raise AdvisorError(f"no tuning here: {reason}", exit_code=ExitCode.GPU_REQUIRED)
    done: list[Trial] = []
    say("compiling")
    nvrtc.warm(_variants(cases))
    for number, (family, case) in enumerate(cases):
        say(f"tuning {family.id}: case {number + 1} of {len(cases)}")
        trials = tune(family, case)
        print(f"{family.id} {case.label}", *(trial.line() for trial in trials[:SHOWN]), sep="\n", flush=True)
        done += trials
        if json_out is not None:
            results.write(json_out, "tuning", [asdict(trial) for trial in done])
    return ExitCode.OK


def _variants(cases: Sequence[tuple[Family, Case]]) -> Iterator[tuple[str, dict[str, int]]]:
    """What the cases may ask for under each combination."""
    for family in dict.fromkeys(family for family, _ in cases):
        for values in combinations(family.spec.TUNABLE):
            with constants(family, values):
                yield from family.variants(nvrtc.arch(0))


def tune(family: Family, case: Case) -> list[Trial]:
    """Every combination on one case, the fastest first; those that fail or compute something else come last, with the reason."""
    present = {name: getattr(family.spec, name) for name in family.spec.TUNABLE}
    trials = []
    for values in combinations(family.spec.TUNABLE):
        ms: dict[str, float] = {}
        spread: dict[str, float] = {}
        try:
            with dispatch.everything(), constants(family, values):
                wrong = _wrong(family, case)
                if not wrong:
                    times, _ = ops.timed(case, compiled=False, budget_s=COMBINATION_BUDGET_S, only_advisor=True)
                    ms = {kind: found["advisor"].median for kind, found in times.items()}
                    spread = {
                        kind: (found["advisor"].p90 - found["advisor"].p10) / found["advisor"].median
                        for kind, found in times.items()
                    }
        except Exception as error:  # more threads than registers allow, or more shared memory than there is
            wrong = f"{type(error).__name__}: {error}".splitlines()[0]
        trials.append(
            Trial(
                family=family.id,
                case=case.label,
                constants=values,
                ms=ms,
                spread=spread,
                present=values == present,
                wrong=wrong,
            )
        )
    return sorted(trials, key=lambda trial: trial.total_ms)


def _wrong(family: Family, case: Case) -> str:
    before = sum(family.engaged.values())
    batch = min(case.shape[0], ERROR_BATCH)
    mine, theirs = verify.errors(case, (case.ours, case.eager), ops.DEVICE, batch=batch, seed=1)
    if sum(family.engaged.values()) == before:
        return dispatch.told(family.id)
    return verify.accepted(case.dtype, mine, theirs)
