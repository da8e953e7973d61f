"""What cures that only the user can make would save of this step: shares of it, each as an interval that is to hold the outcome.

Transforms have theirs in `predictions`; these are for rules of advice, which read them as metrics `<cure>_saved_low` and `_high`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from advisor.analysis import optimizer
from advisor.analysis.conv import is_gradient
from advisor.analysis.memory import BYTES
from advisor.analysis.predictions.basis import POINTWISE_BEST, POINTWISE_WORST, bytes_us, gain_to, launching_us, share
from advisor.analysis.view import View
from advisor.analysis.whatif import OP_HIGH_US, OP_LOW_US, Change, Saving, Step
from advisor.core.findings import Interval
from advisor.core.metrics import MetricTable
from advisor.core.profile import WHOLE, KernelRow
from advisor.core.provenance import Provenance
from advisor.core.row_kinds import is_index
from advisor.core.units import counted, time_text

Cure = Callable[[View, Step], Change | Interval | None]

# A multi-tensor update of an average reads it and the weights, and writes it.
AVERAGE_PASSES = 3
# A fused update reads gradient, parameter and state, and writes the latter two.
UPDATE_PASSES = 5
# Operators by which anomaly detection looks for NaN in what a node of the graph gives, and their launches.
_CHECKS = frozenset(
    f"aten::{name}" for name in ("isnan", "ne", "_is_any_true", "any", "item", "_local_scalar_dense", "is_nonzero")
)
CHECK_LAUNCHES = 3
# The stack is timed where modules are called; most nodes are made in there, some frames further in or out.
STACK_WORST, STACK_BEST = 0.6, 1.6
# A fill also brings memory into the cache for whoever writes there next: on a CPU, where fills took 2 % of a small network's step, it gained
# nothing to leave them out (2 cores of an x86 server, CPU time, medians of 40 steps, twice).
FILL_WORST = 0.7
ALLOCATING_WORST = 0.6
GC_WORST = 0.8
# Of a backward pass's time in a module, what its weights' gradients take at least; the input's may be needed by what stands before.
WEIGHT_GRADIENTS = 0.3
# Of a forward on a CPU, what recording its graph takes at most: nodes, and activations that are kept. Two classifiers and a head alone
# in its optimizer, by turns on four cores: 10 to 21 %.
RECORDING_BEST = 0.3
# Of the time in fp64: half where bytes are the limit and less where launches are; nearly all where the device is slow at fp64 (1/64 of the
# fp32 rate on GPUs for graphics), or converts back.
FP64_WORST, FP64_BEST = 0.25, 0.95
# Tracing slows a loop of short calls more than the step as a whole, or less where the step is such loops all through: of the host's time
# that is told for it, at the step's own slow-down, so much is there untraced.
SPAN_WORST, SPAN_BEST = 0.5, 1.5


def fill(view: View, table: MetricTable) -> None:
    """Set the interval of each cure whose cause is there; the others stay missing."""
    step = Step.of(view)
    if view.rows:
        table.set("fresh_fill_frac", view.share(_fills_fresh))
        table.set("untrained_frac", view.share(lambda row: _untrained(view, row)))
    for name, cure in CURES.items():
        change = cure(view, step) if step is not None else None
        if step is None or change is None:
            why = "no step was timed, or none traced" if step is None else "there is nothing to cure"
            for end in ("low", "high"):
                table.miss(f"{name}_saved_{end}", why)
            continue
        gain = step.gain(change) if isinstance(change, Change) else change
        high = min(1.0, max(0.0, gain.high))
        table.set(f"{name}_saved_low", min(max(0.0, gain.low), high), Provenance.MODELLED, gain.basis)
        table.set(f"{name}_saved_high", high, Provenance.MODELLED, gain.basis)


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


def anomaly(view: View, step: Step) -> Change | None:
    """No stack noted for each node of the graph, and no search for NaN in what each gives."""
    facts, nodes = view.profile.model, view.profile.backward_nodes
    if not facts.flags.get("anomaly") or nodes <= 0:
        return None
    checks = [row for row in view.rows if row.phase == "backward" and row.op in _CHECKS]
    searched = sum(row.calls for row in checks if row.op == "aten::any")
    time, noted = sum(row.time_us for row in checks), nodes * facts.stack_us
    basis = f"{nodes:.0f} nodes of the graph, {time_text(facts.stack_us)} each to note where they were made; {searched:.0f} searched for NaN"
    if not view.on_gpu:
        scale = max(step.scale, 1e-9)
        return Change(
            worst=Saving(device_us=STACK_WORST * noted / scale + time / 2),
            best=Saving(device_us=STACK_BEST * noted / scale + 2 * time),
            basis=basis,
        )
    # Each search is some launches and a wait for its answer, behind which the device has nothing to do until the next launch.
    low = STACK_WORST * noted + searched * CHECK_LAUNCHES * OP_LOW_US / 2
    high = STACK_BEST * noted + searched * CHECK_LAUNCHES * OP_HIGH_US
    return Change(
        worst=Saving(device_us=time, host_us=low),
        best=Saving(device_us=time, gaps_us=step.gaps_us, sync_us=step.sync_us, host_us=high),
        basis=basis,
    )


def untrained(view: View, step: Step) -> Change | None:
    """No gradients for parameters that no optimizer holds: those of the weights at least, and at most all of backward in these models,
    whose forward then records no graph."""
    facts = view.profile.model
    rows = [row for row in view.rows if _untrained(view, row)]
    # What the script updates by hand has its gradients read.
    if not rows or optimizer.own_update(view):
        return None
    names = [name for name in facts.untrained if not name.endswith(WHOLE)]
    own = sum(row.time_us for row in rows if row.module in names)
    of_models = [row for row in view.rows if _of_models(row, names)]
    recording = sum(row.time_us for row in of_models if row.phase == "forward") if not view.on_gpu else 0.0
    return Change(
        worst=Saving(device_us=WEIGHT_GRADIENTS * own),
        best=Saving(
            device_us=sum(row.time_us for row in of_models if row.phase == "backward") + RECORDING_BEST * recording
        ),
        basis=f"{share(view, rows, step)} compute backward in {counted(len(names), 'module')} of which no optimizer has the parameters",
    )


def _of_models(row: KernelRow, modules: Sequence[str]) -> bool:
    """Work in a model that holds one of these modules: where only a head is trained, no backward is needed but the head's."""
    return row.module.partition(".")[0] in {name.partition(".")[0] for name in modules}


