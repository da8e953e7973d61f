"""Convolutions that were measured on a GPU like the run's: the bundled kernels and PyTorch's own, of the nearest shape on file. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from advisor.analysis.view import Geometry
from advisor.core.errors import AdvisorError
from advisor.core.storage import from_plain

FILE = Path(__file__).with_name("convolution_rows.json")  # bench/conv_rows.py writes it from docs/benchmarks
SCHEMA = 1
# A row speaks for channels of half to twice its own, and for a fourth to four times its work: further off, other things bound a kernel.
CHANNELS, WORK = 2.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConv:
    """One convolution on file. Times are medians in microseconds of one call; 0.0 where a pass was not measured.

    Attributes:
        transform: of the bundled kernels. taken: they are dispatched at this shape.
        shape, weight: of the input [N, C, ...] and of the weight [K, C / groups, ...].
        dtype, layout: as `bf16`, and `nchw` or `nhwc`.
        forward_us, backward_us: of the bundled kernels; backward: the gradients of input and weight together.
        library_forward_us, library_backward_us: of PyTorch's own in the same run, dtype and layout.
        error, library_error: the larger of both passes, relative, against fp64.
    """

    transform: str
    taken: bool
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: str
    layout: str
    forward_us: float
    backward_us: float
    library_forward_us: float
    library_backward_us: float
    error: float
    library_error: float

    @property
    def channels(self) -> tuple[int, int]:
        """In and out."""
        return self.shape[1], self.weight[0]


@dataclass(frozen=True, slots=True)
class Near:
    """A row and how many times its work the convolution asked for has; 1.0: the very shape."""

    row: MeasuredConv
    work: float


@cache
def _document(file: Path) -> dict[str, tuple[MeasuredConv, ...]]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdvisorError(f"{file} cannot be read ({error})", fix="Reinstall cnn-advisor.") from None
    if found.get("schema_version") != SCHEMA:
        raise AdvisorError(
            f"{file} is of schema {found.get('schema_version')}", expected=str(SCHEMA), fix="Reinstall cnn-advisor."
        )
    return {gpu: tuple(from_plain(MeasuredConv, row) for row in rows) for gpu, rows in found["gpus"].items()}


def rows(gpu: str) -> tuple[MeasuredConv, ...]:
    """Those measured on GPUs of this name; none for any other GPU.

    Raises:
        AdvisorError: when the file is missing or of another version.
    """
    return _document(FILE).get(gpu, ())


def nearest(
    on_file: Sequence[MeasuredConv], geometry: Geometry, shape: Sequence[int], dtype: str, layout: str
) -> dict[str, Near]:
    """Transform → the nearest row of its kernels: the same kind of convolution in this dtype, of like channels and work.

    The same kind: as many taps, the same stride and dilation, and as many channels a group, or one group in both. Channels are nearer
    than work; of two as near the one in this layout.
    """
    found: dict[str, tuple[tuple[tuple[float, float], bool], Near]] = {}
    for row, work, distance in _like(on_file, geometry, shape):
        off = (distance, row.layout != layout)
        if row.dtype == dtype and (row.transform not in found or off < found[row.transform][0]):
            found[row.transform] = off, Near(row, work)
    return {transform: near for transform, (_, near) in found.items()}


def _like(
    on_file: Sequence[MeasuredConv], geometry: Geometry, shape: Sequence[int]
) -> Iterator[tuple[MeasuredConv, float, tuple[float, float]]]:
    if len(shape) < 3 or not geometry.stride or not geometry.dilation or geometry.transposed or 0 in shape:
        return
    channels = (geometry.in_channels, geometry.out_channels)
    mine = _work(shape, channels, geometry.groups)
    for row in on_file:
        same = (geometry.kernel, geometry.stride, geometry.dilation) == (row.weight[2:], row.stride, row.dilation)
        if not same or not _grouped_alike(geometry, row):
            continue
        off = [abs(math.log(a / b)) for a, b in zip(channels, row.channels, strict=True)]
        work = mine / _work(row.shape, row.channels, row.groups)
        if max(off) <= math.log(CHANNELS) and abs(math.log(work)) <= math.log(WORK):
            yield row, work, (round(sum(off), 6), round(abs(math.log(work)), 6))


def _grouped_alike(geometry: Geometry, row: MeasuredConv) -> bool:
    if geometry.groups == 1 or row.groups == 1:
        # Below eight channels a kernel is made for its number of channels.
        return geometry.groups == row.groups and (row.shape[1] >= 8 or row.shape[1] == geometry.in_channels)
    return geometry.in_channels // geometry.groups == row.weight[1]


def _work(shape: Sequence[int], channels: tuple[int, int], groups: int) -> float:
    """Products, but for the taps and the stride, which are the same."""
    return float(math.prod(shape) // shape[1] * channels[0] * channels[1] / groups)
