"""How much memory the step holds, how it grows, and how often it is asked for."""

from __future__ import annotations

from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance

BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
# Tensors of a parameter's size that torch.optim keeps for each parameter, by class (torch.optim documentation).
# SGD keeps a momentum buffer only with momentum; the profile does not tell, so it counts as kept.
STATES = {
    "SGD": 1,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "RMSprop": 1,
    "Rprop": 2,
    "Muon": 1,
}


def _growth(view: View, table: MetricTable) -> None:
    """What grows by the step, and after how long what there is of memory is taken."""
    stats = view.profile.memory
    free = stats.total_bytes - stats.peak_allocated_bytes if view.on_gpu else stats.host_free_bytes
    few = "memory was read too seldom to tell a trend"
    if stats.growth_bytes is not None:
        table.set("memory_growth_bytes", stats.growth_bytes)
        table.set("memory_growth_steady", stats.growth_steady)
    else:
        for name in ("memory_growth_bytes", "memory_growth_steady"):
            table.miss(name, few)
    steady = stats.growth_bytes if stats.growth_steady else None
    _until_full(view, table, "memory_full_us", steady, free)
    if stats.host_growth_bytes is not None:
        table.set("host_growth_bytes", stats.host_growth_bytes)
    else:
        table.miss("host_growth_bytes", few)
    _until_full(view, table, "host_full_us", stats.host_growth_bytes, stats.host_free_bytes)


def _until_full(view: View, table: MetricTable, name: str, growth: float | None, free: int) -> None:
    if growth is None or growth <= 0:
        table.miss(name, "nothing grows steadily")
    elif free <= 0 or view.step_us <= 0:
        table.miss(name, "what is free of memory is not known, or no step was timed")
    else:
        table.set(name, free / growth * view.step_us, Provenance.MODELLED, "at this rate")


def fill(view: View, table: MetricTable) -> None:
    """Set memory peaks, churn and the split into state and activations."""
    stats, facts = view.profile.memory, view.profile.model
    allocated, reserved = stats.peak_allocated_bytes, stats.peak_reserved_bytes
    if allocated:
        table.set("peak_allocated_bytes", allocated)
    else:
        table.miss("peak_allocated_bytes", "memory was not sampled")
    _growth(view, table)
    if stats.gc_calls is not None:
        table.set("gc_calls", stats.gc_calls)
        table.set("gc_us", stats.gc_us)
    else:
        for name in ("gc_calls", "gc_us"):
            table.miss(name, "collections of Python's garbage were not counted")
    if stats.allocations:
        table.set("allocs_per_step", stats.allocations)
    else:
        table.miss("allocs_per_step", "allocator requests were not counted")
    if view.on_gpu and allocated:
        table.set("device_allocs", stats.device_allocations)
        table.set("alloc_retries", stats.retries)
        if stats.empty_cache_calls is not None:
            table.set("empty_cache_calls", stats.empty_cache_calls)
        else:
            table.miss("empty_cache_calls", "calls of empty_cache were not counted")
        if reserved and stats.total_bytes:
            table.set("peak_memory_frac", reserved / stats.total_bytes)
        if reserved:
            table.set("reserved_ratio", reserved / allocated)
    size = BYTES.get(facts.parameter_dtype)
    if not facts.parameters or size is None:
        for name in ("parameter_bytes", "state_bytes", "activation_bytes"):
            table.miss(name, "the model's parameters were not seen")
        return
    parameters = facts.parameters * size
    table.set("parameter_bytes", parameters)
    states = STATES.get(facts.optimizers[0]) if facts.optimizers else None
    if states is None:
        for name in ("state_bytes", "activation_bytes"):
            table.miss(name, "the optimizer's state per parameter is not known")
        return
    state = parameters * (2 + states)
    basis = f"parameters, gradients and {states} tensors of {facts.optimizers[0]}"
    table.set("state_bytes", state, Provenance.MODELLED, basis)
    if allocated > state and view.on_gpu:
        table.set("activation_bytes", allocated - state, Provenance.MODELLED, f"peak minus {basis}")
    else:
        table.miss("activation_bytes", "needs the device's peak memory above the modelled state")
