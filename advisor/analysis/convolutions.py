"""Each convolution of the step and each of its three products: which algorithm runs it, on which units, and what stands beside it. Pure."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from advisor.analysis.conv import bias_row
from advisor.analysis.conv_alternatives import OCTET, Alternative, Asked, alternatives
from advisor.analysis.rows import HALF, SINGLE, is_own, shapes_of
from advisor.analysis.view import View
from advisor.core import architectures, layers
from advisor.core.environment import Environment
from advisor.core.profile import ConvFact, KernelRow, StepProfile
from advisor.core.roofline import limit_us
from advisor.core.units import time_text

FORWARD, DATA, WEIGHT, GRADIENTS = "forward", "data gradient", "weight gradient", "gradients"
OWN = "advisor's own"
RATES_ERROR = 1.1  # a product may be this much faster than rates that were measured in other work
# Times fewer products than a direct convolution: F(4 x 4, 3 x 3). What transforms need hangs on their sizes, which no name tells.
_FEWER = {"Winograd": 4.0, "FFT": math.inf}
_Key = tuple[str, str, str]  # place, shapes of input and weight, direction

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
            Bytes that L2 holds bound nothing; Winograd is held to its own operations, FFT and
            advisor's own kernels for fp32 to bytes alone.
        alternatives: what is faster and the run does not use: at most one that was measured, then at most one that is modelled.
        error: what cannot be of its time, bytes or operations; empty where nothing is wrong.
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
    alternatives: tuple[Alternative, ...]
    error: str

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
        """Least time over the time with conversions; None where it is not known. Beyond 1 by more than the rates' own error it is an `error`."""
        return self.least_us / self.total_us if self.least_us > 0 and self.total_us > 0 else None


def algorithm(row: KernelRow) -> str:
    """What a convolution's kernel does, from its name; `other` where it does not tell."""
    if is_own(row):
        return OWN
    return _named(row.name)


@functools.lru_cache(maxsize=4096)  # a name is asked for by each table of a report, and templates' are long
def _named(kernel: str) -> str:
    return next((name for name, pattern in _ALGORITHMS if pattern.search(kernel)), "other")


def direction(row: KernelRow) -> str:
    """Which product a row is of."""
    if row.phase != "backward":
        return FORWARD
    return _gradient(row.name)


@functools.lru_cache(maxsize=4096)
def _gradient(kernel: str) -> str:
    if _WEIGHT.search(kernel):
        return WEIGHT
    return DATA if _DATA.search(kernel) else GRADIENTS


def products(profile: StepProfile) -> tuple[Product, ...]:
    """All products of the step's convolutions, those that take longest first."""
    view = View.of(profile)
    groups: dict[_Key, list[KernelRow]] = {}
    for row in view.rows:
        if row.kind == "conv" and not bias_row(view, row) and not row.name.startswith("Memset"):
            groups.setdefault((*_call(row), direction(row)), []).append(row)
    _join_unknown(groups)
    forward = _Forwards(groups)
    conversions = _conversions(view, groups)
    convs = layers.convolutions(profile)
    shares = _shares_of_gradients(groups)
    found = [
        _product(view, rows, key, forward.of(key), conversions.get(key, []), convs, shares.get(key, 0.0))
        for key, rows in groups.items()
    ]
    return tuple(sorted(found, key=lambda p: (-p.total_us, p.module, p.shape, p.direction)))


def _join_unknown(groups: dict[_Key, list[KernelRow]]) -> None:
    """Where one kernel of a backward does not tell its product, none does: what is named may be no more than a helper of it."""
    for place, call, of in [key for key in groups if key[2] == GRADIENTS]:
        for named in (DATA, WEIGHT):
            groups[place, call, of] += groups.pop((place, call, named), [])


def _call(row: KernelRow) -> tuple[str, str]:
    """Where a convolution stands, and the shapes of its input and weight; one module may be called with several."""
    shapes = shapes_of(row)
    first = 1 if "backward" in row.op else 0  # behind the output's gradient
    operands = shapes[first : first + 2]
    return row.module or row.source or row.shapes, str(operands) if len(operands) == 2 and all(operands) else ""


class _Forwards:
    """The forwards' rows, by their convolution."""

    def __init__(self, groups: Mapping[_Key, list[KernelRow]]) -> None:
        self._by_call = {key[:2]: rows for key, rows in groups.items() if key[2] == FORWARD}
        self._by_place: dict[str, list[list[KernelRow]]] = {}
        for (place, _), rows in self._by_call.items():
            self._by_place.setdefault(place, []).append(rows)

    def of(self, key: _Key) -> list[KernelRow]:
        """Of this convolution; where its shapes are not known, the only one there."""
        found = self._by_call.get(key[:2])
        if found is None and not key[1] and len(self._by_place.get(key[0], ())) == 1:
            return self._by_place[key[0]][0]
        return found or []


