"""What cures that only the user can make would save of this step: shares of it, each as an interval that is to hold the outcome.

Transforms have theirs in `predictions`; these are for rules of advice, which read them as metrics `<cure>_saved_low` and `_high`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from advisor.analysis import optimizer
from advisor.analysis.memory import BYTES
from advisor.analysis.predictions.basis import POINTWISE_BEST, POINTWISE_WORST, bytes_us, gain_to
from advisor.analysis.view import View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance
from advisor.core.units import time_text

Cure = Callable[[View, Step], Change | None]

# A multi-tensor update of an average reads it and the weights, and writes it.
AVERAGE_PASSES = 3
# A fused update reads gradient, parameter and state, and writes the latter two.
UPDATE_PASSES = 5
# Tracing slows a loop of short calls more than the step as a whole, or less where the step is such loops all through: of the host's time
# that is told for it, at the step's own slow-down, so much is there untraced.
SPAN_WORST, SPAN_BEST = 0.5, 1.5


def fill(view: View, table: MetricTable) -> None:
    """Set the interval of each cure whose cause is there; the others stay missing."""
    step = Step.of(view)
    for name, cure in CURES.items():
        change = cure(view, step) if step is not None else None
        if step is None or change is None:
            why = "no step was timed, or none traced" if step is None else "there is nothing to cure"
            for end in ("low", "high"):
                table.miss(f"{name}_saved_{end}", why)
            continue
        gain = step.gain(change)
        table.set(f"{name}_saved_low", max(0.0, gain.low), Provenance.MODELLED, change.basis)
        table.set(f"{name}_saved_high", gain.high, Provenance.MODELLED, change.basis)


def averaging(view: View, step: Step) -> Change | None:
    """One multi-tensor call in place of a loop over tensors that averages weights."""
    rows = [row for row in view.rows if row.phase == "average"]
    if not rows:
        return None
    profile = view.profile
    return _loop(view, step, rows, profile.average_host_us, profile.average_calls_us, AVERAGE_PASSES)


def own_update(view: View, step: Step) -> Change | None:
    """Multi-tensor calls, or a fused optimizer of torch's, in place of a loop over tensors that updates the weights."""
    rows = optimizer.own_update(view)
    if not rows:
        return None
    span = view.profile.optimizer_host_us
    return _loop(view, step, rows, span, span / 2, UPDATE_PASSES)


def _loop(view: View, step: Step, rows: list[KernelRow], span_us: float, calls_us: float, passes: int) -> Change:
    """A loop over tensors as one multi-tensor call: `span_us` of the host, `calls_us` of it inside the calls, both traced."""
    facts, slowed = view.profile.model, 1.0 + max(0.0, view.profile.cost.overhead_frac)
    time, span, calls = sum(row.time_us for row in rows), span_us / slowed, calls_us / slowed
    least = bytes_us(view, facts.parameters * BYTES.get(facts.parameter_dtype, 4) * passes)
    basis = (
        f"{sum(row.calls for row in rows):.0f} operations a step, one tensor each; {time_text(span)} of the host's time"
    )
    if view.on_gpu:
        return Change(
            worst=Saving(device_us=gain_to(time, least / POINTWISE_WORST), host_us=SPAN_WORST * calls),
            best=Saving(device_us=gain_to(time, least / POINTWISE_BEST), host_us=SPAN_BEST * span),
            basis=basis,
        )
    # On a CPU a multi-tensor call is a loop of its own, in C++: what goes is Python's, and passes beyond one.
    scale = max(step.scale, 1e-9)
    return Change(
        worst=Saving(device_us=SPAN_WORST * calls / scale),
        best=Saving(device_us=SPAN_BEST * span / scale),
        basis=basis,
    )


CURES: Mapping[str, Cure] = {"average": averaging, "own_optimizer": own_update}