def _untrained(view: View, row: KernelRow) -> bool:
    """Backward of a module whose parameters no optimizer holds, or of one without any in a model that has none but such."""
    names = view.profile.model.untrained
    if row.phase != "backward" or not names:
        return False
    # What lies between such modules is computed for those below, which may be trained.
    return row.module in names or row.module.partition(".")[0] + WHOLE in names


def _fills_fresh(row: KernelRow) -> bool:
    """A fill of what was just allocated and not asked to be filled."""
    return row.kind == "memset" and row.op.startswith(("aten::empty", "aten::resize_"))


def deterministic(view: View, step: Step) -> Change | None:
    """No fills of what is allocated; and algorithms that sum in any order, which is half of the way to the limit at most."""
    flags = view.profile.model.flags
    if not (flags.get("deterministic_algorithms") or flags.get("cudnn_deterministic")):
        return None
    fills = [row for row in view.rows if _fills_fresh(row)]
    ordered = [row for row in view.rows if is_gradient(row) or (is_index(row) and row.phase == "backward")]
    filling = sum(row.time_us for row in fills)
    slower = sum(gain_to(row.time_us, row.limit_us) for row in ordered) / 2
    basis = (
        f"{share(view, fills, step)} fill memory that was just allocated; half of what {share(view, ordered, step)} take above "
        "their limit may be the order of their sums"
    )
    host = launching_us(view, fills) if view.on_gpu else 0.0
    return Change(
        worst=Saving(device_us=FILL_WORST * filling if view.on_gpu else 0.0, host_us=host / 2),
        best=Saving(device_us=filling / FILL_WORST + slower, host_us=2 * host),
        basis=basis,
    )


def empty_cache(view: View, step: Step) -> Interval | None:
    """No memory given back to the driver and taken again."""
    stats, profile = view.profile.memory, view.profile
    if not stats.empty_cache_calls or not view.on_gpu:
        return None
    taking = profile.allocating_us
    idle = step.gaps_us + step.sync_us
    # In the call the host waits for what the device has still to do, which costs nothing by itself.
    most = min(stats.empty_cache_us + taking, max(idle, profile.allocating_idle_us))
    least = min(profile.allocating_idle_us / (1.0 + max(0.0, profile.cost.overhead_frac)), most)
    return Interval(
        low=ALLOCATING_WORST * least / step.step_us,
        high=most / step.step_us,
        basis=(
            f"{time_text(stats.empty_cache_us)} a step in these calls, {time_text(taking)} taking memory from the driver or giving it back, "
            f"{time_text(profile.allocating_idle_us)} of that with the device idle"
        ),
    )


def garbage(view: View, step: Step) -> Change | Interval | None:
    """No full collections of Python's garbage."""
    stats = view.profile.memory
    if not stats.gc_calls:
        return None
    basis = f"{time_text(stats.gc_us)} of the host's time a step"
    if not view.on_gpu:
        return Interval(
            low=GC_WORST * stats.gc_us / step.step_us, high=stats.gc_us / GC_WORST / step.step_us, basis=basis
        )
    worst = Saving(host_us=GC_WORST * stats.gc_us)
    return Change(worst=worst, best=Saving(host_us=stats.gc_us / GC_WORST), basis=basis)


def single_precision(view: View, step: Step) -> Change | None:
    """fp32 where tensors are in fp64: half of the bytes, and no conversions back."""
    rows = [row for row in view.rows if row.dtype == "fp64"]
    if not rows:
        return None
    time = sum(row.time_us for row in rows)
    return Change(
        worst=Saving(device_us=FP64_WORST * time),
        best=Saving(device_us=FP64_BEST * time),
        basis=f"{share(view, rows, step)} compute in fp64; in fp32 they move half of the bytes",
    )


CURES: Mapping[str, Cure] = {
    "average": averaging,
    "own_optimizer": own_update,
    "anomaly": anomaly,
    "deterministic": deterministic,
    "empty_cache": empty_cache,
    "gc": garbage,
    "fp64": single_precision,
    "untrained": untrained,
}
