"""StepProfile → MetricTable: what the measurements say, one question a file. Pure Python, runs anywhere."""

from __future__ import annotations

from advisor.analysis import (
    comm,
    conv,
    cupy_loop,
    cures,
    elsewhere,
    idle,
    input,
    launch,
    layout,
    machine,
    memory,
    model,
    optimizer,
    precision,
    roofline,
    settings,
    sync,
    time,
)
from advisor.analysis.view import View
from advisor.core.metrics import BY_NAME, MetricTable
from advisor.core.profile import StepProfile
from advisor.core.provenance import Provenance

QUESTIONS = (
    machine,
    settings,
    time,
    idle,
    input,
    launch,
    layout,
    precision,
    memory,
    roofline,
    conv,
    sync,
    model,
    cupy_loop,
    optimizer,
    comm,
    cures,
)


def metrics(profile: StepProfile) -> MetricTable:
    """Every metric of `core.metrics` that the profile allows, each with its provenance; the others with their reason.

    Times are per step. Shares of device time are over the traced rows (operators on a CPU); shares of the step are over
    the step timed without a profiler. A value that a collector measured directly (`profile.utilization`) fills a metric
    that rows and facts leave open or only model. On a CPU, metrics that need a GPU stay missing.
    """
    table, view = MetricTable(), View.of(profile)
    for question in QUESTIONS:
        question.fill(view, table)
    _sampled(profile, table)
    if profile.origin:
        elsewhere.only_carried(view, table)
    return table


def _sampled(profile: StepProfile, table: MetricTable) -> None:
    for name, quantity in profile.utilization.items():
        spec = BY_NAME.get(name)
        if spec is None or spec.kind == "text" or (spec.needs and profile.environment.device != "cuda"):
            continue
        known = table[name]
        if known.value is not None and not (
            known.provenance is Provenance.MODELLED and quantity.provenance is Provenance.MEASURED
        ):
            continue
        if quantity.value is None or quantity.provenance is Provenance.UNAVAILABLE:
            if quantity.reason and known.value is None:
                table.miss(name, quantity.reason)
            continue
        value = bool(quantity.value) if spec.kind == "flag" else float(quantity.value)
        table.set(name, value, quantity.provenance, quantity.reason)
