"""What is trained: the modules, and how the script runs them."""

from __future__ import annotations

import re

from advisor.analysis import rows
from advisor.analysis.time import NO_ROWS, NO_STEP
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance
from advisor.resources import kernel_entries

_BATCH_NORMS = (
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LazyBatchNorm2d",
    "SyncBatchNorm",
    "BatchNormAct2d",
    "FrozenBatchNorm2d",
)
_NOT_READ = "this flag of the script was not read"


def fill(view: View, table: MetricTable) -> None:
    """Set module counts, capture state and kernels from outside torch."""
    facts, counts = view.profile.model, view.profile.model.module_counts
    if counts:
        table.set("bn_count", sum(counts.get(name, 0) for name in _BATCH_NORMS))
        table.set("se_count", sum(n for name, n in counts.items() if rows.is_squeeze_excite(name)))
    else:
        for name in ("bn_count", "se_count"):
            table.miss(name, "no module was seen")
    table.set("sync_bn_count", facts.sync_batchnorm)
    table.set("dropout", facts.dropout)
    cupy_alone = facts.flags.get("cupy_alone", False)
    table.set("cupy_alone", cupy_alone)
    if cupy_alone:
        table.miss("compiled", "the loop is CuPy's: torch.compile has no part in it")
    else:
        table.set("compiled", facts.compiled)
    table.set("graphed", facts.graphed)
    table.set("create_graph", facts.create_graph)
    table.set("clips_scaled", facts.clips_scaled)
    for name, flag in (
        ("anomaly_mode", "anomaly"),
        ("deterministic_algorithms", "deterministic_algorithms"),
        ("uses_cupy", "uses_cupy"),
    ):
        if flag in facts.flags:
            table.set(name, facts.flags[flag])
        elif name == "uses_cupy" and any(_is_cupy(row) for row in view.rows):
            table.set(name, True)
        else:
            table.miss(name, _NOT_READ)
    if any(row.phase == "backward" for row in view.rows):
        table.set("checkpointing", _checkpoints(view))
    else:
        table.miss("checkpointing", "no backward pass was traced")
    for name, value in (("graph_breaks", facts.graph_breaks), ("recompiles", facts.recompiles)):
        if value is not None:
            table.set(name, value)
        else:
            table.miss(name, "Dynamo has compiled nothing")
    _compilations(view, table)
    _bn_act_count(view, table)
    if view.on_gpu and view.device_us > 0:
        table.set("advisor_kernel_frac", view.share(lambda row: row.name in kernel_entries()))
        table.set("cupy_kernel_frac", view.share(_is_cupy))
        if facts.graphed:
            table.miss("custom_kernel_frac", "kernels of a replayed graph belong to no operator")
        else:
            table.set("custom_kernel_frac", view.share(lambda row: not row.op and row.kind not in ("comm", "memset")))


def _compilations(view: View, table: MetricTable) -> None:
    facts, window_us = view.profile.model, view.profile.window_step_us
    table.set("optimizer_compiled", facts.updates_compiled)
    if facts.recompiles is None:
        for name in ("recompile_frac", "recompiled"):
            table.miss(name, "Dynamo has compiled nothing")
        return
    spent = sum(site.time_us for site in facts.compilations)
    if window_us > 0 and (spent > 0 or not facts.recompiles):
        table.set("recompile_frac", min(1.0, spent / window_us))
    else:
        table.miss("recompile_frac", "this torch does not tell how long it compiled" if window_us > 0 else NO_STEP)
    longest = sorted(facts.compilations, key=lambda site: -site.time_us)
    named = [site.what.partition(":")[0].removeprefix("compilation of ").strip() for site in longest]
    table.set("recompiled", ", ".join(dict.fromkeys(named)))


# Operators of a module's forward: what else runs inside backward (unfold's col2im) is part of a gradient.
_FORWARD = re.compile(
    r"aten::(_?convolution|cudnn_convolution|mkldnn_convolution|\w*(batch|group|layer|instance)_norm)\w*(?<!backward)$"
)
# Of the forward's time. A script that checkpoints anything does so with a stage of its model or more.
RECOMPUTED = 0.05


def _is_cupy(row: KernelRow) -> bool:
    return row.name.startswith("cupy_")  # CuPy's own kernels carry this prefix; RawKernels have the user's names


def _checkpoints(view: View) -> bool:
    """Forward convolutions and normalisations run again inside backward, not those of a second derivative."""
    if view.profile.model.create_graph:
        return False
    heavy = [row for row in view.rows if _FORWARD.match(row.op)]
    again = sum(row.time_us for row in heavy if row.phase == "backward")
    return again > RECOMPUTED * sum(row.time_us for row in heavy if row.phase == "forward")


def _bn_act_count(view: View, table: MetricTable) -> None:
    if view.device_us <= 0:
        table.miss("bn_act_count", NO_ROWS)
        return
    norms = {row.module for row in view.rows if row.phase == "forward" and rows.is_batchnorm(row) and row.module}
    containers = view.normalised_containers()
    # Of all modules together: those that share one activation (all of a YOLO's) have it under the path of the first of them.
    activations = sum(
        row.calls
        for row in view.rows
        if row.phase == "forward" and row.kind == "activation" and view.is_after_norm(row, containers)
    )
    count = min(float(len(norms)), activations)
    table.set(
        "bn_act_count", round(count), Provenance.MODELLED, "batch norms paired with activations of the same module"
    )
