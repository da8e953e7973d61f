"""The bundled kernels: what is fused, and families that are dispatched only where they win."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from advisor.analysis.conv import (
    dense_3x3,
    narrow_3x3,
    pointwise_before_norm,
    strided_pointwise,
    unnormed_bias,
    wide_3x3,
)
from advisor.analysis.predictions.basis import (
    Predictor,
    bytes_us,
    gain_to,
    issued,
    launching_us,
    nothing,
    share,
    trained,
)
from advisor.analysis.rows import (
    SINGLE,
    is_batchnorm,
    is_groupnorm,
    is_layernorm,
    is_own,
    is_padding,
    is_prelu,
    is_strict_fp32,
    is_strict_linear,
    is_volume_pooling,
    parent,
)
from advisor.analysis.view import Geometry, View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.profile import KernelRow
from advisor.core.units import bytes_text, percent_text

# The bundled batch-norm kernels' passes on one H200: 1,850 to 3,916 of 4,244 GB/s.
FUSED_BEST, FUSED_WORST = 0.92, 0.44
# Copies and sums of growing concatenations took 15.3 ms of DenseNet-121's step on one H200; without them it was 17.4 ms shorter.
CONCAT_MERGED = 1.0
# Operators registered through torch.library.custom_op took 45 us of host time on one H200 machine, torch's own 11 us.
CUSTOM_OP_EXTRA_US = 34.0
# Passes that become one, measured on one H200 in bf16: scale, drop path and add took a quarter of their time; squeeze-and-
# excite blocks took half forward and a quarter backward; a pooling read what the norm before it had at hand.
BIAS_ACT_MERGED, SQUEEZE_EXCITE_MERGED, POOL_MERGED = 0.75, 0.7, 0.5
# The 7x7 stem on one H200 in bf16: 7 times as fast forward, 2 to 3 times backward. The 3x3 one of a ResNet-18 on CIFAR: 25 us for 101.
FIRST_CONV_BEST = 0.75
# 3x3 convolutions of 64 channels to 64 on one H200 in bf16: forward and the input's gradient 0.6 to 0.75 of cuDNN's time, the weight's
# gradient 0.55 to 0.6, of 128 to 32 under half.
NARROW_BEST = 0.5
# 3x3 convolutions between 512 to 1,024 channels on one H200 in bf16: forward and both gradients took a quarter to two fifths less than
# cuDNN's.
WINOGRAD_BEST = 0.4
# 1x1 convolutions of stride 2 on one H200 in bf16: the three products of a ResNet-18's shortcuts at 32x32 took 29 to 40 % less than
# cuDNN's, the weight's gradient half.
STRIDED_BEST = 0.4
# A 1x1 convolution's kernel that leaves the batch norm behind it its statistics takes about what cuDNN's takes, by its bytes; the
# norm's pass over the result, which falls away, takes as long as the convolution less its input: at 64 -> 256 channels 0.7 of it.
POINTWISE_MERGED = 0.7
# Behind a norm the kernel of its data gradient spares the norm one reading and one writing of the tensor between them, measured on an H200
# in bf16: 0.65 of what cuDNN's two gradients take at 256 -> 64 channels, a third at 24 -> 72, where the norm's tensor is the smaller.
# Past this many operations a byte (CI * CO / (CI + CO)) it is not dispatched.
BEHIND_NORM_MERGED, BEHIND_NORM_INTENSITY = 0.65, 108


# Depthwise taps of 13 to 31 on one H200: forward and backward together took 1 to 6 % of cuDNN's time. Dense 31 x 31 taps by transforms: a
# tenth, of 15 half.
LARGE_TAPS, LARGE_DEPTHWISE_BEST, FFT_BEST = 11, 0.98, 0.9
# Convolutions in strict fp32 on one H200, three products together: 0.2 to 0.8 of cuDNN's time; linear layers 0.42 to 0.8 of cuBLAS's.
EXACT_BEST = 0.8


def fused_bn_act(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Batch norm, add and activation in one kernel a pass."""
    containers = view.normalised_containers()
    norms = [row for row in view.rows if is_batchnorm(row)]
    after = [row for row in view.rows if view.is_after_norm(row, containers)]
    if not norms:
        return nothing("no batch normalisation in the step")
    if view.profile.environment.copy_gbps <= 0 or not any(row.modelled_bytes > 0 for row in norms):
        return None
    touched = best = worst = 0.0
    for row in (*norms, *after):
        if row.modelled_bytes <= 0:
            continue
        touched += row.time_us
        nbytes = _fused_bytes(row, view.profile.environment.l2_bytes)
        best += bytes_us(view, nbytes) / FUSED_BEST
        worst += bytes_us(view, nbytes) / FUSED_WORST
    merged = launching_us(view, [row for row in after if row.phase == "forward"])
    # The kernels are for NHWC: without it nothing is put in place.
    nhwc = view.profile.model.channels_last or all(row.layout == "nhwc" for row in norms)
    forward = issued(view, [row for row in norms if row.phase == "forward"])
    slow = merged - forward * CUSTOM_OP_EXTRA_US
    return Change(
        worst=Saving(device_us=touched - worst, host_us=slow) if nhwc else Saving(),
        best=Saving(device_us=gain_to(touched, best), host_us=merged),
        basis=(
            f"{share(view, (*norms, *after), step)} normalise, add and activate; in one kernel a pass they move "
            f"{bytes_text(_fused_total(view, norms, after))} at {percent_text(FUSED_WORST)} to {percent_text(FUSED_BEST)} of copy bandwidth"
        ),
    )


