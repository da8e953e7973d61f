"""Which convolutions the step has, and how much time goes to the kinds that libraries do badly."""

from __future__ import annotations

import re
from collections.abc import Callable

from advisor.analysis.rows import MATRIX, is_own, is_strict_fp32, launches
from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import Geometry, View
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance
from advisor.core.units import percent_text

# By the definitions of the metrics named.
LARGE_KERNEL, FEW_CHANNELS, FFT_KERNEL = 7, 4, 9
STRIDED_FLOPS, STRIDED_INTENSITY = 0.6e9, 60.0  # a launch; channels in times channels out over their sum
NARROW = frozenset({(32, 128), (64, 64), (64, 128)})  # the fewer channels first
WIDE = 192, 1024  # channels, the least and the most
_POINTWISE = re.compile(r"^(void )?at::native::.*(elementwise|reduce)_kernel", re.IGNORECASE)


def dense_3x3(geometry: Geometry) -> bool:
    """A 3 x 3 convolution of stride 1 in one group, not dilated."""
    return _unit_3x3(geometry) and geometry.groups == 1 and all(d == 1 for d in geometry.dilation)


def narrow_3x3(geometry: Geometry) -> bool:
    """A dense 3 x 3 convolution of stride 1 between few channels. Either way: its gradient goes the other."""
    channels = (geometry.in_channels, geometry.out_channels)
    return dense_3x3(geometry) and (min(channels), max(channels)) in NARROW


def wide_3x3(geometry: Geometry) -> bool:
    """A dense 3 x 3 convolution of stride 1 between many channels."""
    least, most = WIDE
    return dense_3x3(geometry) and all(least <= c <= most for c in (geometry.in_channels, geometry.out_channels))


def strided_pointwise(view: View) -> Callable[[KernelRow], bool]:
    """A row predicate: a product of a 1 x 1 convolution of stride 2 in one group, short or between few channels."""

    def dense(geometry: Geometry) -> bool:
        return (
            geometry.kernel == (1, 1) and geometry.groups == 1 and geometry.stride == (2, 2) and not geometry.transposed
        )

    def between_few(geometry: Geometry) -> bool:
        channels, out = geometry.in_channels, geometry.out_channels
        return dense(geometry) and channels * out <= STRIDED_INTENSITY * (channels + out)

    def short(row: KernelRow) -> bool:
        # A backward's operations are shared out among its kernels by their time: one may have those of both gradients.
        return row.flops <= STRIDED_FLOPS * row.calls * (2 if row.phase == "backward" else 1)

    of_the_kind, few = view.conv(dense), view.conv(between_few)
    return lambda row: of_the_kind(row) and (few(row) or short(row))


def pointwise_before_norm(view: View) -> Callable[[KernelRow], bool]:
    """A row predicate: the forward of a 1 x 1 convolution of stride 1 in one group, without bias, into a batch norm."""
    of_the_kind = view.conv(lambda g: g.kernel == (1, 1) and g.groups == 1 and g.unit_stride and not g.transposed)

    def wanted(row: KernelRow) -> bool:
        alike = view.alike(row) if row.phase == "forward" and of_the_kind(row) else []
        return bool(alike) and all(fact.followed_by_bn and not fact.bias for fact in alike)

    return wanted


def _unit_3x3(geometry: Geometry) -> bool:
    return geometry.kernel == (3, 3) and geometry.unit_stride and not geometry.transposed


