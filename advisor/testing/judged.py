"""A measured step, and how a quantity of it is held to a bound or a baseline. Each failure names who is at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from advisor import analysis
from advisor.core.errors import AdvisorError
from advisor.core.metrics import MetricTable
from advisor.core.profile import StepProfile
from advisor.core.provenance import Provenance
from advisor.testing import amounts, baselines
from advisor.testing.baselines import BaselineEntry, Machine, Stored
from advisor.testing.quantities import (
    BY_KEY,
    Beyond,
    Culprit,
    JudgedQuantity,
    JudgedStep,
    Reading,
)

if TYPE_CHECKING:
    from advisor.testing.live import LiveStep

SHOWN = 5  # culprits in a message


class CannotJudge(AssertionError):
    """The measurement does not hold what the assertion asks for. Never a pass: the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedBudget:
    """One bound that a measurement was held to. bound: max, min, or check for a yes or no without numbers. `note` says of a value
    that it is not measured, and of a limit whose it is, if not the test's.
    """

    title: str
    unit: str
    value: float
    limit: float
    bound: str
    passed: bool
    note: str = ""

    @property
    def used(self) -> float | None:
        """Share of the budget that is used; 1 is at the limit. None for a limit of zero."""
        if self.bound == "min":
            return self.limit / self.value if self.value else None
        return self.value / self.limit if self.limit else None


