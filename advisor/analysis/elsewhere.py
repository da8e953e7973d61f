"""Of a trace that was made elsewhere only what it carries is told: facts of live objects, rates and memory were never gathered."""

from __future__ import annotations

from advisor.analysis.rows import HALF, MATRIX
from advisor.analysis.view import View
from advisor.core import architectures
from advisor.core.metrics import SPECS, MetricTable
from advisor.core.provenance import Provenance

NOT_CARRIED = "a trace made elsewhere does not carry it"
_SECTIONS = ("where the time goes", "launches", "synchronisation")
_CARRIED = frozenset(
    [
        "on_gpu",
        "arch",
        "step_us",
        "step_spread_frac",
        "steps_measured",
        "step_outlier_frac",
        "coverage_frac",
        "tensor_core_frac",
        "tensor_eligible_frac",
        "fp32_conv_frac",
        "fp64_frac",
        "fp64_promotions",
        "half_frac",
        "half_dtype",
        "unaligned_channel_frac",
        "weight_casts",
        "amp_capable_loss",
        "conv_backward_frac",
        "conv_backward_us",
        "transposed_conv_frac",
        "winograd_eligible_frac",
        "fft_eligible_frac",
        "fixed_shapes",
        "bn_act_count",
        "compiled",
        "graphed",
        "checkpointing",
        "optimizer",
        "optimizer_fused",
        "optimizer_foreach",
        "optimizer_kernels",
        "average_frac",
        "average_calls",
        "loader",
        "loader_us",
        "loader_frac",
        "data_wait_frac",
        "h2d_frac",
        "h2d_overlap_frac",
        "h2d_pageable_frac",
        "h2d_gbps",
        "h2d_copies",
        "d2h_copies",
        "h2d_bytes",
        "d2h_bytes",
        "comm_exposed_frac",
        "world_size",
        "cupy_kernel_frac",
        "custom_kernel_frac",
        "advisor_kernel_frac",
    ]
)
_NOT_OF_SECTIONS = frozenset({"launch_blocking"})


def only_carried(view: View, table: MetricTable) -> None:
    """Take back what the trace does not carry, and tell what its rows say in place of the live objects."""
    for spec in SPECS:
        carried = (spec.section in _SECTIONS and spec.name not in _NOT_OF_SECTIONS) or spec.name in _CARRIED
        if not carried:
            table.miss(spec.name, NOT_CARRIED)
    matrix = [row for row in view.rows if row.kind in MATRIX]
    if any(row.dtype for row in matrix):
        half = next((row.dtype for row in matrix if row.dtype in HALF), "")
        table.set("autocast", half, Provenance.MODELLED, "the dtype of convolutions and products in the trace")
    convs = [row for row in matrix if row.kind == "conv" and row.layout]
    if convs:
        nhwc = sum(row.time_us for row in convs if row.layout == "nhwc")
        table.set("channels_last", nhwc > 0.5 * sum(row.time_us for row in convs))
    if view.on_gpu and view.profile.environment.sm_arch:
        newer = view.profile.environment.sm_arch >= architectures.BF16
        table.set("bf16_supported", newer, Provenance.MODELLED, "by the GPU's architecture")
