"""What else could make a convolution's product, and in which time: measured where a like convolution is on file, else the least. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from advisor.analysis import measured_convs
from advisor.analysis.conv import dense_3x3, narrow_3x3, wide_3x3
from advisor.analysis.measured_convs import MeasuredConv
from advisor.analysis.rows import HALF, SINGLE
from advisor.analysis.view import Geometry, View
from advisor.core import architectures, transform_table
from advisor.core.environment import Environment
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance
from advisor.core.roofline import limit_us, matrix_tflops
from advisor.core.transform_row import TOGETHER
from advisor.core.units import shape_text

OCTET = 8  # channels of 16 bits that a tensor core's operand is loaded by
OWN_ERROR = "its own dtype's"
LARGE_TAPS = 11  # of the families large_depthwise and fft_conv
DEPTHWISE_TAPS = (3, 5, 7, 9)
EXACT_TAPS = ((1, 1), (3, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to make a product.

    Attributes:
        what: in words. transform: of `apply`, several joined by ` + `; empty for none.
        time_us: a step. Modelled: the least that this machine needs for its bytes and operations, nothing of how near a kernel comes to it.
        provenance: measured: of a like convolution on a GPU of this name, by the work of this one; else modelled.
        like: the convolution that was measured, as `256×64×56×56`; empty for a modelled time.
        error: what it does to the numbers.
    """

    what: str
    transform: str
    time_us: float
    provenance: Provenance
    like: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A product whose alternatives are asked for.

    Attributes:
        row: its longest kernel's. shape: of the input, [N, C, ...]; empty where it is not known.
        forward: the forward, or else gradients. of_gradients: its share of the time of both gradients, which were measured together.
        calls: a step. flops, nbytes: a step; 0.0 where they are not known.
        time_us: a step, with what it drags along; conversion_us: of this, conversions.
    """

    row: KernelRow
    shape: tuple[int, ...]
    forward: bool
    of_gradients: float
    calls: float
    flops: float
    nbytes: float
    time_us: float
    conversion_us: float


def alternatives(view: View, asked: Asked) -> tuple[Alternative, ...]:
    """The fastest that was measured, then the one with the least time of those that are modelled; each only if below this product's time.

    A transform with a measured time has no modelled one beside it, be it that its kernels were measured to be slower.
    """
    if not view.on_gpu or not asked.flops:
        return ()
    near = _near(view, asked)
    measured = list(_measured(view, asked, near))
    known = {other.transform.rpartition(TOGETHER)[2] for other in measured} | near[_own_dtype(asked.row)].keys()
    modelled = [other for other in _modelled(view, asked) if other.transform not in known]
    found = []
    for others in (measured, modelled):
        faster = [other for other in others if other.time_us < asked.time_us]
        if faster:
            found.append(min(faster, key=lambda other: other.time_us))
    return tuple(found)


# ---- measured


def _own_dtype(row: KernelRow) -> str:
    return "fp32" if row.dtype in SINGLE else row.dtype


def _near(view: View, asked: Asked) -> dict[str, dict[str, measured_convs.Near]]:
    """By dtype, this product's own and bf16, and by transform the nearest rows on file."""
    row, geometry = asked.row, view.geometry(asked.row)
    on_file = measured_convs.rows(view.profile.environment.gpu_name)
    return {
        dtype: measured_convs.nearest(on_file, geometry, asked.shape, dtype, row.layout) if geometry else {}
        for dtype in dict.fromkeys((_own_dtype(row), "bf16"))
    }


def _measured(view: View, asked: Asked, near: dict[str, dict[str, measured_convs.Near]]) -> Iterator[Alternative]:
    """Kernels of advisor's, and PyTorch's own in bf16, by the nearest rows on file."""
    row, geometry = asked.row, view.geometry(asked.row)
    if geometry is None:
        return
    for dtype, by_transform in near.items():
        for transform, found in by_transform.items():
            of = found.row
            own, library = (of.forward_us, of.library_forward_us) if asked.forward else _backward(of, asked)
            scale = found.work * asked.calls
            before = ["channels_last"] * ((row.layout, of.layout) == ("nchw", "nhwc"))
            before += ["amp_bf16"] * (dtype != row.dtype and row.dtype in SINGLE and dtype == "bf16")
            words = " and ".join({"channels_last": "NHWC", "amp_bf16": "bf16"}[name] for name in before)
            takes = _takes(view.profile.environment, geometry, row, transform, dtype)
            if takes and of.taken and 0 < own < library:
                what = transform_table.title(transform) + (f" in {words}" if words else "")
                yield _on_file(what, TOGETHER.join([*before, transform]), own * scale, of.error, of)
            if "amp_bf16" in before and library > 0:
                yield _on_file(words, TOGETHER.join(before), library * scale, of.library_error, of)


