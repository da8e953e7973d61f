"""The object behind the `perf` fixture: measures and compares for one test, and holds what it measured to its budgets."""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.provenance import Provenance
from advisor.loop.compiles import Compilations
from advisor.testing import amounts, baselines
from advisor.testing.baselines import Stored
from advisor.testing.marker import Marked
from advisor.testing.measured import Measured
from advisor.testing.options import FAIL, SKIP, Options
from advisor.testing.quantities import BY_KEY
from advisor.testing.records import Record

if TYPE_CHECKING:
    import torch

    from advisor.testing.comparing import Comparison


SHOWN_CHANGE = 5e-4  # rounds to 0.1 % at least


class Inconclusive(UserWarning):
    """A comparison that noise has left open."""


class Perf:
    """`perf.measure(step)` and `perf.compare(a, b)`. What is measured shows in the terminal section and in baselines."""

    def __init__(self, test: str, options: Options, marked: Marked, skip: Callable[[str], Any]) -> None:
        self._test, self._options, self._marked, self._skip = test, options, marked, skip
        self._since = Compilations()
        self._against: dict[str, list[str]] = {}
        self.measured: list[Measured] = []
        self.comparisons: list[Comparison] = []

    def measure(
        self,
        step: Any,
        *arguments: str,
        batch: Any = None,
        loss: Callable[..., Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        warmup: int = 10,
        steps: int = 20,
        detail_steps: int = 3,
        device: str | None = None,
        counters: bool = True,
        name: str = "",
    ) -> Measured:
        """Measure one training step.

        Args:
            step: a callable without arguments; or a script's path, followed by its arguments; or a module, with `batch`
                and `loss`.
            batch, loss, optimizer: of a module: `loss(module(inputs), targets)` with `batch = (inputs, targets)`.
            warmup, steps, detail_steps: calls before, timed, and traced; a dozen more are made for memory and host reads.
            device: where the step runs, if not where its first call allocates memory.
            counters: read DRAM counters on a GPU that offers them.
            name: tells several measurements of one test from each other.

        Raises:
            AdvisorError: when it cannot be measured. What the step raises passes, with all hooks taken back.
        """
        label = self._label(name)
        counts = {"warmup": warmup, "steps": steps, "detail_steps": detail_steps}
        if isinstance(step, (str, Path)):
            if batch is not None or loss is not None or optimizer is not None or device is not None:
                raise AdvisorError(
                    "a script takes arguments only", fix="batch, loss, optimizer and device are for modules."
                )
            from advisor.testing.measuring import measure_script

            found = measure_script((str(step), *map(str, arguments)), **counts, counters=counters, label=label)
        else:
            if arguments:
                raise AdvisorError("arguments are for a script", fix="Bind them: functools.partial(step, …).")
            found = self.measure_here(step, batch, loss, optimizer, counts, device, counters, label)
        self.measured.append(found)
        return found

    def measure_here(
        self,
        step: Any,
        batch: Any,
        loss: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | None,
        counts: dict[str, int],
        device: str | None,
        counters: bool,
        label: str,
    ) -> Measured:
        import torch

        from advisor.testing.measuring import measure, training_step

        if batch is not None or loss is not None:
            if not isinstance(step, torch.nn.Module) or batch is None or loss is None:
                raise AdvisorError(
                    "a batch and a loss go together with a module", expected="measure(model, batch=…, loss=…)"
                )
            step = training_step(step, batch, loss, optimizer)
        elif isinstance(step, torch.nn.Module):
            raise AdvisorError("a module alone is no training step", expected="measure(model, batch=…, loss=…)")
        return measure(step, **counts, device=device, counters=counters, label=label, since=self._since)

    def compare(
        self,
        a: Callable[[], Any],
        b: Callable[[], Any],
        *,
        max_pairs: int = 20,
        device: str | None = None,
        stopwatch: Any = None,
    ) -> Comparison:
        """Two steps against each other; then `assert_faster(by="2 %")` or `assert_not_slower(than="1 %")`.

        Args:
            a: the step as it was.
            b: the step as it is now.
            max_pairs: paired blocks after which an open question is inconclusive.
            device: where they run; by default the GPU where CUDA is in use.
            stopwatch: another clock (see `advisor.testing.comparing.Stopwatch`).
        """
        import torch

        from advisor.testing.comparing import Comparison

        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        found = Comparison(
            a,
            b,
            device=torch.device(device or ("cuda" if in_use else "cpu")),
            stopwatch=stopwatch,
            max_pairs=max_pairs,
            undecided=self._undecided,
        )
        self.comparisons.append(found)
        return found

    def baseline(self, name: str | None = None) -> Stored:
        """What a stored baseline holds of this test: for `baseline=` of an assertion. By default that of --perf-compare.

        Raises:
            AdvisorError: when there is no such baseline, unless this very run writes it.
        """
        options = self._options
        name = name if name is not None else options.compare
        if not name:
            name = options.save or baselines.newest(options.storage)
        if options.records(name):
            return Stored(name=name, recording=True)
        stored = baselines.load(options.storage, name)
        return Stored(name=name, machine=stored.machine, entries=stored.tests.get(self._test, ()))

    def check(self) -> None:
        """Hold everything measured to the marker's budgets and the run's baseline.

        Raises:
            AssertionError: with every budget that is not kept.
            AdvisorError: when the marker sets budgets and nothing was measured.
        """
        marked = self._marked
        if marked.judges and not self.measured:
            raise AdvisorError(
                "the perf marker sets budgets and the test measured nothing", fix="Call perf.measure(step) in the test."
            )
        problems: list[str] = []
        for found in self.measured:
            maxima = {**marked.maxima, **({"syncs": 0.0} if marked.no_sync else {})}
            for quantity, limit in maxima.items():
                try:
                    found.hold(quantity, max=limit)
                except AssertionError as error:
                    problems.append(str(error))
            if marked.baseline:
                problems += found.hold_to_baseline(self.baseline(marked.baseline), marked.tolerance)
            problems += self._compared(found)
        if problems:
            raise AssertionError("\n".join(problems))

    def records(self) -> list[Record]:
        """What was measured, as plain data."""
        found = [
            Record(
                label=m.label,
                entry=m.entry,
                machine=m.machine,
                budgets=tuple(m.budgets),
                seconds=round(m.seconds, 3),
                against=tuple(self._against.get(m.label, ())),
            )
            for m in self.measured
        ]
        found += [
            Record(label="comparison", budgets=tuple(c.budgets), gain=tuple(c.gain or ()), pairs=len(c.pairs))
            for c in self.comparisons
        ]
        return found

    def write_reports(self, folder: Path) -> tuple[list[str], str]:
        """An HTML report of each measurement, as `advisor report` makes it: their paths, and what kept one from being
        written. It never raises for a file: the test's own failure is what has to be told."""
        from advisor.reporting.html import report_html

        paths: list[str] = []
        for found in self.measured:
            name = f"{self._test}_{found.label}".rstrip("_")
            stem = re.sub(r"[^\w.-]+", "_", name).strip("_")[-120:]
            path = folder / f"{stem}-{zlib.crc32(name.encode()):08x}.html"  # punctuation tells tests apart too
            try:
                storage.write_text(path, report_html(found.profile, None, None))
            except AdvisorError as error:
                return paths, f"report could not be written: {error}"
            paths.append(str(path))
        return paths, ""

    def _label(self, name: str) -> str:
        label = name or ("" if not self.measured else str(len(self.measured) + 1))
        if any(found.label == label for found in self.measured):
            raise AdvisorError(f"two measurements of this test are named {label!r}", expected="another name for each")
        return label

    def _undecided(self, reason: str) -> None:
        __tracebackhide__ = True
        if self._options.inconclusive == FAIL:
            raise AssertionError(reason)
        if self._options.inconclusive == SKIP:
            self._skip(reason)
        warnings.warn(reason, Inconclusive, stacklevel=4)

    def _compared(self, found: Measured) -> list[str]:
        """Against the baseline of --perf-compare: lines for the terminal, and what is past --perf-compare-fail."""
        options = self._options
        if options.compare is None or options.records(options.compare):
            return []
        stored = self.baseline(options.compare or None)
        entry = next((entry for entry in stored.entries if entry.label == found.label), None)
        lines = self._against.setdefault(found.label, [])
        if entry is None or stored.machine is None:
            lines.append(f"not in baseline {stored.name!r}")
            return []
        if other := found.other_device(stored):
            lines.append(other)
            return [other] if options.compare_fail else []
        problems = []
        for key, quantity in BY_KEY.items():
            reading = found.reading(key)
            if key not in entry.values or quantity.timed:
                continue
            limit = (options.compare_fail or {}).get(key)
            if reading.value is None:
                if limit is not None:
                    problems.append(
                        f"{quantity.title} is not known: {reading.reason}; it is in baseline {stored.name!r}"
                    )
                continue
            if entry.provenance.get(key) != reading.provenance.value:
                continue
            old, unit = entry.values[key], quantity.unit
            if abs(reading.value - old) > SHOWN_CHANGE * abs(old):
                change = f" ({reading.value / old - 1:+.1%})" if old else ""
                modelled = "" if reading.provenance is Provenance.MEASURED else f" ({reading.provenance.value})"
                lines.append(
                    f"{quantity.title}{modelled}: {amounts.text(reading.value, unit)}, {amounts.text(old, unit)} in {stored.name!r}{change}"
                )
            if limit is None:
                continue
            if baselines.compared(quantity, reading.value, old, limit.amount, absolute=limit.absolute) > 0:
                problems += found.worse_than(entry, stored.name, key)
        return problems