def _fused_bytes(row: KernelRow, cache: int) -> float:
    """Bytes that remain of a row when batch norm, add and activation are one operator a direction.

    Batch norm forward moves x and y (2 of 2 passes), and x again for the statistics unless it stays in the cache; backward
    x, dy and dx (3 of 3), x and dy again. An add keeps the read of its other operand in forward; an activation nothing.
    """
    if row.kind == "activation":
        return 0.0
    if row.kind == "elementwise":
        return row.modelled_bytes / 3
    cached = row.calls > 0 and 0 < row.modelled_bytes / row.calls <= cache
    if cached:
        return row.modelled_bytes
    return row.modelled_bytes * (5 / 3 if row.phase == "backward" else 3 / 2)


def _fused_total(view: View, norms: list[KernelRow], after: list[KernelRow]) -> float:
    return sum(_fused_bytes(row, view.profile.environment.l2_bytes) for row in (*norms, *after))


def fused_bn_concat(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """The concatenations go; the norms over them are the bundled kernels' too, unless `fused_bn_act` has them already."""
    found = _concatenations(view)
    if not found:
        return nothing("no concatenations and sums of gradients in the step")
    containers = {row.module for row in found if row.kind == "concat" and row.module}
    norms = [row for row in view.rows if is_batchnorm(row) and parent(row.module) in containers]
    after = [row for row in view.rows if row.kind == "activation" and view.is_after_norm(row, containers)]
    cache = view.profile.environment.l2_bytes
    known = [row for row in (*norms, *after) if row.modelled_bytes > 0]
    normalised = gain_to(
        sum(row.time_us for row in known),
        sum(bytes_us(view, _fused_bytes(row, cache)) for row in known) / FUSED_BEST,
    )
    told = f", and {share(view, known, step)} normalise them, where no bundled kernel does so yet" if known else ""
    return Change(
        worst=Saving(),
        best=Saving(
            device_us=CONCAT_MERGED * sum(row.time_us for row in found) + normalised,
            host_us=launching_us(view, found),
        ),
        basis=f"{share(view, found, step)} are concatenations and sums of gradients, which go{told}",
    )


def _kernel_family(
    chosen: Callable[[View], list[KernelRow]], what: str, *, merged: float = 0.0, most: float = 1.0
) -> Predictor:
    """For bundled kernels that are dispatched only where they are measured to win: from nothing gained down to the limit.

    Args:
        merged: share of the time that goes where passes become one, however near its own limit each of them is.
        most: share of the time that goes at best, where that was measured.
    """

    def predictor(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
        rows = chosen(view)
        if not rows:
            return nothing(f"no {what} in the step")
        told = f"they run at {percent_text(FUSED_BEST)} of copy bandwidth"
        told += f" or, merged, save {percent_text(merged)} of their time" if merged else ""
        told += f", and save {percent_text(most)} of their time" if most < 1.0 else ""
        best = sum(
            min(
                max(gain_to(row.time_us, bytes_us(view, row.modelled_bytes) / FUSED_BEST), merged * row.time_us),
                most * row.time_us,
            )
            for row in rows
        )
        return Change(
            worst=Saving(),
            best=Saving(device_us=best, host_us=launching_us(view, rows)),
            basis=f"{share(view, rows, step)} are {what}; at best {told}",
        )

    return predictor


def _of(wanted: Callable[[KernelRow], bool]) -> Callable[[View], list[KernelRow]]:
    return lambda view: [row for row in view.rows if trained(row) and not is_own(row) and wanted(row)]


def _concatenations(view: View) -> list[KernelRow]:
    """Concatenations and, where there are any, the additions that sum up the gradients of their parts."""
    found = _of(lambda row: row.kind == "concat")(view)
    sums = _of(lambda row: row.phase == "backward" and row.kind == "elementwise" and row.op.startswith("aten::add"))(
        view
    )
    return [*found, *sums] if found else []


def _squeeze_excite(view: View) -> list[KernelRow]:
    return list(filter(view.squeeze_excite(), view.rows))


def _depthwise(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.depthwise), view.rows))