class Judged:
    """One step as it was measured, held to what is asked of it: see `measured.Measured`, which asks."""

    def __init__(
        self,
        profile: StepProfile,
        *,
        label: str = "",
        beyond: Beyond | None = None,
        live: LiveStep | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.label, self.seconds = label, seconds
        self._step = JudgedStep(profile=profile, metrics=analysis.metrics(profile), beyond=beyond or Beyond())
        self._live = live
        self.budgets: list[JudgedBudget] = []

    @property
    def profile(self) -> StepProfile:
        """Everything measured, as plain data."""
        return self._step.profile

    @property
    def metrics(self) -> MetricTable:
        """Every metric of `advisor.core.metrics`."""
        return self._step.metrics

    @property
    def machine(self) -> Machine:
        """The fingerprint of the machine it was measured on."""
        return Machine.of(self.profile.environment)

    @property
    def entry(self) -> BaselineEntry:
        """What a baseline stores of it."""
        return BaselineEntry.of(self.label, self._step)

    def reading(self, key: str) -> Reading:
        """A quantity by its key (`kernels`, `memory`, …), with its provenance, or the reason why it is not known."""
        return BY_KEY[key].read(self._step)

    def worse_than(self, entry: BaselineEntry, name: str, key: str) -> list[str]:
        """The message that a quantity is worse than a baseline's, as a list of one."""
        quantity = BY_KEY[key]
        value, old = quantity.read(self._step).value or 0.0, entry.values[key]
        return ["\n".join(self._worse(quantity, value, old, entry, f"baseline {name!r}"))]

    # -- how a bound is held ------------------------------------------------------------------------------------------

    def other_device(self, stored: Stored) -> str:
        """Why nothing at all can be compared with the baseline: operators of a CPU are no kernels of a GPU. "" if it can."""
        here, there = self.machine.device, stored.machine.device if stored.machine is not None else ""
        if not there or here == there:
            return ""
        return f"baseline {stored.name!r} is of a step on {there}, this one ran on {here}: the two cannot be compared"

    def _hold(
        self,
        key: str,
        bounds: dict[str, Any],
        reading: Reading | None = None,
        culprits: list[Culprit] | None = None,
    ) -> None:
        __tracebackhide__ = True
        quantity = BY_KEY[key]
        unknown = set(bounds) - {"max", "min", "baseline", "tolerance"}
        if unknown:
            raise TypeError(f"unknown argument {sorted(unknown)[0]!r}; known are max, min, baseline and tolerance")
        if all(bounds.get(bound) is None for bound in ("max", "min", "baseline")):
            raise AdvisorError(f"{quantity.title}: nothing to hold it to", fix="Give max=, min= or baseline=.")
        reading = reading or quantity.read(self._step)
        if reading.value is None:
            raise CannotJudge(f"{quantity.title} is not known: {reading.reason}")
        if culprits is None:
            culprits = quantity.blame(self._step)
        for bound in ("max", "min"):
            if bounds.get(bound) is not None:
                limit = amounts.parse(bounds[bound], quantity.unit, f"{bound} of {quantity.title}")
                self._bound(quantity.title, quantity.unit, reading.value, limit, bound, culprits, reading, quantity.per)
        stored = bounds.get("baseline")
        if stored is not None:
            if not isinstance(stored, Stored):
                raise AdvisorError(f"baseline={stored!r}", expected="what the perf_baseline fixture returns")
            if problem := self.other_device(stored):
                raise CannotJudge(problem)
            tolerance = bounds.get("tolerance")
            share = None if tolerance is None else amounts.share(tolerance)
            if quantity.timed:
                raise CannotJudge(f"{quantity.title} is held to no baseline: {baselines.NEVER_TIMES}")
            self._against(quantity, reading, stored, share)

    def _against(self, quantity: JudgedQuantity, reading: Reading, stored: Stored, tolerance: float | None) -> None:
        __tracebackhide__ = True
        entry = stored.entry(self.label)
        if entry is None:
            return  # this run records it
        if quantity.key not in entry.values:
            raise CannotJudge(f"{quantity.title} is not in baseline {stored.name!r}")
        known = entry.provenance.get(quantity.key, "")
        if known != reading.provenance.value:
            raise CannotJudge(
                f"{quantity.title} is {reading.provenance.value} here and {known} in baseline {stored.name!r}: "
                "the two cannot be compared"
            )
        share = quantity.tolerance if tolerance is None else tolerance
        value, old = reading.value or 0.0, entry.values[quantity.key]
        limit = old * (1 - share) if quantity.more_is_better else old * (1 + share)
        past = baselines.compared(quantity, value, old, share)
        bound, name = "min" if quantity.more_is_better else "max", f"baseline {stored.name!r}"
        self._record(quantity.title, quantity.unit, value, limit, bound, past <= 0, _notes(reading, name))
        if past > 0:
            where = f"{name} ({share:.1%} tolerated)"
            raise AssertionError("\n".join(self._worse(quantity, value, old, entry, where)))

    def _worse(self, quantity: JudgedQuantity, value: float, old: float, entry: BaselineEntry, where: str) -> list[str]:
        unit = quantity.unit
        head = f"{quantity.title}: {amounts.text(value, unit)}{quantity.per}, {amounts.text(old, unit)} in {where}"
        changed = self._changed(quantity, entry)
        if changed:
            return [head, *_listed("what is more than there:", changed, unit)]
        return [head, *_listed("most of it:", quantity.blame(self._step), unit)]

    def _changed(self, quantity: JudgedQuantity, entry: BaselineEntry) -> list[Culprit]:
        """Kernels with more of the quantity than the baseline has; source lines move, so they are not compared."""
        column = {"kernels": "calls", "launches": "calls", "layouts": "calls", "dram": "bytes"}.get(quantity.key)
        if column is None:
            return []
        layouts = quantity.key == "layouts"
        old: dict[tuple[str, str], float] = {}
        for row in entry.rows:
            key = (row.what, row.module)
            old[key] = old.get(key, 0.0) + getattr(row, column)
        named = {(c.what, c.module) for c in quantity.blame(self._step)}
        new: dict[tuple[str, str], float] = {}
        source: dict[tuple[str, str], str] = {}
        for row in self.entry.rows:
            key = (row.what, row.module)
            new[key] = new.get(key, 0.0) + getattr(row, column)
            source.setdefault(key, row.source)
        found = [
            Culprit(what=key[0], module=key[1], source=source[key], amount=new[key] - old.get(key, 0.0))
            for key in new
            if new[key] > old.get(key, 0.0) and (not layouts or key in named)
        ]
        return sorted(found, key=lambda culprit: -culprit.amount)

    def _bound(
        self,
        title: str,
        unit: str,
        value: float,
        limit: float,
        bound: str,
        culprits: list[Culprit],
        reading: Reading | None = None,
        per: str = " a step",
    ) -> None:
        __tracebackhide__ = True
        passed = value <= limit if bound == "max" else value >= limit
        self._record(title, unit, value, limit, bound, passed, _notes(reading))
        if passed:
            return
        provenance = ""
        if reading is not None and (reading.provenance is not Provenance.MEASURED or reading.reason):
            told = [reading.reason] if reading.reason else []
            told = [reading.provenance.value, *told] if reading.provenance is not Provenance.MEASURED else told
            provenance = f" [{', '.join(told)}]"
        wanted = "at most" if bound == "max" else "at least"
        lines = [f"{title}: {amounts.text(value, unit)}{per}, {wanted} {amounts.text(limit, unit)} wanted{provenance}"]
        lines += _listed("at fault:" if bound == "min" or limit == 0 else "most of it:", culprits, unit)
        lines += [f"  note: {note}" for note in self.profile.notes if "source lines" in note]
        raise AssertionError("\n".join(lines))

    def _record(
        self, title: str, unit: str, value: float, limit: float, bound: str, passed: bool, note: str = ""
    ) -> None:
        """Note what was held to what; a bound that the marker and the test both ask about, or a loop, is one."""
        found = JudgedBudget(title=title, unit=unit, value=value, limit=limit, bound=bound, passed=passed, note=note)
        if found not in self.budgets:
            self.budgets.append(found)

    def _judge_check(self, title: str, passed: bool | None, detail: str) -> None:
        __tracebackhide__ = True
        if passed is None:
            raise CannotJudge(f"{title} cannot be judged: {detail}")
        self._record(title, "count", float(passed), 1.0, "check", passed)
        if not passed:
            raise AssertionError(f"{title}: {detail}")

    def _traced(self, what: str) -> tuple[Any, ...]:
        if not self.profile.cost.traced_steps or not self.profile.kernels:
            raise CannotJudge(f"{what} are not known: " + ("; ".join(self.profile.notes) or "nothing was traced"))
        return self.profile.kernels

    def _alive(self, what: str) -> LiveStep:
        if self._live is None:
            raise CannotJudge(f"{what} cannot be judged of a script: it ran in a process of its own, which has ended")
        return self._live


def _notes(reading: Reading | None, *more: str) -> str:
    """How the value is known, if not measured, and what else is to be told of a bound."""
    known = "" if reading is None or reading.provenance is Provenance.MEASURED else reading.provenance.value
    return ", ".join(note for note in (known, *more) if note)


def _listed(head: str, culprits: Sequence[Culprit], unit: str) -> list[str]:
    if not culprits:
        return []
    rest = len(culprits) - SHOWN
    return [
        head,
        *(f"  {culprit.text(unit)}" for culprit in culprits[:SHOWN]),
        *([f"  and {rest} more"] if rest > 0 else []),
    ]
