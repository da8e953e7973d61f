"""In which precision the step computes, and whether tensor cores are used."""

from __future__ import annotations

from advisor.analysis.conv import FEW_CHANNELS
from advisor.analysis.rows import HALF, MATRIX, SINGLE, is_strict_linear, shapes_of
from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance

# Tensor cores take fp16/bf16 operands in 16-byte rows. Source: NVIDIA, "Mixed precision training" guide: multiples of 8.
ALIGNMENT = 8
_OF_ROWS = ("guides_frac", "guides_fp32_frac", "strict_linear_frac", "amp_capable_loss", "half_rate_ratio")


def fill(view: View, table: MetricTable) -> None:
    """Set shares by dtype and the script's own precision settings."""
    facts = view.profile.model
    table.set("autocast", facts.autocast)
    table.set("grad_scaler", facts.grad_scaler)
    table.set("parameter_dtype", facts.parameter_dtype)
    for flag in ("tf32_conv", "tf32_matmul"):
        if flag in facts.flags:
            table.set(flag, facts.flags[flag])
        else:
            table.miss(flag, "the script's backend flags were not read")
    names = ("tensor_eligible_frac", "fp32_conv_frac", "half_frac", "unaligned_channel_frac")
    if view.device_us <= 0:
        for name in (*names, *_OF_ROWS):
            table.miss(name, NO_ROWS)
        return
    # autocast raises on binary_cross_entropy of probabilities; every other operator has a rule or runs as it is.
    table.set("amp_capable_loss", not any(_refused(row) for row in view.rows))
    matrix = view.time_us(lambda row: row.kind in MATRIX)
    table.set("tensor_eligible_frac", matrix / view.device_us)
    known = any(row.dtype for row in view.rows)
    table.set("guides_frac", view.share(view.profile.guided))
    if known:
        fp32 = [row for row in view.rows if row.kind in MATRIX and row.dtype in SINGLE]
        table.set("fp32_conv_frac", sum(row.time_us for row in fp32) / view.device_us)
        table.set("guides_fp32_frac", sum(row.time_us for row in fp32 if view.profile.guided(row)) / view.device_us)
        table.set("strict_linear_frac", view.share(is_strict_linear))
        table.set("fp64_frac", view.share(lambda row: row.dtype == "fp64"))
        table.set("fp64_promotions", sum(site.calls for site in view.profile.promotions))
    else:
        for name in ("fp32_conv_frac", "guides_fp32_frac", "strict_linear_frac", "fp64_frac", "fp64_promotions"):
            table.miss(name, "the trace holds no dtypes")
    if matrix <= 0:
        for name in (
            "half_frac",
            "unaligned_channel_frac",
            "half_rate_ratio",
            *(("tensor_core_frac",) if view.on_gpu else ()),
        ):
            table.miss(name, "the step has no convolution or matrix product")
        return
    _half_rate(view, table)
    if view.on_gpu:
        table.set("tensor_core_frac", view.time_us(lambda row: row.kind in MATRIX and row.tensor_core) / matrix)
    if not known:
        for name in ("half_frac", "unaligned_channel_frac"):
            table.miss(name, "the trace holds no dtypes")
        return
    half = [row for row in view.rows if row.kind in MATRIX and row.dtype in HALF]
    table.set("half_frac", sum(row.time_us for row in half) / matrix)
    sized = [(row, channels) for row in half if (channels := _channels(view, row))]
    if sized:
        time = sum(row.time_us for row, _ in sized)
        odd = sum(row.time_us for row, channels in sized if any(c % ALIGNMENT for c in channels))
        table.set("unaligned_channel_frac", odd / time)
    else:
        table.miss("unaligned_channel_frac", "no half-precision product with known channels")


def _half_rate(view: View, table: MetricTable) -> None:
    """How many times as fast the products now in fp32 would be in half precision, by the rates measured here."""
    rates, flags = view.profile.environment.matrix_tflops, view.profile.model.flags
    half = rates.get("bf16") or rates.get("fp16") or 0.0
    now = ideal = 0.0
    for row in view.rows:
        if row.kind not in MATRIX or row.dtype not in SINGLE:
            continue
        # A device without a TF32 rate has no TF32, whatever the flag says.
        tf32 = flags.get("tf32_conv" if row.kind == "conv" else "tf32_matmul", False) and rates.get("tf32", 0.0)
        rate = rates.get("tf32", 0.0) if tf32 or row.dtype == "tf32" else rates.get("fp32", 0.0)
        now += row.time_us
        ideal += row.time_us * rate
    if half > 0 and ideal > 0:
        table.set("half_rate_ratio", half * now / ideal, Provenance.MODELLED, "measured rates, weighted by time")
    elif half > 0 and not now:
        table.miss("half_rate_ratio", "no product in fp32 was traced")
    else:
        table.miss("half_rate_ratio", "needs measured half-precision and fp32 matrix rates")


def _refused(row: KernelRow) -> bool:
    operator = row.op or row.name
    return "binary_cross_entropy" in operator and "with_logits" not in operator


def _channels(view: View, row: KernelRow) -> tuple[int, ...]:
    """Channels that must be aligned: of input and output; of a depthwise convolution none, as it uses no tensor cores.

    An image's own channels are as many as they are, and libraries have kernels for them: first-convolution-slow.
    """
    if row.kind == "conv":
        geometry = view.geometry(row)
        if geometry is None or geometry.depthwise:
            return ()
        out_channels = geometry.out_channels // geometry.groups
        if geometry.in_channels <= FEW_CHANNELS:
            return (out_channels,)
        return (geometry.in_channels // geometry.groups, out_channels)
    matrices = [shape for shape in shapes_of(row) if len(shape) >= 2]
    return (matrices[0][-1], matrices[1][-1]) if len(matrices) >= 2 else ()
