"""How parameters are updated."""

from __future__ import annotations

from advisor.analysis.rows import launches
from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow


def fill(view: View, table: MetricTable) -> None:
    """Set the optimizer's class, its implementation, its kernels and its host time per step."""
    facts = view.profile.model
    if facts.optimizers:
        table.set("optimizer", facts.optimizers[0])
        table.set("optimizer_fused", facts.optimizer_fused)
        table.set("zero_grad_to_none", facts.zero_grad_to_none and not (facts.gradients_stay and zeroing(view)))
        table.set("grad_clipping", facts.grad_clipping)
        table.set("accumulation", facts.accumulation)
        _foreach(view, table)
    else:
        for name in (
            "optimizer",
            "optimizer_fused",
            "zero_grad_to_none",
            "grad_clipping",
            "accumulation",
            "optimizer_foreach",
        ):
            table.miss(name, "no torch optimizer was seen")
    _average(view, table)
    traced_us = view.profile.cost.traced_step_us
    if not view.on_gpu:
        table.miss("optimizer_host_frac", "needs a CUDA GPU")
    elif view.profile.optimizer_host_us > 0 and traced_us > 0:
        table.set("optimizer_host_frac", min(1.0, view.profile.optimizer_host_us / traced_us))
    else:
        table.miss("optimizer_host_frac", "the trace holds no range of an optimizer's step")
    if view.rows:
        table.set("optimizer_kernels", launches(row for row in view.rows if row.phase == "optimizer"))
        table.set("own_optimizer_calls", launches(own_update(view)))
    else:
        for name in ("optimizer_kernels", "own_optimizer_calls"):
            table.miss(name, NO_ROWS)


def zeroing(view: View) -> list[KernelRow]:
    """Rows that zero gradients in place: by `zero_grad`, or by a loop of the script's over gradients that stay."""
    facts = view.profile.model
    if facts.zero_grad_to_none and not facts.gradients_stay:
        return []
    return [row for row in view.rows if "zero" in row.op and row.phase != "forward"]


def one_by_one(row: KernelRow) -> bool:
    """Arithmetic on one tensor: what a multi-tensor operator does to each of its own is told under that operator's name."""
    return row.kind in ("optimizer", "average") and not several_at_once(row)


def own_update(view: View) -> list[KernelRow]:
    """Rows of an update that is no code of torch.optim's, one tensor each: of an optimizer of the script's, or written by hand without one."""
    facts = view.profile.model
    rows = [row for row in view.rows if row.phase == "optimizer"]
    if not facts.optimizers or facts.optimizer_own:
        return [row for row in rows if one_by_one(row)]
    # A line that runs a multi-tensor update calls torch's step(), which on a CPU counts each tensor's steps one by one (fused Adam).
    # Beside an optimizer of torch's that goes tensor by tensor nobody could tell the two apart.
    torchs = {row.source for row in rows if several_at_once(row)}
    return [row for row in rows if one_by_one(row) and row.source not in torchs] if torchs else []


def several_at_once(row: KernelRow) -> bool:
    """A multi-tensor operator."""
    return row.op.startswith(("aten::_foreach_", "aten::_fused_"))


def _average(view: View, table: MetricTable) -> None:
    rows = [row for row in view.rows if row.phase == "average"]
    if any(row.source for row in view.rows):
        table.set("ema", bool(rows))
        table.set("average_frac", view.share(lambda row: row.phase == "average"))
        table.set("average_calls", launches(filter(one_by_one, rows)))
    else:
        for name in ("ema", "average_frac", "average_calls"):
            table.miss(
                name, "found by the script's lines, which no row has: it runs compiled code, or nothing was traced"
            )


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
