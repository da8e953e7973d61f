"""Large slices of a step that no card is about: silence about them is not "nothing to do". Pure."""

from __future__ import annotations

from advisor.core.findings import Findings
from advisor.core.profile import StepProfile
from advisor.reporting import breakdown

LARGE_FRAC = 0.25  # of the step: a slice that somebody must explain
_MEANT = frozenset({"conv", "gemm"})
# Metrics that tell how large a slice is, beside the one that has its name.
ALSO_TOLD_BY = {
    "idle_data": ("data_wait_frac", "loader_frac", "loader_late_frac", "normalise_frac", "epoch_start_frac", "epoch_make_frac"),
    "idle_launch": ("host_frac", "optimizer_host_frac", "idle_frac"),
    "idle_sync": ("idle_frac",),
    "idle_copy": ("h2d_frac", "idle_frac"),
    "idle_other": ("host_frac", "idle_frac"),
    "norm": ("batchnorm_frac", "groupnorm_frac", "layernorm_frac", "bn_act_frac", "norm_efficiency"),
    "elementwise": ("bias_act_frac", "bn_act_frac", "unnormed_elementwise_frac", "written_norm_frac", "cast_frac", "se_frac"),
    "activation": ("elementwise_frac", "bias_act_frac", "bn_act_frac", "unnormed_elementwise_frac", "se_frac"),
    "other": ("custom_kernel_frac", "cupy_kernel_frac", "index_frac", "fp64_frac", "se_frac", "written_norm_frac", "average_frac"),
    "copy": ("device_copy_frac", "cast_frac", "weight_cast_frac"),
}  # fmt: skip


def slices(profile: StepProfile, findings: Findings) -> tuple[breakdown.Cause, ...]:
    """Slices of the step of which a quarter of it and more is above their limit, and no cause on a card is about them: none of its
    conditions reads how large they are. Convolutions and matrix products are what a step is for.
    """
    read = {
        evidence.metric
        for card in findings.cards
        for rule in (card.rule, *card.reasons)
        if findings.of(rule).role == "cause"
        for evidence in findings.of(rule).evidence
    }
    found = breakdown.causes(profile) or _waiting(profile)
    large = (c for c in found if c.key not in _MEANT and _above_limit(c) >= LARGE_FRAC)
    return tuple(c for c in large if not read & {f"{c.key}_frac", *ALSO_TOLD_BY.get(c.key, ())})


def _above_limit(cause: breakdown.Cause) -> float:
    return cause.frac * max(0.0, 1.0 - cause.limit_us / cause.time_us) if cause.time_us > 0 else 0.0


def _waiting(profile: StepProfile) -> tuple[breakdown.Cause, ...]:
    """What an untraced step waits in its loader's `next()`, where nothing was traced to divide the rest."""
    step, waits = profile.typical_us, profile.input.next_us
    if not step > 0 or not waits > 0:
        return ()
    return (
        breakdown.Cause(
            key="idle_data", label=breakdown.HOST_LABELS["data"], time_us=waits, frac=min(1.0, waits / step), idle=True
        ),
    )
