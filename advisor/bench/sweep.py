"""`advisor bench conv`: where the installed cuDNN falls off a cliff.

A sweep changes one size of a convolution and times its three products at each. A product is off a cliff where another one of the same sweep
does as much work or more in less than 1 / CLIFF of its time: channels of 30 where 32 take a third. The products are PyTorch's own, with
cuDNN's benchmark on, so that what is found is no bad choice of a heuristic. Depthwise calls of different sizes one after another are also
held against fp64: some versions of cuDNN had them wrong.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from advisor.bench import results
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.units import counted, percent_text
from advisor.transforms.choosing.clock import device_us

FILE = "conv.json"
CLIFF = 1.3
WARMUP, ROUNDS, CALLS = 2, 3, 3  # before the clock; rows; calls a row
PRODUCTS = ("forward", "data gradient", "weight gradient")
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SEQUENCE = ((3, 7), (64, 7), (16, 3), (96, 13), (8, 5), (128, 3), (32, 9))  # channels, taps
SEQUENCE_ERROR = 1e-3  # of fp32 with TF32 off: far above rounding
RIGHT = "depthwise calls of different sizes in a row are right"


@dataclass(frozen=True, slots=True)
class Shape:
    """One convolution, or with `transposed` the one in the other direction."""

    batch: int = 32
    inputs: int = 64
    outputs: int = 64
    side: int = 56
    taps: int = 3
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False

    @property
    def padding(self) -> int:
        """That keeps the side at stride 1."""
        return self.dilation * (self.taps // 2)


# Name of a sweep, the size that it changes, its values, and what stays. Channels of #35603 and of nets that were pruned, images of detectors.
_SWEEPS: tuple[tuple[str, tuple[str, ...], tuple[int, ...], Shape], ...] = (
    ("channels", ("inputs", "outputs"), (28, 29, 30, 31, 32, 33, 36, 40, 48, 60, 62, 63, 64, 66, 72, 96), Shape()),
    ("channels in", ("inputs",), (1, 2, 3, 4, 5, 7, 8, 12, 16), Shape(side=112)),
    ("side", ("side",), (28, 29, 30, 31, 32, 33, 48, 55, 56, 57, 63, 64, 65), Shape(inputs=128, outputs=128)),
    ("batch", ("batch",), (1, 2, 3, 4, 6, 8, 16), Shape(inputs=256, outputs=256, side=28)),
    ("taps", ("taps",), (1, 3, 5, 7, 9, 11), Shape()),
    ("dilation", ("dilation",), (1, 2, 3, 4, 8), Shape()),
    ("groups", ("groups",), (1, 2, 4, 8, 16, 32, 64), Shape()),
    ("stride", ("stride",), (1, 2, 3, 4), Shape()),
    ("transposed channels", ("inputs", "outputs"), (30, 32, 62, 64, 66), Shape(transposed=True, stride=2, side=28)),
)  # fmt: skip
SETTINGS = (("bfloat16", "nhwc"), ("bfloat16", "nchw"), ("float32", "nchw"), ("float32", "nhwc"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One product at one value of a sweep. `tf32`: whether fp32 was multiplied as TF32.

    `faster`: the value of the same sweep at which as much work or more took least, `faster_ms`; None where none took less than 1 / CLIFF.
    """

    sweep: str
    value: int
    dtype: str
    layout: str
    product: str
    ms: float
    flops: float
    tf32: bool
    faster: int | None
    faster_ms: float | None
    cudnn: int
    torch: str
    date: str


def points(pattern: str = "") -> Iterator[tuple[str, int, Shape]]:
    """Every (sweep, value, convolution) whose sweep's name holds `pattern`."""
    for name, fields, values, base in _SWEEPS:
        if pattern in name:
            for value in values:
                yield name, value, _with(base, fields, value)


def _with(base: Shape, fields: Sequence[str], value: int) -> Shape:
    changes: dict[str, Any] = dict.fromkeys(fields, value)
    return replace(base, **changes)


def flops(shape: Shape) -> float:
    """Operations of one product."""
    span = shape.dilation * (shape.taps - 1) + 1
    side = (shape.side + 2 * shape.padding - span) // shape.stride + 1
    pixels = shape.side**2 if shape.transposed else side**2
    return 2.0 * shape.batch * pixels * shape.inputs * shape.outputs * shape.taps**2 / shape.groups


def cliffs(rows: Sequence[SweepRow]) -> list[SweepRow]:
    """The rows of one sweep, product, dtype and layout, each with what is faster at as much work or more."""
    found = []
    for row in rows:
        others = [o for o in rows if o.flops >= row.flops and o.ms * CLIFF < row.ms]
        best = min(others, key=lambda other: other.ms) if others else None
        found.append(replace(row, faster=best.value if best else None, faster_ms=best.ms if best else None))
    return found


