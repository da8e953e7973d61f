"""The optimizer's update, casts of weights, gradients set to zero."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.analysis.memory import BYTES, STATES
from advisor.analysis.optimizer import zeroing
from advisor.analysis.predictions.basis import (
    POINTWISE_BEST,
    bytes_us,
    gain_to,
    launching_us,
    nothing,
    share,
)
from advisor.analysis.rows import launches
from advisor.analysis.view import View
from advisor.analysis.whatif import OP_LOW_US, Change, Saving, Step
from advisor.core.units import percent_text, time_text

# Multi-tensor kernels take tens of tensors a launch: a handful of launches for any model.
FUSED_OPTIMIZER_LAUNCHES = 2
# Casts of all weights and back, as a share of copy bandwidth: docs/benchmarks, casts, of 8 M weights and more, in CUDA graphs too.
CASTS_BEST, CASTS_WORST = 1.0, 0.7
TENSORS_A_LAUNCH = 128  # as ops/casts/spec.py, which is a neighbour of this package; a test holds the two together
FUSED_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")  # torch.optim documentation: `fused`


def fused_optimizer(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """One pass over parameters and states, a handful of launches."""
    facts = view.profile.model
    if facts.optimizer_fused:
        return nothing("the optimizer is already fused")
    if facts.updates_compiled:
        return nothing("the script compiles the optimizer's step")
    chosen = [row for row in view.rows if row.phase == "optimizer"]
    if not chosen:
        return nothing("no optimizer kernel in the step")
    kind = facts.optimizers[0] if facts.optimizers else ""
    if kind and kind not in FUSED_OPTIMIZERS:
        return nothing(f"torch has no fused {kind}")
    time = sum(row.time_us for row in chosen)
    # Parameter read and written, gradient read, each state read and written: once each in a fused kernel.
    passes = 3 + 2 * STATES.get(kind, 1)
    least = bytes_us(view, facts.parameters * BYTES.get(facts.parameter_dtype, 4) * passes)
    host = 0.0
    if view.on_gpu:
        # Grouping tensors and Python around them cost more than the launches; what was measured bounds what can be saved.
        removed = max(0.0, launches(chosen) - FUSED_OPTIMIZER_LAUNCHES) * OP_LOW_US
        host = view.profile.optimizer_host_us / (1.0 + max(0.0, view.profile.cost.overhead_frac)) or removed
    told = f", {time_text(host)} of host time" if host else ""
    return Change(
        worst=Saving(),
        best=Saving(device_us=gain_to(time, least / POINTWISE_BEST), host_us=host),
        basis=f"{share(view, chosen, step)}{told} update parameters; "
        f"{passes} passes over {facts.parameters / 1e6:.1f} M remain",
    )


def fused_casts(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Casts of weights put together, at the rate of copies."""
    if view.profile.model.compiled:
        return nothing("the script compiles its model, which fuses casts")
    chosen = [row for row in view.rows if view.is_weight_cast(row)]
    if not chosen:
        return nothing("no weight is cast by itself")
    time = sum(row.time_us for row in chosen)
    least = sum(bytes_us(view, row.modelled_bytes) for row in chosen)
    fewer = launching_us(view, chosen) * (1 - 1 / TENSORS_A_LAUNCH)  # together they are at least so many launches
    return Change(
        worst=Saving(device_us=gain_to(time, least / CASTS_WORST)),
        best=Saving(device_us=gain_to(time, least / CASTS_BEST), host_us=fewer),
        basis=(
            f"{share(view, chosen, step)} cast weights or their gradients; their bytes take {time_text(least)}, together they "
            f"run at {percent_text(CASTS_WORST)} to {percent_text(CASTS_BEST)} of copy bandwidth"
        ),
    )


def set_to_none(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """No gradients that are zeroed to be added to."""
    facts = view.profile.model
    if facts.zero_grad_to_none and not facts.gradients_stay:
        return nothing("gradients are already set to None")
    zeroed = zeroing(view)
    if not zeroed:
        return nothing("no kernel zeroes gradients")
    # A first gradient is then kept as it is, not added to zeros: one read of the old one and one write less.
    added = bytes_us(view, facts.parameters * BYTES.get(facts.parameter_dtype, 4) * 2)
    # A graph that is to be kept takes sums that make new tensors.
    adding = ("aten::add_", "aten::add") if facts.create_graph else ("aten::add_",)
    sums = sum(row.time_us for row in view.rows if row.phase == "backward" and row.op in adding)
    time = sum(row.time_us for row in zeroed)
    return Change(
        worst=Saving(device_us=time),
        best=Saving(device_us=time + min(added, sums), host_us=launching_us(view, zeroed) if view.on_gpu else 0.0),
        basis=f"{share(view, zeroed, step)} zero gradients that backward then adds to",
    )