def _on_file(what: str, transform: str, time_us: float, error: float, of: MeasuredConv) -> Alternative:
    return Alternative(
        what=what,
        transform=transform,
        time_us=time_us,
        provenance=Provenance.MEASURED,
        like=shape_text(of.shape),
        error=f"{error:.1e} against fp64",
    )


def _takes(environment: Environment, geometry: Geometry, row: KernelRow, transform: str, dtype: str) -> bool:
    """Whether this family is for the convolution itself too, in this dtype: a row speaks for more channels than some kernels are made for."""
    there = row if dtype == row.dtype else replace(row, dtype=dtype, tensor_core=dtype != "fp32")
    return any(name == transform and takes(environment, geometry, there) for name, takes, *_ in _FAMILIES)


def _backward(of: MeasuredConv, asked: Asked) -> tuple[float, float]:
    return of.backward_us * asked.of_gradients, of.library_backward_us * asked.of_gradients


# ---- modelled


def _modelled(view: View, asked: Asked) -> Iterator[Alternative]:
    row, environment = asked.row, view.profile.environment
    for what, transform, least, error in (*_own(view, asked), *_settings(environment, asked, row)):
        yield Alternative(
            what=what, transform=transform, time_us=least, provenance=Provenance.MODELLED, like="", error=error
        )


Least = tuple[str, str, float, str]  # what, transform, microseconds, error


def _settings(environment: Environment, asked: Asked, row: KernelRow) -> Iterator[Least]:
    """Another layout, another precision."""
    if asked.conversion_us > 0 and row.layout == "nchw":
        yield "NHWC", "channels_last", asked.time_us - asked.conversion_us, "none"
    if row.dtype not in SINGLE:
        return
    if row.dtype == "fp32" and not row.tensor_core and matrix_tflops(environment, "tf32") > 0:
        least = limit_us(environment, nbytes=asked.nbytes, flops=asked.flops, dtype="tf32")
        yield "TF32", "tf32", least, "11 bits of 24"
    if matrix_tflops(environment, "bf16") > 0:
        least = limit_us(environment, nbytes=asked.nbytes / 2, flops=asked.flops, dtype="bf16")
        yield "bf16", "amp_bf16", least, "8 bits of 24"


def _own(view: View, asked: Asked) -> Iterator[Least]:
    """Bundled kernels that take this product, as far as its geometry and dtype tell."""
    geometry, environment, row = view.geometry(asked.row), view.profile.environment, asked.row
    if geometry is None or geometry.transposed or environment.sm_arch < architectures.BUNDLED_KERNELS:
        return
    for transform, takes, least, error in _FAMILIES:
        if takes(environment, geometry, row):
            time = least(environment, geometry, asked)
            if time > 0:
                yield transform_table.title(transform), transform, time, error


def _plain(environment: Environment, geometry: Geometry, asked: Asked) -> float:
    """Its bytes, and its operations at the rate of its dtype."""
    return limit_us(environment, nbytes=asked.nbytes, flops=asked.flops, dtype=asked.row.dtype)


def _toeplitz(environment: Environment, geometry: Geometry, asked: Asked) -> float:
    """Of the products with a Toeplitz matrix about two thirds are those of the convolution; fp32 takes three, of fp16 parts."""
    half = asked.row.dtype in HALF
    dtype = asked.row.dtype if half else "fp16"
    flops = 1.5 * asked.flops * (1 if half else 3)
    return limit_us(environment, nbytes=asked.nbytes, flops=flops, dtype=dtype)


def _parts(environment: Environment, geometry: Geometry, asked: Asked) -> float:
    """Three products of fp16 parts."""
    return limit_us(environment, nbytes=asked.nbytes, flops=3 * asked.flops, dtype="fp16")


def _padded(environment: Environment, geometry: Geometry, asked: Asked) -> float:
    """With eight channels a pixel, which are written and read once more."""
    times = OCTET / geometry.in_channels
    more = 2 * 2 * OCTET * asked.calls * math.prod(asked.shape) / geometry.in_channels if asked.shape else 0.0
    return limit_us(environment, nbytes=asked.nbytes + more, flops=times * asked.flops, dtype=asked.row.dtype)


