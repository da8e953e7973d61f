"""Layout of convolutions, their algorithms, and their biases."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.analysis.conv import bias_row
from advisor.analysis.predictions.basis import (
    MATRIX_BEST,
    MATRIX_WORST,
    POINTWISE_BEST,
    bytes_us,
    gain_to,
    launching_us,
    limit_us,
    nothing,
    own_dtype,
    share,
)
from advisor.analysis.rows import is_batchnorm, is_groupnorm, shapes_of
from advisor.analysis.view import View
from advisor.analysis.whatif import OP_HIGH_US, Change, Saving, Step
from advisor.core.profile import KernelRow
from advisor.core.units import percent_text

# Depthwise 3x3 NHWC forward on one H200: 0.291 ms needed, 0.513 ms taken.
DEPTHWISE_BEST = 0.57
# Grouped convolutions in NHWC made RegNetY-8GF 3.2 times slower (timm's benchmark, RTX 3090); on one H200 they gained.
GROUPED_NHWC_WORST = 3.2
# Depthwise 27x27 to 31x31 in NHWC on one H200: 97 ms became 138 ms.
LARGE_DEPTHWISE_NHWC, LARGE_KERNEL = 1.42, 13
# Share of a convolution's time that NHWC saves on a CPU. Measured on 2 cores of an x86 server (torch 2.13, medians of 5
# steps): ResNet-18 at 32x32 saved 22 % of its step, at 96x96 lost 6 %; MobileNetV2 at half width saved 39 %.
CPU_NHWC_WORST, CPU_NHWC_BEST, CPU_DEPTHWISE_NHWC_BEST = -0.1, 0.4, 0.75
# The same machine, share of an operator's time forward and backward: windows of pools 60 to 79 %, bilinear upsampling 48 to
# 80 %; batch norm lost 23 % to gained 35 %, with 8 channels took 2.5 times as long; group norm took 1.6 to 5 times as long.
CPU_POOL_NHWC, CPU_UPSAMPLE_NHWC = (0.6, 0.8), (0.45, 0.8)
CPU_BATCHNORM_NHWC, CPU_THIN_BATCHNORM_NHWC, CPU_GROUPNORM_NHWC = (-0.25, 0.35), (-1.5, 0.35), (-4.0, -0.6)
CPU_THIN_CHANNELS = 16
# cudnn.benchmark with the fused optimizer gave MobileNetV3-Large 13.5 % on one H200, ResNet-50 0.4 %.
BENCHMARK_BEST = 0.15
# What is fastest by itself need not be so beside the rest: of four proven stacks on one H200 it made two 1 to 16 % slower, and
# changed the others by less than 2 %.
BENCHMARK_WORST = 0.05
# Of the convolutions' own time, what other ways than the usual one saved on one H200; and what a call through the choice takes the host.
CHOICE_BEST, CHOICE_CALL_US = 0.3, 9.0
# What PyTorch runs slower in NCHW: cuDNN's batch norm transposes (cudnn-frontend issue 134), bilinear upsampling's backward adds
# atomically. A UNet on one H200 saved 43 % of its step, of which convolutions and layout kernels were 46 % together.
_NHWC_FASTER = ("norm", "upsample", "pool")


NO_CUDNN = "cuDNN is switched off: convolutions are products of single samples, in any layout"


# Of the conversions that cuDNN puts around a convolution in NCHW: none is left in NHWC but those of weights, which are small.
CONVERSION_WORST = 0.8


def channels_last(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """No conversions between layouts, and what runs faster in NHWC, or slower."""
    convs = [row for row in view.rows if row.kind == "conv"]
    if view.on_gpu and not view.profile.model.flags.get("cudnn_enabled", True):
        return nothing(NO_CUDNN)
    if view.profile.model.weights_channels_last:
        return nothing("the script has put its convolutions in channels_last")
    if view.profile.model.channels_last or (convs and all(row.layout == "nhwc" for row in convs)):
        return _nhwc_weights(view, step)
    if not convs:
        return nothing("no convolution in the step")
    worst = best = 0.0
    for row in view.rows:
        limit = limit_us(view, row, dtype=own_dtype(row))
        if row.kind == "layout":
            # Its share of the convolution's limit stays: the work is then the convolution's alone.
            best += max(0.0, row.time_us - limit / MATRIX_BEST)
            if view.on_gpu and "convolution" in row.op:
                worst += CONVERSION_WORST * row.time_us  # at worst the kernel between them is as slow as it was
            elif view.on_gpu:
                worst += max(0.0, row.time_us - limit / MATRIX_WORST)
        elif view.on_gpu and row.kind in ("elementwise", "reduce") and bias_row(view, row):
            # In NCHW each channel's bias is added, and its gradient summed, over planes of its own; in NHWC over whole rows.
            best += gain_to(row.time_us, limit / POINTWISE_BEST)
        elif row.kind in _NHWC_FASTER and view.on_gpu:
            best += gain_to(row.time_us, limit / POINTWISE_BEST)
        elif row.kind == "conv":
            saved = _nhwc_conv(view, row, limit)
            worst, best = worst + saved[0], best + saved[1]
        elif not view.on_gpu and (shares := _nhwc_on_cpu(row)):
            worst, best = worst + shares[0] * row.time_us, best + shares[1] * row.time_us
    moved = 2 * bytes_us(view, view.profile.input.batch_bytes)  # the batch is read and written once in the new layout
    layout = [row for row in view.rows if row.kind == "layout"]
    told = "at their limits at best; grouped and large depthwise ones may lose"
    if not view.on_gpu:
        told = f"of which NHWC saves {percent_text(CPU_NHWC_WORST)} to {percent_text(CPU_NHWC_BEST)}, of depthwise ones up to {percent_text(CPU_DEPTHWISE_NHWC_BEST)}"
        others = [row for row in view.rows if _nhwc_on_cpu(row)]
        told += f"; {share(view, others, step)} pool, upsample and normalise, each in another way" if others else ""
    basis = f"{share(view, layout, step)} convert layouts; {share(view, convs, step)} are convolutions, {told}"
    return Change(worst=Saving(device_us=worst - moved), best=Saving(device_us=best - moved), basis=basis)


def _nhwc_weights(view: View, step: Step) -> Change:
    """Images that come in NHWC take the convolutions along; what is left to convert is their weights, there and back."""
    layout = [row for row in view.rows if row.kind == "layout"]
    if not layout:
        return nothing("convolutions already run in channels_last")
    basis = f"convolutions already run in NHWC; {share(view, layout, step)} convert layouts, weights' among them"
    return Change(worst=Saving(), best=Saving(device_us=sum(row.time_us for row in layout)), basis=basis)


def _nhwc_conv(view: View, row: KernelRow, limit: float) -> tuple[float, float]:
    geometry = view.geometry(row)
    if not view.on_gpu:
        depthwise = geometry is not None and geometry.depthwise
        return (row.time_us * CPU_NHWC_WORST, row.time_us * (CPU_DEPTHWISE_NHWC_BEST if depthwise else CPU_NHWC_BEST))
    if geometry is not None and geometry.grouped:
        return (row.time_us * (1 - GROUPED_NHWC_WORST), gain_to(row.time_us, limit / MATRIX_BEST))
    if geometry is not None and geometry.depthwise:
        large = max(geometry.kernel, default=0) >= LARGE_KERNEL
        worst = row.time_us * (1 - LARGE_DEPTHWISE_NHWC) if large else 0.0
        return (worst, 0.0 if large else gain_to(row.time_us, limit / DEPTHWISE_BEST))
    return (0.0, gain_to(row.time_us, limit / MATRIX_BEST))


def _nhwc_on_cpu(row: KernelRow) -> tuple[float, float] | None:
    """Worst and best share of its time that NHWC saves of what is no convolution, on a CPU; None for what it leaves alone."""
    if row.kind == "upsample":
        return CPU_UPSAMPLE_NHWC
    if row.kind == "pool":
        return None if "adaptive" in row.op else CPU_POOL_NHWC
    if is_batchnorm(row):
        thin = any(len(shape) == 4 and shape[1] < CPU_THIN_CHANNELS for shape in shapes_of(row))
        return CPU_THIN_BATCHNORM_NHWC if thin else CPU_BATCHNORM_NHWC
    return CPU_GROUPNORM_NHWC if is_groupnorm(row) else None


def cudnn_benchmark(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """A part of the distance between convolutions and their limit."""
    facts = view.profile.model
    if not facts.flags.get("cudnn_enabled", True):
        return nothing(NO_CUDNN)
    if facts.flags.get("cudnn_benchmark"):
        return nothing("cudnn.benchmark is already on")
    if not facts.fixed_shapes:
        return nothing("input shapes change, and each shape would be tuned again")
    convs = [row for row in view.rows if row.kind == "conv"]
    if not convs:
        return nothing("no convolution in the step")
    gap = sum(gain_to(row.time_us, limit_us(view, row, dtype=own_dtype(row)) / MATRIX_BEST) for row in convs)
    basis = f"distance of {share(view, convs, step)} from their limit; other algorithms rarely close much of it"
    return Change(
        worst=Saving(device_us=-BENCHMARK_WORST * step.step_us / max(step.scale, 1e-9)),
        best=Saving(device_us=min(gap, BENCHMARK_BEST * step.step_us / max(step.scale, 1e-9))),
        basis=basis,
    )


def conv_choice(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """A part of the distance between convolutions and their limit, less a call of Python for each product."""
    facts = view.profile.model
    if not facts.flags.get("cudnn_enabled", True):
        return nothing(NO_CUDNN)
    if not facts.fixed_shapes:
        return nothing("input shapes change, and each shape would be timed again")
    convs = [row for row in view.rows if row.kind == "conv"]
    if not convs:
        return nothing("no convolution in the step")
    gap = sum(gain_to(row.time_us, limit_us(view, row, dtype=own_dtype(row)) / MATRIX_BEST) for row in convs)
    calls = sum(row.calls for row in convs)
    return Change(
        worst=Saving(device_us=0.0, host_us=-CHOICE_CALL_US * calls),
        best=Saving(device_us=min(gap, CHOICE_BEST * sum(row.time_us for row in convs))),
        basis=f"distance of {share(view, convs, step)} from their limit; a product whose usual way is the fastest keeps it",
    )


def conv_bias(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """No additions that a batch norm takes away again."""
    normalised = {fact.module for fact in view.profile.model.convs if fact.bias and fact.followed_by_bn}

    def wanted(row: KernelRow) -> bool:
        fact = view.fact(row)
        return fact is not None and fact.module in normalised and bias_row(view, row)

    chosen = [row for row in view.rows if wanted(row)]
    if not chosen:
        return nothing("no kernel of a bias before a batch norm stands alone")
    forward = [row for row in chosen if row.phase == "forward"]
    # Beside what they launch, each bias is a parameter more: its gradient is accumulated and zeroed, and the optimizer steps it.
    host = launching_us(view, chosen) + len(normalised) * OP_HIGH_US if view.on_gpu else 0.0
    return Change(
        worst=Saving(device_us=sum(row.time_us for row in forward)),
        best=Saving(device_us=sum(row.time_us for row in chosen), host_us=host),
        basis=f"{share(view, chosen, step)} add biases before batch norms or sum their gradients",
    )
