"""A measured step and what can be asserted of it. Each failure names the kernels, modules and source lines at fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.analysis import sync
from advisor.core.errors import AdvisorError
from advisor.core.provenance import Provenance
from advisor.testing import amounts
from advisor.testing.amounts import Amount
from advisor.testing.baselines import Stored
from advisor.testing.judged import SHOWN, CannotJudge, Judged
from advisor.testing.quantities import (
    BY_KEY,
    QUANTITIES,
    grouped,
    host_syncs,
    sync_culprits,
)

if TYPE_CHECKING:
    pass


class Measured(Judged):
    """One step as it was measured: `profile` is the StepProfile that `advisor profile` makes, `metrics` what analysis
    reads from it, `budgets` what it has been held to so far. Every assertion returns None or raises AssertionError.

    All amounts are a step. `max` and `min` are numbers in the quantity's unit or texts (`"2 GiB"`, `"12 ms"`, `"85 %"`);
    `baseline` is what the `perf_baseline` fixture returns, and `tolerance` the share by which the step may be worse.
    """

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