def run(*, pattern: str, out: Path | None, say: Callable[[str], None]) -> int:
    """Time every point whose sweep's name holds `pattern`; print the cliffs, write all. Those that are on file stay until they are measured
    again, and come last: an interrupted run goes on with what it did not reach.

    Raises:
        AdvisorError: without a GPU (exit code 5), or when `pattern` matches nothing.
    """
    if not torch.cuda.is_available():
        raise AdvisorError("no benchmark here: no CUDA GPU", exit_code=ExitCode.GPU_REQUIRED)
    chosen = list(points(pattern))
    if not chosen:
        raise AdvisorError(
            f"no sweep is named like {pattern!r}", expected="part of " + ", ".join(s[0] for s in _SWEEPS)
        )
    target = out or results.folder() / FILE
    kept = results.on_file(target)
    rows: list[SweepRow] = []
    with _benchmark():
        wrong = sequence_errors()
        say(wrong or RIGHT)
        for name, dtype, layout in order([name for name, *_ in chosen], kept):
            say(f"{name} {dtype} {layout}")
            measured = [
                row
                for sweep, value, shape in chosen
                if sweep == name
                for row in _rows(name, value, shape, dtype, layout)
            ]
            for product in PRODUCTS:
                rows += cliffs([row for row in measured if row.product == product])
            kept = [row for row in kept if _group(row) != (name, dtype, layout)]
            results.write(target, "conv", [*kept, *rows])
    for row in rows:
        if row.faster is not None:
            print(line(row), flush=True)
    off = sum(row.faster is not None for row in rows)
    print(f"{counted(off, 'product')} of {len(rows)} off a cliff; {wrong or RIGHT}.")
    return ExitCode.OK


def order(sweeps: Sequence[str], on_file: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """(sweep, dtype, layout) in the order in which they are measured: first those that have no rows on file."""
    there = set(map(_group, on_file))
    groups = [(name, *setting) for setting in SETTINGS for name in dict.fromkeys(sweeps)]
    return sorted(groups, key=lambda group: group in there)


def _group(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["sweep"], row["dtype"], row["layout"]


def line(row: SweepRow) -> str:
    """`channels 30 bfloat16 nhwc forward: 0.31 ms; 32 takes 35 % of it`."""
    share = percent_text((row.faster_ms or 0.0) / row.ms)
    what = f"{row.sweep} {row.value} {row.dtype} {row.layout} {row.product}"
    return f"{what}: {row.ms:.3f} ms; {row.faster} takes {share} of it"


@contextmanager
def _benchmark() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _rows(sweep: str, value: int, shape: Shape, dtype: str, layout: str) -> Iterator[SweepRow]:
    tf32 = dtype == "float32" and torch.backends.cudnn.allow_tf32
    for product, call in calls(shape, NAMES[dtype], layout).items():
        yield SweepRow(
            sweep=sweep,
            value=value,
            dtype=dtype,
            layout=layout,
            product=product,
            ms=_ms(call),
            flops=flops(shape),
            tf32=tf32,
            faster=None,
            faster_ms=None,
            cudnn=int(torch.backends.cudnn.version() or 0),
            torch=torch.__version__,
            date=datetime.date.today().isoformat(),
        )


def calls(shape: Shape, dtype: torch.dtype, layout: str) -> dict[str, Callable[[], object]]:
    """The three products as calls."""
    fmt = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    outer, inner = (shape.inputs, shape.outputs) if shape.transposed else (shape.outputs, shape.inputs)
    sizes = (outer, inner // shape.groups, shape.taps, shape.taps)
    x = (
        torch.randn(shape.batch, shape.inputs, shape.side, shape.side, device="cuda")
        .to(dtype)
        .contiguous(memory_format=fmt)
    )
    weight = torch.randn(sizes, device="cuda").to(dtype).contiguous(memory_format=fmt)
    numbers = ([shape.stride] * 2, [shape.padding] * 2, [shape.dilation] * 2, shape.transposed, [0, 0], shape.groups)
    dy = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *numbers))

    def backward(*wanted: bool) -> Callable[[], object]:
        return lambda: torch.ops.aten.convolution_backward(dy, x, weight, None, *numbers, [*wanted, False])

    return {
        "forward": lambda: torch.ops.aten.convolution(x, weight, None, *numbers),
        "data gradient": backward(True, False),
        "weight gradient": backward(False, True),
    }


def _ms(call: Callable[[], object]) -> float:
    """Median of a few rows, in device time, behind the calls in which cuDNN tries its algorithms."""
    for _ in range(WARMUP):
        call()
    found = [device_us(call, CALLS) / 1e3 for _ in range(ROUNDS)]
    return float(statistics.median(found))


def sequence_errors(device: str = "cuda") -> str:
    """What depthwise calls of different sizes, one after another, get wrong against fp64; empty for nothing."""
    wrong = []
    for dtype, limit in ((torch.float32, SEQUENCE_ERROR), (torch.bfloat16, 2e-2)):
        made = []
        for channels, taps in SEQUENCE:
            x = torch.randn(4, channels, 24, 24, device=device).to(dtype).requires_grad_()
            weight = (torch.randn(channels, 1, taps, taps, device=device) / taps).to(dtype).requires_grad_()
            dy = torch.randn(4, channels, 24, 24, device=device).to(dtype)
            made.append((x, weight, dy, depthwise_products(x, weight, dy)))
        for x, weight, dy, found in made:
            exact = depthwise_products(*(t.detach().double().requires_grad_(t.requires_grad) for t in (x, weight, dy)))
            for product, one, right in zip(PRODUCTS, found, exact, strict=True):
                error = ((one.double() - right).norm() / right.norm()).item()
                if not error < limit:
                    taps, channels = weight.shape[-1], x.shape[1]
                    wrong.append(
                        f"{product} of depthwise {taps}x{taps} of {channels} channels is wrong by {error:.1e} in a row of others"
                    )
    return "; ".join(wrong)


def depthwise_products(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The three products."""
    y = F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=x.shape[1])
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)
