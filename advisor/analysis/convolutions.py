"""Each convolution of the step and each of its three products: which algorithm runs it, on which units, and what stands beside it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from advisor.analysis.conv import bias_row
from advisor.analysis.rows import HALF, is_own, is_strict_fp32, shapes_of
from advisor.analysis.view import View
from advisor.core import architectures, layers
from advisor.core.environment import Environment
from advisor.core.profile import ConvFact, KernelRow, StepProfile
from advisor.core.roofline import limit_us, matrix_tflops

FORWARD, DATA, WEIGHT, GRADIENTS = "forward", "data gradient", "weight gradient", "gradients"
LARGE_TAPS, EXACT_TAPS = 11, ((1, 1), (3, 3))  # of the families large_depthwise and exact_conv
OCTET = 8  # channels of 16 bits that a tensor core's operand is loaded by

# The first that a kernel's name has in it. Names are cuDNN's, cuBLAS's, cutlass's and PyTorch's own (ATen/native/cuda/DepthwiseConv2d.cu).
_ALGORITHMS = (
    ("Winograd", re.compile(r"winograd", re.IGNORECASE)),
    ("FFT", re.compile(r"fft|_dft|regular_fft|vector_fft", re.IGNORECASE)),
    ("depthwise", re.compile(r"depthwise|_c1_k1_|dw_conv|dwconv", re.IGNORECASE)),
    ("direct", re.compile(r"direct|small_nhwc|_alg0_|dgrad_engine|wgrad_engine|first_layer", re.IGNORECASE)),
    ("implicit GEMM", re.compile(r"implicit|fprop|dgrad|wgrad|scudnn|hcudnn|precomp|xmma|convolve_sgemm|_conv", re.IGNORECASE)),
    ("matrix product", re.compile(r"gemm|nvjet|cublas|cutlass", re.IGNORECASE)),
)  # fmt: skip
_DATA = re.compile(
    r"dgrad|bwd_?data|backward_data|backward_input|depthwise2d_backward_kernel|_gradient$", re.IGNORECASE
)
_WEIGHT = re.compile(
    r"wgrad|bwd_?filter|backward_weight|backward_filter|grad_weight|_weight_kernel|ReduceSplit", re.IGNORECASE
)
_GENERATION = re.compile(r"sm(70|75|80|86|89|90|100|103|120)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to make a product: what, by which transform of `apply` (empty: none), the least time that it needs here, and its error.

    `time_us` is modelled: bytes and operations over this machine's measured rates, nothing of how near a kernel comes to them.
    """

    what: str
    transform: str
    time_us: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of one convolution, a step: forward, gradient of the input or of the weight.

    Attributes:
        module, layer: path, and `Conv2d 64→128, 3×3`.
        direction: `forward`, `data gradient`, `weight gradient`, or `gradients` where no kernel's name tells which.
        shape: of the convolution's input, [N, C, H, W]; empty where none was recorded.
        dtype, layout: of what is computed, as `fp32`, and `nchw` or `nhwc`.
        algorithm: from the longest kernel's name; `advisor's own`; `other` where the name does not tell.
        units: `tensor cores`, with the architecture that the kernel was written for, or `fp32 pipes`; `processor` on a CPU.
        kernel: the longest kernel's name.
        reasons: why it runs as it does, as far as the run tells.
        conversions: names of kernels that slice, pad or transpose for it, with `conversion_us` their time.
        time_us, calls: of its own kernels.
        flops, nbytes, least_us: operations and bytes, and the least time that this machine needs for them; 0.0 where not known.
        alternative: the one with the least time of those that the run does not use; None where none is faster.
    """

    module: str
    layer: str
    direction: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    algorithm: str
    units: str
    kernel: str
    reasons: tuple[str, ...]
    conversions: tuple[str, ...]
    conversion_us: float
    time_us: float
    calls: float
    flops: float
    nbytes: float
    least_us: float
    alternative: Alternative | None

    @property
    def total_us(self) -> float:
        """Its kernels and its conversions."""
        return self.time_us + self.conversion_us

    @property
    def tflops(self) -> float:
        """Operations over the time of its own kernels; 0.0 where they are not known."""
        return self.flops / self.time_us / 1e6 if self.time_us > 0 else 0.0

    @property
    def of_limit(self) -> float | None:
        """Least time over the time with conversions; None where it is not known."""
        return min(1.0, self.least_us / self.total_us) if self.least_us > 0 and self.total_us > 0 else None


def algorithm(row: KernelRow) -> str:
    """What a convolution's kernel does, from its name; `other` where it does not tell."""
    if is_own(row):
        return "advisor's own"
    return next((name for name, pattern in _ALGORITHMS if pattern.search(row.name)), "other")


def direction(row: KernelRow) -> str:
    """Which product a row is of."""
    if row.phase != "backward":
        return FORWARD
    if _WEIGHT.search(row.name):
        return WEIGHT
    return DATA if _DATA.search(row.name) else GRADIENTS


def products(profile: StepProfile) -> tuple[Product, ...]:
    """All products of the step's convolutions, those that take longest first."""
    view = View.of(profile)
    groups: dict[tuple[str, str], list[KernelRow]] = {}
    for row in view.rows:
        if row.kind == "conv" and not bias_row(view, row) and not row.name.startswith("Memset"):
            groups.setdefault((row.module or row.source or row.shapes, direction(row)), []).append(row)
    forward = {place: rows for (place, of), rows in groups.items() if of == FORWARD}
    conversions = _conversions(view, groups)
    convs = layers.convolutions(profile)
    found = [
        _product(view, rows, of, forward.get(place, []), conversions.get((place, of), []), convs)
        for (place, of), rows in groups.items()
    ]
    return tuple(sorted(found, key=lambda p: (-p.total_us, p.module, p.direction)))


def _conversions(view: View, groups: dict[tuple[str, str], list[KernelRow]]) -> dict[tuple[str, str], list[KernelRow]]:
    """Changes of layout inside a convolution's operator, by the product that they stand beside.

    Those of a backward go to the longer of its products: their names do not tell which of the two they serve.
    """
    found: dict[tuple[str, str], list[KernelRow]] = {}
    for row in view.rows:
        if row.kind != "layout" or "convolution" not in row.op:
            continue
        place = row.module or row.source or row.shapes
        of = [key for key in groups if key[0] == place and (key[1] == FORWARD) == (row.phase != "backward")]
        if of:
            longest = max(of, key=lambda key: sum(r.time_us for r in groups[key]))
            found.setdefault(longest, []).append(row)
    return found


def _product(
    view: View,
    rows: Sequence[KernelRow],
    of: str,
    forward: Sequence[KernelRow],
    conversions: Sequence[KernelRow],
    convs: dict[str, ConvFact],
) -> Product:
    longest = max(rows, key=lambda row: (row.time_us, row.name))
    environment = view.profile.environment
    flops, nbytes = _work(rows, of, forward)
    times = sum(row.time_us for row in rows)
    dtype = "tf32" if longest.dtype == "fp32" and longest.tensor_core else longest.dtype
    least = limit_us(environment, nbytes=nbytes, flops=flops, dtype=dtype) if flops or nbytes else 0.0
    shape = next(iter(shapes_of(forward[0] if forward else longest)), [])
    if not forward and longest.phase == "backward":
        shape = [*shapes_of(longest), [], []][1]  # the output's gradient comes first
    return Product(
        module=longest.module,
        layer=layers.layer(forward[0] if forward else longest, convs),
        direction=of,
        shape=tuple(shape),
        dtype=dtype,
        layout=longest.layout,
        algorithm=algorithm(longest),
        units=_units(longest, environment),
        kernel=longest.name,
        reasons=tuple(_reasons(view, longest, conversions)),
        conversions=tuple(dict.fromkeys(row.name for row in conversions)),
        conversion_us=sum(row.time_us for row in conversions),
        time_us=times,
        calls=sum(row.calls for row in rows),
        flops=flops,
        nbytes=nbytes,
        least_us=least,
        alternative=_alternative(view, longest, flops, nbytes, times, sum(row.time_us for row in conversions)),
    )


def _work(rows: Sequence[KernelRow], of: str, forward: Sequence[KernelRow]) -> tuple[float, float]:
    """Operations and bytes of a product. Each gradient has the forward's, of which a trace tells more than of a backward's kernels,
    which its operator's work is shared out among by their time.
    """
    source = forward or rows
    flops, nbytes = sum(row.flops for row in source), sum(row.modelled_bytes for row in source)
    both = 2.0 if forward and of == GRADIENTS else 1.0
    return both * flops, both * nbytes


def _units(row: KernelRow, environment: Environment) -> str:
    if environment.device != "cuda":
        return "processor"
    if not row.tensor_core:
        return "fp32 pipes"
    generation = _GENERATION.search(row.name)
    return f"tensor cores, sm_{generation.group(1)}" if generation else "tensor cores"


def _reasons(view: View, row: KernelRow, conversions: Iterable[KernelRow]) -> Iterable[str]:
    """Why a product runs as it does: what the run tells of precision, channels and layout."""
    if not view.on_gpu or is_own(row):
        return
    flags, geometry, environment = view.profile.model.flags, view.geometry(row), view.profile.environment
    if not row.tensor_core and row.dtype == "fp32":
        off = flags.get("tf32_conv") is False
        yield "fp32 with TF32 off: no tensor cores" if off else "fp32, and no tensor cores"
    if geometry is not None and not row.tensor_core and row.dtype in (*HALF, "tf32"):
        each = [geometry.in_channels // max(1, geometry.groups), geometry.out_channels // max(1, geometry.groups)]
        odd = [str(channels) for channels in each if channels % OCTET]
        if odd:
            yield f"{' and '.join(dict.fromkeys(odd))} channels a group are no multiple of {OCTET}"
    generation = _GENERATION.search(row.name) if row.tensor_core else None
    if generation and environment.sm_arch >= architectures.HOPPER > int(generation.group(1)):
        yield f"a kernel written for sm_{generation.group(1)} on sm_{environment.sm_arch}"
    if any(True for _ in conversions):
        yield "NCHW is converted around it" if row.layout == "nchw" else "operands are copied around it"


def settings(profile: StepProfile) -> tuple[str, ...]:
    """What cuDNN's switches keep from all convolutions of the run."""
    flags, found = profile.model.flags, []
    if profile.environment.device == "cuda" and flags.get("cudnn_benchmark") is False:
        found.append("cudnn.benchmark is off: cuDNN's heuristics chose the algorithms")
    if profile.environment.device == "cuda" and flags.get("cudnn_deterministic") is True:
        found.append("cudnn.deterministic is on: algorithms with atomics are left out")
    return tuple(found)


def _alternative(
    view: View, row: KernelRow, flops: float, nbytes: float, time_us: float, conversion_us: float
) -> Alternative | None:
    """The one that could save most, of those whose least time is below this product's."""
    if not view.on_gpu or not flops or is_own(row):
        return None
    environment = view.profile.environment
    found = list(_own_kernels(view, row, flops, nbytes))
    if conversion_us > 0 and row.layout == "nchw":
        found.append(Alternative(what="NHWC", transform="channels_last", time_us=time_us, error="none"))
    if row.dtype in ("fp32", "tf32"):
        if row.dtype == "fp32" and not row.tensor_core and matrix_tflops(environment, "tf32") > 0:
            least = limit_us(environment, nbytes=nbytes, flops=flops, dtype="tf32")
            found.append(Alternative(what="TF32", transform="tf32", time_us=least, error="11 bits of 24"))
        if matrix_tflops(environment, "bf16") > 0:
            least = limit_us(environment, nbytes=nbytes / 2, flops=flops, dtype="bf16")
            found.append(Alternative(what="bf16", transform="amp_bf16", time_us=least, error="8 bits of 24"))
    faster = [other for other in found if other.time_us < time_us + conversion_us]
    return min(faster, key=lambda other: other.time_us) if faster else None


def _own_kernels(view: View, row: KernelRow, flops: float, nbytes: float) -> Iterable[Alternative]:
    """Bundled kernels with another algorithm that take this product: their products on tensor cores, and the bytes."""
    geometry, environment = view.geometry(row), view.profile.environment
    if geometry is None or geometry.transposed or (not geometry.unit_stride and geometry.depthwise):
        return
    if geometry.depthwise and max(geometry.kernel, default=0) >= LARGE_TAPS:
        half = row.dtype in HALF
        dtype = row.dtype if half else "fp16"
        # Of the products with a Toeplitz matrix about two thirds are those of the convolution.
        least = limit_us(environment, nbytes=nbytes, flops=1.5 * flops * (1 if half else 3), dtype=dtype)
        yield Alternative(
            what="Toeplitz products", transform="large_depthwise_conv", time_us=least, error="its own dtype's"
        )
    elif (
        geometry.groups == 1
        and is_strict_fp32(row)
        and geometry.kernel in EXACT_TAPS
        and matrix_tflops(environment, "fp16") > 0
    ):
        least = limit_us(environment, nbytes=nbytes, flops=3 * flops, dtype="fp16")
        yield Alternative(what="fp32 in fp16 parts", transform="exact_conv", time_us=least, error="fp32's own")
