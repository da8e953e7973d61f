"""A measured step and what can be asserted of it. Each failure names the kernels, modules and source lines at fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor import analysis
from advisor.analysis import sync
from advisor.core.errors import AdvisorError
from advisor.core.metrics import MetricTable
from advisor.core.profile import StepProfile
from advisor.core.provenance import Provenance
from advisor.testing import amounts, baselines
from advisor.testing.amounts import Amount
from advisor.testing.baselines import Entry, Machine, Stored
from advisor.testing.quantities import (
    BY_KEY,
    QUANTITIES,
    Beyond,
    Culprit,
    Quantity,
    Reading,
    Step,
    grouped,
    host_syncs,
    sync_culprits,
)

if TYPE_CHECKING:
    from advisor.testing.live import LiveStep

SHOWN = 5  # culprits in a message


class CannotJudge(AssertionError):
    """The measurement does not hold what the assertion asks for. Never a pass: the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
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


class Measured:
    """One step as it was measured: `profile` is the StepProfile that `advisor profile` makes, `metrics` what analysis
    reads from it, `budgets` what it has been held to so far. Every assertion returns None or raises AssertionError.

    All amounts are a step. `max` and `min` are numbers in the quantity's unit or texts (`"2 GiB"`, `"12 ms"`, `"85 %"`);
    `baseline` is what the `perf_baseline` fixture returns, and `tolerance` the share by which the step may be worse.
    """

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
        self._step = Step(profile=profile, metrics=analysis.metrics(profile), beyond=beyond or Beyond())
        self._live = live
        self.budgets: list[Budget] = []

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
    def entry(self) -> Entry:
        """What a baseline stores of it."""
        return Entry.of(self.label, self._step)

    def reading(self, key: str) -> Reading:
        """A quantity by its key (`kernels`, `memory`, …), with its provenance, or the reason why it is not known."""
        return BY_KEY[key].read(self._step)

    # -- time ---------------------------------------------------------------------------------------------------------

    def assert_step_time(self, **bounds: Any) -> None:
        """Median step time, no profiler on. Prefer `perf.compare` wherever two versions can be had in one process."""
        __tracebackhide__ = True
        self._hold("step", bounds)

    def assert_gpu_busy(self, **bounds: Any) -> None:
        """Share of the step in which the GPU works; `min="90 %"`."""
        __tracebackhide__ = True
        self._hold("busy", bounds)

    def assert_speed_of_light(self, **bounds: Any) -> None:
        """The least time this machine needs over the step's time; `min="50 %"`."""
        __tracebackhide__ = True
        self._hold("limit", bounds)

    # -- work ---------------------------------------------------------------------------------------------------------

    def assert_kernel_count(self, **bounds: Any) -> None:
        """Kernels a step (operators on a CPU)."""
        __tracebackhide__ = True
        self._hold("kernels", bounds)

    def assert_launches(self, **bounds: Any) -> None:
        """Kernel launches a step: a replayed CUDA graph is one."""
        __tracebackhide__ = True
        self._hold("launches", bounds)

    def assert_layout_conversions(self, **bounds: Any) -> None:
        """Copies whose purpose is another memory format (NCHW to NHWC and back)."""
        __tracebackhide__ = True
        self._hold("layouts", bounds)

    def assert_no_layout_conversion(self) -> None:
        """No copy to another memory format."""
        __tracebackhide__ = True
        self._hold("layouts", {"max": 0})

    def assert_kernel(self, pattern: str, *, min: float = 1, max: float | None = None) -> None:
        """A kernel whose name, or whose operator's name, holds the regular expression runs `min` to `max` times a step."""
        __tracebackhide__ = True
        rows = self._traced(f"kernels named {pattern!r}")
        found = [row for row in rows if re.search(pattern, row.name) or re.search(pattern, row.op)]
        count = sum(row.calls for row in found)
        culprits = grouped(found, lambda row: row.calls)
        title = f"calls of {pattern!r}"
        if max is not None:
            self._bound(title, "count", count, max, "max", culprits)
        if min:
            others = [f"  {c.text('count')}" for c in grouped(rows, lambda row: row.calls)[:SHOWN]]
            self._record(title, "count", count, min, "min", count >= min)
            if count < min:
                raise AssertionError(
                    "\n".join([f"{title}: {count:g} a step, at least {min:g} wanted", "there are:", *others])
                )

    def assert_no_kernel(self, pattern: str) -> None:
        """No kernel's name, nor its operator's, holds the regular expression."""
        __tracebackhide__ = True
        self.assert_kernel(pattern, min=0, max=0)

    def assert_tensor_cores(self, **bounds: Any) -> None:
        """Share of convolution and product time in tensor-core kernels; `min="95 %"`. Needs a GPU."""
        __tracebackhide__ = True
        self._hold("tensor_cores", bounds)

    def assert_half_precision(self, **bounds: Any) -> None:
        """Share of convolution and product flops in fp16 or bf16; works on a CPU too. `min=1` finds a dropped autocast."""
        __tracebackhide__ = True
        self._hold("half", bounds)

    # -- host and device ----------------------------------------------------------------------------------------------

    def assert_host_syncs(self, *, allow: Sequence[str] = (), **bounds: Any) -> None:
        """Waits of the host for the device; on a CPU, the reads that would wait on a GPU, of anything but a script.

        Args:
            allow: texts that name waits which do not count: a part of an operator (`"aten::nonzero"`) or of a source
                line (`"train.py:42"`).
        """
        __tracebackhide__ = True
        if isinstance(allow, str):
            raise AdvisorError(f"allow={allow!r}", expected="a list of texts")
        sites = host_syncs(self._step, tuple(allow))
        known = BY_KEY["syncs"].read(self._step)
        reading = known if known.value is None else replace(known, value=sync.waits(sites))
        self._hold("syncs", bounds, reading, sync_culprits(sites))

    def assert_no_host_sync(self, *, allow: Sequence[str] = ()) -> None:
        """The host never waits for the device, but for what `allow` names."""
        __tracebackhide__ = True
        self.assert_host_syncs(max=0, allow=allow)

    def assert_copies(self, kind: str, *, max_bytes: Amount | None = None, **bounds: Any) -> None:
        """Copies of one kind: h2d, d2h or d2d. Needs a GPU.

        Args:
            max_bytes: a bound on their bytes, beside or instead of one on their number.
        """
        __tracebackhide__ = True
        if kind not in ("h2d", "d2h", "d2d"):
            raise AdvisorError(f"copies of kind {kind!r}", expected="h2d, d2h or d2d")
        if bounds or max_bytes is None:
            self._hold(kind, bounds)
        if max_bytes is not None:
            self._hold(f"{kind}_bytes", {"max": max_bytes})

    # -- memory -------------------------------------------------------------------------------------------------------

    def assert_dram_bytes(self, *, allow_modelled: bool = False, **bounds: Any) -> None:
        """Bytes between the GPU and its memory. Numbers that are modelled from shapes are refused unless allowed."""
        __tracebackhide__ = True
        reading = self.reading("dram")
        if reading.provenance is Provenance.MODELLED and not allow_modelled:
            raise CannotJudge(
                f"DRAM traffic was not measured: {amounts.text(reading.value or 0.0, 'bytes')} is modelled ({reading.reason}). "
                "Pass allow_modelled=True to judge that, or let this process read hardware counters (`advisor doctor`)."
            )
        self._hold("dram", bounds, reading)

    def assert_memory(self, **bounds: Any) -> None:
        """Peak allocated memory; `max="2 GiB"`."""
        __tracebackhide__ = True
        self._hold("memory", bounds)

    def assert_memory_growth(self, **bounds: Any) -> None:
        """Bytes that a step leaves allocated for good."""
        __tracebackhide__ = True
        self._hold("growth", bounds)

    def assert_no_memory_growth(self, *, beyond: Amount = "64 KiB") -> None:
        """A step leaves no more behind than a list of losses would."""
        __tracebackhide__ = True
        self._hold("growth", {"max": beyond})

    # -- compiled code ------------------------------------------------------------------------------------------------

    def assert_no_recompile(self) -> None:
        """Nothing was compiled after warm-up, and nothing compiled so often since the test began that Dynamo gave it up.

        What it had given up before the test runs uncompiled, and is not seen: call torch.compiler.reset() before.
        """
        __tracebackhide__ = True
        self._hold("recompiles", {"max": 0})

    def assert_graph_breaks(self, **bounds: Any) -> None:
        """Places at which `torch.compile` had to leave its graph, in what was compiled since the test began."""
        __tracebackhide__ = True
        self._hold("graph_breaks", bounds)

    def assert_no_graph_break(self) -> None:
        """What was compiled since the test began is one graph a function."""
        __tracebackhide__ = True
        self._hold("graph_breaks", {"max": 0})

    # -- results ------------------------------------------------------------------------------------------------------

    def assert_deterministic(self, *, runs: int = 2) -> None:
        """From the same state the step leaves the same bits: parameters, buffers, gradients, optimizer state.

        The step is run `runs` times from a saved state, which is put back at the end. It must use the same batch each time.
        """
        __tracebackhide__ = True
        from advisor.testing import replay

        problem = replay.difference(self._alive("determinism"), runs)
        self._record("determinism", "count", float(not problem), 1.0, "check", not problem)
        if problem:
            raise AssertionError(problem)

    def assert_close_to(
        self, reference: Callable[[], Any], *, semantics: str = "reassociated", precision: str = "half"
    ) -> None:
        """The step computes what `reference` computes, within what the class of change allows, by the gate of `advisor apply`.

        Both steps must train modules with the same parameter names; the reference's weights, batch and random state are used.

        Args:
            reference: another step; it is called a few times and trains on.
            semantics: exact (bit-equal), reassociated (another order of summation) or precision (fewer mantissa bits).
            precision: what a change of precision computes in: half or tf32.
        """
        __tracebackhide__ = True
        from advisor.testing import closeness

        check = closeness.check(self._alive("closeness"), reference, semantics=semantics, precision=precision)
        self._judge_check("closeness to the reference", check.passed, check.detail)

    def assert_in_effect(self, *names: str | Path, before: Measured | None = None) -> None:
        """Each transform named, or kept in the plan named (a `.yaml` file), shows its effect in this step.

        Args:
            before: the same step without them, for effects that only a comparison shows.
        """
        __tracebackhide__ = True
        from advisor.testing import effects

        live = self._alive("effects")
        for name, check in effects.checks(live, names, self.profile, before.profile if before else None):
            self._judge_check(f"effect of {name}", check.passed, check.detail)

    # -- bounds and baselines --------------------------------------------------------------------------------------

    def hold(self, key: str, **bounds: Any) -> None:
        """Any quantity by its key, as the assertions above hold theirs.

        Raises:
            KeyError: for a key that is not in `advisor.testing.quantities`.
        """
        __tracebackhide__ = True
        self._hold(key, bounds)

    def worse_than(self, entry: Entry, name: str, key: str) -> list[str]:
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

    def hold_to_baseline(self, stored: Stored, tolerance: float | None = None) -> list[str]:
        """Every quantity against a stored baseline; the messages of those that are worse than `tolerance` allows.

        Times are passed over: those of two days differ by more than what is to be found. So is what one of the two does not know, or
        knows in another way (measured, modelled), and DRAM traffic that is only modelled.
        """
        entry = stored.entry(self.label)
        if entry is None:
            return []
        if problem := self.other_device(stored):
            return [problem]
        problems = []
        for quantity in QUANTITIES:
            key, reading = quantity.key, quantity.read(self._step)
            if reading.value is None or entry.provenance.get(key) != reading.provenance.value:
                continue
            if quantity.timed or (key == "dram" and reading.provenance is Provenance.MODELLED):
                continue
            try:
                self._against(quantity, reading, stored, tolerance)
            except AssertionError as error:
                problems.append(str(error))
        return problems

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

    def _against(self, quantity: Quantity, reading: Reading, stored: Stored, tolerance: float | None) -> None:
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

    def _worse(self, quantity: Quantity, value: float, old: float, entry: Entry, where: str) -> list[str]:
        unit = quantity.unit
        head = f"{quantity.title}: {amounts.text(value, unit)}{quantity.per}, {amounts.text(old, unit)} in {where}"
        changed = self._changed(quantity, entry)
        if changed:
            return [head, *_listed("what is more than there:", changed, unit)]
        return [head, *_listed("most of it:", quantity.blame(self._step), unit)]

    def _changed(self, quantity: Quantity, entry: Entry) -> list[Culprit]:
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
        found = Budget(title=title, unit=unit, value=value, limit=limit, bound=bound, passed=passed, note=note)
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