def _shares_of_gradients(groups: Mapping[_Key, list[KernelRow]]) -> dict[_Key, float]:
    """Each gradient's share of the time of all gradients of its convolution."""
    times = {key: sum(row.time_us for row in rows) for key, rows in groups.items() if key[2] != FORWARD}
    whole: dict[tuple[str, str], float] = {}
    for key, time_us in times.items():
        whole[key[:2]] = whole.get(key[:2], 0.0) + time_us
    return {key: time_us / whole[key[:2]] for key, time_us in times.items()}


def _conversions(view: View, groups: Mapping[_Key, list[KernelRow]]) -> dict[_Key, list[KernelRow]]:
    """Changes of layout inside a convolution's operator, by the product that they stand beside.

    Those of a backward go to the longer of its products: their names do not tell which of the two they serve.
    """
    found: dict[_Key, list[KernelRow]] = {}
    for row in view.rows:
        if row.kind != "layout" or "convolution" not in row.op:
            continue
        call = _call(row)
        there = [key for key in groups if key[0] == call[0] and (key[2] == FORWARD) == (row.phase != "backward")]
        of = [key for key in there if key[1] == call[1]] or there
        if of:
            longest = max(of, key=lambda key: sum(r.time_us for r in groups[key]))
            found.setdefault(longest, []).append(row)
    return found


def _product(
    view: View,
    rows: Sequence[KernelRow],
    key: _Key,
    forward: Sequence[KernelRow],
    conversions: Sequence[KernelRow],
    convs: dict[str, ConvFact],
    of_gradients: float,
) -> Product:
    of = key[2]
    longest = max(rows, key=lambda row: (row.time_us, row.name))
    flops, nbytes = _work(rows, of, forward)
    times, converting = sum(row.time_us for row in rows), sum(row.time_us for row in conversions)
    dtype = "tf32" if longest.dtype == "fp32" and longest.tensor_core else longest.dtype
    shape = next(iter(shapes_of(forward[0] if forward else longest)), [])
    if not forward and longest.phase == "backward":
        shape = [*shapes_of(longest), [], []][1]  # the output's gradient comes first
    how = algorithm(longest)
    least = _least_us(view.profile.environment, nbytes, flops, longest, dtype)
    asked = Asked(
        row=longest,
        shape=tuple(shape),
        forward=of == FORWARD,
        of_gradients=of_gradients,
        calls=longest.calls,
        flops=flops,
        nbytes=nbytes,
        time_us=times + converting,
        conversion_us=converting,
    )
    return Product(
        module=longest.module,
        layer=layers.layer(forward[0] if forward else longest, convs),
        direction=of,
        shape=tuple(shape),
        dtype=dtype,
        layout=longest.layout,
        algorithm=how,
        units=_units(longest, view.profile.environment),
        kernel=longest.name,
        reasons=tuple(_reasons(view, longest, conversions)),
        conversions=tuple(dict.fromkeys(row.name for row in conversions)),
        conversion_us=converting,
        time_us=times,
        calls=sum(row.calls for row in rows),
        flops=flops,
        nbytes=nbytes,
        least_us=least,
        alternatives=() if is_own(longest) else alternatives(view, asked),
        error=_error(view, least, times + converting),
    )


def _least_us(environment: Environment, nbytes: float, flops: float, row: KernelRow, dtype: str) -> float:
    """The least time of a product by the way that its longest kernel makes it; 0.0 where nothing bounds it or nothing is known."""
    if environment.rates_doubt:
        return 0.0
    if row.calls > 0 and nbytes / row.calls <= environment.l2_bytes:
        nbytes = 0.0  # it may never have left the cache
    flops = flops / _FEWER.get(_named(row.name), 1.0)
    if is_own(row) and row.dtype in SINGLE:
        flops = 0.0  # made of parts in fp16, on units that are faster than fp32's
    return limit_us(environment, nbytes=nbytes, flops=flops, dtype=dtype) if flops or nbytes else 0.0


def _error(view: View, least_us: float, time_us: float) -> str:
    """No step is faster than its machine: a time below that is a wrong time, or wrong bytes or operations."""
    if not view.on_gpu or least_us <= time_us * RATES_ERROR:
        return ""
    return (
        f"{time_text(time_us)} is less than the {time_text(least_us)} that this machine needs at least: "
        "its time, bytes or operations are wrong"
    )


def _work(rows: Sequence[KernelRow], of: str, forward: Sequence[KernelRow]) -> tuple[float, float]:
    """Operations and bytes of a product. Each gradient has the forward's, of which a trace tells more than of a backward's kernels,
    which its operator's work is shared out among by their time. Not every forward has a backward.
    """
    source = forward or rows
    flops, nbytes = sum(row.flops for row in source), sum(row.modelled_bytes for row in source)
    times = 1.0
    if forward and of != FORWARD:
        both = 2.0 if of == GRADIENTS else 1.0
        times = both * min(1.0, _calls(rows) / _calls(forward))
    return times * flops, times * nbytes


def _calls(rows: Sequence[KernelRow]) -> float:
    return max(rows, key=lambda row: (row.time_us, row.name)).calls


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