def fill(view: View, table: MetricTable) -> None:
    """Set shares of convolution time by geometry, counts, and cuDNN's settings."""
    facts = view.profile.model
    for flag in ("cudnn_benchmark", "cudnn_deterministic"):
        if flag in facts.flags:
            table.set(flag, facts.flags[flag])
        else:
            table.miss(flag, "the script's backend flags were not read")
    table.set("fixed_shapes", facts.fixed_shapes)
    _counts(view, table)
    _gradients(view, table)
    shares: dict[str, Callable[[KernelRow], bool]] = {
        "depthwise_frac": view.conv(lambda g: g.depthwise),
        "grouped_conv_frac": view.conv(lambda g: g.grouped),
        "large_conv_frac": view.conv(lambda g: max(g.kernel, default=0) >= LARGE_KERNEL and g.unit_stride),
        "first_conv_frac": view.conv(lambda g: g.in_channels <= FEW_CHANNELS and not g.transposed),
        "pointwise_bn_frac": pointwise_before_norm(view),
        "strided_1x1_frac": strided_pointwise(view),
        "narrow_3x3_frac": view.conv(narrow_3x3),
        "wide_3x3_frac": view.conv(wide_3x3),
        "conv3x3_fp32_frac": _strict(view.conv(_unit_3x3)),
        "winograd_eligible_frac": _strict(view.conv(dense_3x3)),
        "fft_eligible_frac": _fp32(view.conv(lambda g: g.groups == 1 and max(g.kernel, default=0) >= FFT_KERNEL)),
        "transposed_conv_frac": lambda row: row.kind == "conv" and _transposed(view, row),
        "bias_act_frac": _bias_act(view),
        "bias_frac": lambda row: unnormed_bias(view, row),
    }
    convs = [row for row in view.rows if row.kind == "conv"]
    if view.device_us <= 0:
        for name in shares:
            table.miss(name, NO_ROWS)
        return
    unknown = sum(row.time_us for row in convs if view.geometry(row) is None)
    total = sum(row.time_us for row in convs)
    if convs and unknown >= total:
        for name in shares:
            table.miss(name, "no convolution's shape is known")
        return
    reason = f"{percent_text(unknown / total)} of convolution time has no known shape" if unknown > 0 else ""
    for name, wanted in shares.items():
        provenance = Provenance.MODELLED if name == "bias_act_frac" else Provenance.MEASURED
        table.set(name, view.share(wanted), provenance, reason)


def _counts(view: View, table: MetricTable) -> None:
    convs = view.profile.model.convs
    forward = sum(row.calls for row in view.rows if row.kind == "conv" and row.phase == "forward")
    if convs:
        table.set("conv_count", len(convs))
        table.set("conv_bias_bn_count", sum(fact.bias and fact.followed_by_bn for fact in convs))
        table.set("grouped_conv_share", sum(fact.groups > 1 for fact in convs) / len(convs))
        table.set("max_conv_kernel", max(max(fact.kernel, default=0) for fact in convs))
        return
    if forward or view.rows:
        table.set("conv_count", forward)
    else:
        table.miss("conv_count", NO_ROWS)
    for name in ("conv_bias_bn_count", "grouped_conv_share", "max_conv_kernel"):
        table.miss(name, "no convolution module was seen")


def is_gradient(row: KernelRow) -> bool:
    """A library's kernel for a convolution's gradient, of its input or of its weight."""
    return row.op == "aten::convolution_backward" and row.kind in MATRIX and not is_own(row)


def _gradients(view: View, table: MetricTable) -> None:
    if not view.on_gpu:
        return
    chosen = [row for row in view.rows if is_gradient(row)]
    table.set("conv_backward_frac", view.share(is_gradient))
    if chosen:
        table.set("conv_backward_us", sum(row.time_us for row in chosen) / launches(chosen))
    else:
        table.miss("conv_backward_us", "no kernel of a convolution's gradient was traced")


def _strict(wanted: Callable[[KernelRow], bool]) -> Callable[[KernelRow], bool]:
    return lambda row: is_strict_fp32(row) and wanted(row)


def _fp32(wanted: Callable[[KernelRow], bool]) -> Callable[[KernelRow], bool]:
    return lambda row: row.dtype in ("fp32", "tf32") and wanted(row)


def _transposed(view: View, row: KernelRow) -> bool:
    geometry = view.geometry(row)
    return geometry is not None and geometry.transposed


def bias_row(view: View, row: KernelRow) -> bool:
    """The separate kernel that adds a convolution's bias, or sums its gradient."""
    fact = view.fact(row)
    if fact is None or not fact.bias:
        return False
    # The kernel's name tells it apart where the row's operator is the convolution itself.
    return row.kind in ("elementwise", "reduce") or (row.kind == "conv" and bool(_POINTWISE.search(row.name)))


def unnormed_bias(view: View, row: KernelRow) -> bool:
    """As `bias_row`, where no norm follows that takes the bias out again."""
    fact = view.fact(row)
    return fact is not None and not fact.followed_by_bn and bias_row(view, row)


def _bias_act(view: View) -> Callable[[KernelRow], bool]:
    biased = {fact.module for fact in view.profile.model.convs if fact.bias and not fact.followed_by_bn}
    containers = {path.rpartition(".")[0] for path in biased} - view.normalised_containers()

    def wanted(row: KernelRow) -> bool:
        if row.module in biased:
            return bias_row(view, row)
        holder = row.module if row.module in containers else row.module.rpartition(".")[0]
        return row.kind == "activation" and bool(row.module) and holder in containers

    return wanted
