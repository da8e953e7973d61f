"""How parameters are updated."""

from __future__ import annotations

from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import View, launches
from advisor.core.metrics import MetricTable


def fill(view: View, table: MetricTable) -> None:
    """Set the optimizer's class, its implementation, its kernels and its host time per step."""
    facts = view.profile.model
    if facts.optimizers:
        table.set("optimizer", facts.optimizers[0])
        table.set("optimizer_fused", facts.optimizer_fused)
        table.set("zero_grad_to_none", facts.zero_grad_to_none)
        table.set("grad_clipping", facts.grad_clipping)
        table.set("ema", facts.ema)
        table.set("accumulation", facts.accumulation)
        _foreach(view, table)
    else:
        for name in (
            "optimizer",
            "optimizer_fused",
            "zero_grad_to_none",
            "grad_clipping",
            "ema",
            "accumulation",
            "optimizer_foreach",
        ):
            table.miss(name, "no torch optimizer was seen")
    traced_us = view.profile.cost.traced_step_us
    if not view.on_gpu:
        table.miss("optimizer_host_frac", "needs a CUDA GPU")
    elif view.profile.optimizer_host_us > 0 and traced_us > 0:
        table.set("optimizer_host_frac", min(1.0, view.profile.optimizer_host_us / traced_us))
    else:
        table.miss("optimizer_host_frac", "the trace holds no range of an optimizer's step")
    if view.rows:
        table.set("optimizer_kernels", launches(row for row in view.rows if row.phase == "optimizer"))
    else:
        table.miss("optimizer_kernels", NO_ROWS)


def _foreach(view: View, table: MetricTable) -> None:
    # Unless asked, torch.optim chooses by device; the operators that ran tell what it chose.
    known = view.profile.model.optimizer_foreach
    if known is None:
        operators = {row.op for row in view.rows if row.phase == "optimizer"}
        if not any(operators):
            table.miss("optimizer_foreach", "neither the optimizer nor the trace tells which implementation runs")
            return
        known = any("_foreach_" in op for op in operators)
    table.set("optimizer_foreach", known)