def _large(geometry: Geometry) -> bool:
    return max(geometry.kernel, default=0) >= LARGE_TAPS and geometry.unit_stride and not geometry.transposed


def _large_depthwise(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.depthwise and _large(g)), view.rows))


def _large_dense(view: View) -> list[KernelRow]:
    of_the_kind = view.conv(lambda g: g.groups == 1 and _large(g))
    return [row for row in view.rows if row.dtype in SINGLE and of_the_kind(row)]


def _strict_dense(view: View) -> list[KernelRow]:
    of_the_kind = view.conv(lambda g: not g.depthwise and not g.transposed)
    return [row for row in view.rows if is_strict_linear(row) or (is_strict_fp32(row) and of_the_kind(row))]


def _first_convolution(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.in_channels == 3), view.rows))


def _few_channels(view: View) -> list[KernelRow]:
    """Those that are not the first convolutions' above."""

    def wanted(geometry: Geometry) -> bool:
        return geometry.groups == 1 and geometry.in_channels < 8 and not geometry.transposed

    chosen = view.conv(wanted)
    return [row for row in view.rows if chosen(row)]


def _narrow(view: View) -> list[KernelRow]:
    """Between 128 channels and 128 the gradients of weights alone, as far as kernels are named after them."""

    def between_128(geometry: Geometry) -> bool:
        return dense_3x3(geometry) and geometry.in_channels == geometry.out_channels == 128

    narrow, wider = view.conv(narrow_3x3), view.conv(between_128)
    return [row for row in view.rows if narrow(row) or ("wgrad" in row.name and wider(row))]


def _wide(view: View) -> list[KernelRow]:
    """In bf16."""
    of_the_kind = view.conv(wide_3x3)
    return [row for row in view.rows if row.dtype == "bf16" and of_the_kind(row)]


def _strided(view: View) -> list[KernelRow]:
    return list(filter(strided_pointwise(view), view.rows))


def _grouped(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.grouped), view.rows))