def _transforms(environment: Environment, geometry: Geometry, asked: Asked) -> float:
    """A complex product of each frequency takes 8 operations; the transforms of all planes are written and read. 0.0: the image is not known."""
    if len(asked.shape) != 4:
        return 0.0
    n, _, h, w = asked.shape
    frequencies = (h + geometry.kernel[0] // 2) * ((w + geometry.kernel[1] // 2) // 2 + 1)
    inputs, outputs = geometry.in_channels, geometry.out_channels
    planes = n * inputs + n * outputs + inputs * outputs
    times = asked.calls
    return limit_us(
        environment,
        nbytes=asked.nbytes + 2 * 8 * frequencies * planes * times,
        flops=8.0 * frequencies * n * inputs * outputs * times,
        dtype="fp32",
    )


def _winograd(environment: Environment, geometry: Geometry, asked: Asked) -> float:
    """36 products for 16 results in place of 144. What is transformed, 2.25 times as large, is written and read once more."""
    return limit_us(environment, nbytes=5.5 * asked.nbytes, flops=asked.flops / 4, dtype="fp16")


def _half(row: KernelRow) -> bool:
    return row.dtype in HALF


def _takes_large_depthwise(e: Environment, g: Geometry, row: KernelRow) -> bool:
    return g.depthwise and g.unit_stride and max(g.kernel, default=0) >= LARGE_TAPS


def _takes_depthwise(e: Environment, g: Geometry, row: KernelRow) -> bool:
    square = len(g.kernel) == 2 and g.kernel[0] == g.kernel[1] and g.kernel[0] in DEPTHWISE_TAPS
    return g.depthwise and g.in_channels == g.out_channels and square


def _takes_grouped(e: Environment, g: Geometry, row: KernelRow) -> bool:
    return g.grouped and g.kernel == (3, 3) and _half(row) and bool(g.stride) and max(g.stride) <= 2


def _takes_fft(e: Environment, g: Geometry, row: KernelRow) -> bool:
    dense = g.groups == 1 and g.unit_stride and all(d == 1 for d in g.dilation)
    return dense and min(g.kernel, default=0) >= LARGE_TAPS and row.dtype in SINGLE


def _takes_first(e: Environment, g: Geometry, row: KernelRow) -> bool:
    return g.groups == 1 and g.in_channels == 3 and len(g.kernel) == 2 and 3 <= max(g.kernel) <= 7 and _half(row)


def _takes_few_channels(e: Environment, g: Geometry, row: KernelRow) -> bool:
    few = g.groups == 1 and 1 <= g.in_channels < OCTET and _half(row)
    return few and not _takes_first(e, g, row)


def _takes_narrow(e: Environment, g: Geometry, row: KernelRow) -> bool:
    wider = dense_3x3(g) and g.in_channels == g.out_channels == 128 and row.phase == "backward"
    return e.sm_arch == architectures.HOPPER and _half(row) and (narrow_3x3(g) or wider)


def _takes_wide(e: Environment, g: Geometry, row: KernelRow) -> bool:
    return e.sm_arch == architectures.HOPPER and row.dtype == "bf16" and wide_3x3(g)


def _takes_strided(e: Environment, g: Geometry, row: KernelRow) -> bool:
    return g.groups == 1 and g.kernel == (1, 1) and g.stride == (2, 2) and _half(row)


def _takes_exact(e: Environment, g: Geometry, row: KernelRow) -> bool:
    strict = row.dtype == "fp32" and not row.tensor_core
    return e.sm_arch == architectures.HOPPER and g.groups == 1 and strict and g.kernel in EXACT_TAPS


_Wanted = Callable[[Environment, Geometry, KernelRow], bool]
_Least = Callable[[Environment, Geometry, Asked], float]
# By transform: what it takes, its least time, its error.
_FAMILIES: Sequence[tuple[str, _Wanted, _Least, str]] = (
    ("large_depthwise_conv", _takes_large_depthwise, _toeplitz, OWN_ERROR),
    ("depthwise_conv", _takes_depthwise, _plain, OWN_ERROR),
    ("grouped_conv", _takes_grouped, _plain, OWN_ERROR),
    ("fft_conv", _takes_fft, _transforms, "fp32's own"),
    ("first_conv", _takes_first, _plain, OWN_ERROR),
    ("few_channels_conv", _takes_few_channels, _padded, OWN_ERROR),
    ("conv3x3", _takes_narrow, _plain, OWN_ERROR),
    ("winograd_conv", _takes_wide, _winograd, "bf16's, and a quarter more"),
    ("strided_conv", _takes_strided, _plain, OWN_ERROR),
    ("exact_conv", _takes_exact, _parts, "fp32's own"),
)
