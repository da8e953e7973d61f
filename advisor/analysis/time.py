"""How long a step takes, how steadily, and what it spends its device time on."""

from __future__ import annotations

from collections.abc import Callable

from advisor.analysis import rows
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow, StepProfile
from advisor.core.provenance import Provenance

NO_STEP = "no step was timed"
NO_ROWS = "no kernel or operator was traced"
OUTLIER = 1.5  # medians; by the definition of step_outlier_frac
# Reasons for which loop/steps.py leaves out a step that an epoch begins with.
EPOCH_BEGINS = ("new epoch", "evaluation")

_KINDS = ("conv", "gemm", "norm", "activation", "pool", "reduce", "upsample", "concat", "dropout", "loss", "comm")
_BY_ROW: dict[str, Callable[[KernelRow], bool]] = {
    "batchnorm": rows.is_batchnorm,
    "groupnorm": rows.is_groupnorm,
    "layernorm": rows.is_layernorm,
    "padding": rows.is_padding,
    "volume_pool": rows.is_volume_pooling,
    "prelu": rows.is_prelu,
    "elementwise": lambda row: row.kind in ("activation", "elementwise") and not rows.is_cast(row),
}


def fill(view: View, table: MetricTable) -> None:
    """Set step time, throughput, limit and the shares by phase and kind."""
    _step(view, table)
    profile = view.profile
    if view.on_gpu and profile.cost.traced_steps:
        table.set("coverage_frac", profile.cost.coverage_frac)
    if profile.cost.traced_steps:
        table.set("traced_overhead_frac", profile.cost.overhead_frac)
    else:
        table.miss("traced_overhead_frac", "no step was traced")

    phases, modelled = ("forward", "backward", "optimizer"), ("se", "bn_act", "unnormed_elementwise", "written_norm")
    names = (*phases, *_KINDS, *_BY_ROW, *modelled)
    if view.device_us <= 0:
        for name in names:
            table.miss(f"{name}_frac", NO_ROWS)
        return
    for phase in phases:
        table.set(f"{phase}_frac", view.share(lambda row, phase=phase: row.phase == phase))  # type: ignore[misc]  # mypy takes a default as an argument
    for kind in _KINDS:
        table.set(f"{kind}_frac", view.share(lambda row, kind=kind: row.kind == kind))  # type: ignore[misc]  # mypy takes a default as an argument
    for name, wanted in _BY_ROW.items():
        table.set(f"{name}_frac", view.share(wanted))

    table.set(
        "se_frac",
        view.share(view.squeeze_excite()),
        Provenance.MODELLED,
        "by class names; a block whose own forward runs no kernel is not seen",
    )
    containers = view.normalised_containers()
    table.set(
        "bn_act_frac",
        view.share(lambda row: rows.is_batchnorm(row) or view.is_after_norm(row, containers)),
        Provenance.MODELLED,
        "adds and activations counted where a batch norm stands in the same module",
    )
    table.set(
        "unnormed_elementwise_frac",
        view.share(view.unnormed()),
        Provenance.MODELLED,
        "counted where no batch norm stands in the same module",
    )
    table.set("written_norm_frac", view.share(view.written_norm()), Provenance.MODELLED, "by class names")


def no_limit(profile: StepProfile) -> str:
    """Why no limit is known."""
    doubt = profile.environment.rates_doubt
    return (
        f"the machine's rates are in doubt: {doubt}"
        if doubt
        else "needs the machine's measured rates and the operators' shapes"
    )


def _step(view: View, table: MetricTable) -> None:
    profile, spread = view.profile, view.profile.step_us or view.profile.wall_us
    batch = profile.model.batch_size or profile.input.batch_size
    if batch:
        table.set("batch_size", batch)
    else:
        table.miss("batch_size", "no batch dimension was seen")
    names = (
        *("step_us", "step_spread_frac", "steps_measured", "step_outlier_frac", "epoch_frac", "samples_per_s"),
        "limit_frac",
    )
    table.miss("first_step_ratio", "the first step was not seen from its beginning")
    if profile.limit_us > 0:
        table.set("limit_us", profile.limit_us, Provenance.MODELLED)
    else:
        table.miss("limit_us", no_limit(profile))
    if spread is None or spread.median <= 0:
        for name in names:
            table.miss(name, NO_STEP)
        return
    step = profile.typical_us
    table.set("step_us", step)
    table.set("steps_measured", spread.n)
    if spread.n > 1:
        table.set("step_spread_frac", (spread.p90 - spread.p10) / spread.median)
    else:
        table.miss("step_spread_frac", "one step has no spread")
    if spread.raw:
        table.set("step_outlier_frac", sum(t > OUTLIER * spread.median for t in spread.raw) / len(spread.raw))
    else:
        table.miss("step_outlier_frac", "single step times were not kept")
    begun = sum(profile.excluded.get(reason, 0) for reason in EPOCH_BEGINS)
    table.set("epoch_frac", begun / (spread.n + sum(profile.excluded.values())))
    if batch:
        table.set("samples_per_s", batch / step * 1e6)
    else:
        table.miss("samples_per_s", "no batch dimension was seen")
    if profile.limit_us > step:
        table.miss("limit_frac", "the step is faster than the machine's measured rates allow")
    elif profile.limit_us > 0:
        table.set("limit_frac", profile.limit_us / step, Provenance.MODELLED)
    else:
        table.miss("limit_frac", no_limit(profile))