def grouped_conv(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Grouped convolutions, and what cuDNN slices and transposes for them in NHWC, which the bundled kernels do not need."""
    alone = _kernel_family(_grouped, "grouped convolutions")(view, step, parameters)
    around = list(filter(view.conv_layout(lambda g: g.grouped), view.rows)) if view.profile.model.channels_last else []
    if alone is None or not around:
        return alone
    best = replace(alone.best, device_us=alone.best.device_us + sum(row.time_us for row in around))
    return Change(
        worst=alone.worst, best=best, basis=f"{alone.basis}; {share(view, around, step)} slice and transpose for them"
    )


def _before_norms(view: View) -> list[KernelRow]:
    return list(filter(pointwise_before_norm(view), view.rows))


def _behind_norms(view: View) -> list[KernelRow]:
    """Backwards of 1x1 convolutions that memory bounds. What stands before them is not known; mostly it is a norm."""

    def bound_by_memory(geometry: Geometry) -> bool:
        channels, out = geometry.in_channels, geometry.out_channels
        dense = geometry.kernel == (1, 1) and geometry.groups == 1 and geometry.unit_stride and not geometry.transposed
        return dense and channels * out <= BEHIND_NORM_INTENSITY * (channels + out)

    wanted = view.conv(bound_by_memory)
    return [row for row in view.rows if row.phase == "backward" and wanted(row)]


def pointwise_conv(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """1x1 convolutions that leave the norm behind them its statistics, and the norm before them the sums of its gradient."""
    before = _kernel_family(_before_norms, "1x1 convolutions before batch norms", merged=POINTWISE_MERGED)
    behind = _kernel_family(
        _behind_norms, "gradients of 1x1 convolutions", merged=BEHIND_NORM_MERGED, most=BEHIND_NORM_MERGED
    )
    first, second = before(view, step, parameters), behind(view, step, parameters)
    if first is None or second is None:
        return first or second
    best = Saving(
        device_us=first.best.device_us + second.best.device_us, host_us=first.best.host_us + second.best.host_us
    )
    return Change(worst=Saving(), best=best, basis=f"{first.basis}; {second.basis}")


def _is_groupnorm(row: KernelRow) -> bool:
    """Of images and volumes."""
    return is_groupnorm(row) and not row.module_type.endswith("1d")


def _biases(view: View) -> list[KernelRow]:
    return [row for row in view.rows if trained(row) and not is_own(row) and unnormed_bias(view, row)]


def _bias_and_activation(view: View) -> list[KernelRow]:
    return list(filter(view.unnormed(), view.rows))


# What is fused everywhere it is found has a prediction of its own above.
fused_bn_max_pool = _kernel_family(_of(lambda row: row.kind == "pool"), "pooling", merged=POOL_MERGED)
fused_pooling = _kernel_family(_of(lambda row: row.kind == "pool" and not is_volume_pooling(row)), "pooling")
fused_upsample = _kernel_family(_of(lambda row: row.kind in ("upsample", "concat")), "upsampling and its concat")
fused_layer_norm = _kernel_family(_of(is_layernorm), "layer normalisation")
fused_group_norm = _kernel_family(_of(_is_groupnorm), "group normalisation of images and volumes")
fused_padding = _kernel_family(_of(is_padding), "padding with an image's own values")
fused_volume_pooling = _kernel_family(_of(is_volume_pooling), "pooling of volumes")
fused_squeeze_excite = _kernel_family(_squeeze_excite, "squeeze-and-excite", merged=SQUEEZE_EXCITE_MERGED)
fused_prelu = _kernel_family(_of(is_prelu), "PReLU")
fused_bias_add = _kernel_family(_biases, "biases of convolutions and their gradients")
fused_bias_act = _kernel_family(
    _bias_and_activation, "activation and addition outside of norms", merged=BIAS_ACT_MERGED
)
large_depthwise_conv = _kernel_family(
    _large_depthwise, "depthwise convolutions with large taps", merged=LARGE_DEPTHWISE_BEST, most=LARGE_DEPTHWISE_BEST
)
fft_conv = _kernel_family(_large_dense, "dense fp32 convolutions with large taps", merged=FFT_BEST, most=FFT_BEST)
exact_conv = _kernel_family(
    _strict_dense, "strict fp32 convolutions and linear layers", merged=EXACT_BEST, most=EXACT_BEST
)
depthwise_conv = _kernel_family(_depthwise, "depthwise convolutions")
first_conv = _kernel_family(_first_convolution, "convolutions of three channels", most=FIRST_CONV_BEST)
few_channels_conv = _kernel_family(_few_channels, "convolutions of fewer than eight channels", most=FIRST_CONV_BEST)
conv3x3 = _kernel_family(_narrow, "3x3 convolutions between few channels", most=NARROW_BEST)
winograd_conv = _kernel_family(
    _wide, "3x3 convolutions between many channels", merged=WINOGRAD_BEST, most=WINOGRAD_BEST
)
strided_conv = _kernel_family(
    _strided, "1x1 convolutions of stride 2, short or between few channels", most=STRIDED_BEST
)
