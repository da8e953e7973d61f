"""Maps of NHWC tensors, by which the hardware copies boxes of them into shared memory (TMA; kernels/include/tensor_map.cuh)."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.core.errors import AdvisorError
from advisor.ops import cuda_driver

_BYTES, _ALIGNMENT = 128, 64  # of a CUtensorMap
_UINT16, _PLAIN, _LINES_OF_128, _ZEROS = 1, 0, 2, 0  # CUtensorMapDataType, …Interleave, …L2promotion, …FloatOOBfill
Parts = tuple[tuple[int, int], ...]
# Of a map: where its tensor begins behind the address in bytes, sizes, strides in bytes of all but the first, sizes of a box, swizzle.
Description = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]

_SWIZZLE = {64: 2, 128: 3}  # by bytes of a pixel in shared memory


@lru_cache(maxsize=1)
def encode() -> Any:
    """The driver's function; None where it has none."""
    try:
        return cuda_driver.load().cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None


def unavailable() -> str:
    """Why no map can be made here; empty when they can."""
    return "" if encode() is not None else "the driver makes no tensor maps (CUDA 12.0 and newer does)"


WHOLE: Parts = ((0, 0),)
QUARTERS: Parts = ((0, 0), (0, 1), (1, 0), (1, 1))  # every other row and column


def boxes(
    x: torch.Tensor, channels: int, columns: int, rows: int, groups: int = 1, parts: Parts = WHOLE, step: int = 1
) -> Any:
    """Maps of x for boxes of one image's `rows` x `columns` pixels of `channels` channels of one group, as a kernel's argument.

    Args:
        x: [N, C, H, W] of a 16-bit dtype, channels_last, 16-byte aligned. The maps hold its address, not its memory.
        channels: 32 or 64; what a box has beyond those of a group of x, or beyond the image's edges, is copied as zeros and not stored.
        groups: of C / groups channels, a multiple of 8.
        parts: the first row and column of what each map is of; with the `step`-th ones behind them, those are its pixels, one at least.

    Raises:
        AdvisorError: when the driver refuses a map.
    """
    return boxes_of(x.data_ptr(), descriptions(*x.shape, channels, columns, rows, groups, parts, step))


class Boxes(np.ndarray[Any, np.dtype[np.void]]):
    """Maps as a kernel's argument: one np.void.

    Attributes:
        address: of the tensor that they are of.
        made_of: what the driver makes each of, beside that: see `_descriptions`.
    """

    address: int
    made_of: tuple[Description, ...]


def encoder() -> int:
    """Address of the driver's function, for who makes maps without Python: of rank 5, with these constants for what is alike in all."""
    return ctypes.cast(encode(), ctypes.c_void_p).value or 0


@lru_cache(maxsize=4096)
def boxes_of(address: int, made_of: tuple[Description, ...]) -> Any:
    memory = np.zeros(len(made_of) * _BYTES + _ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    maps = memory[begin : begin + len(made_of) * _BYTES]
    for at, (offset, sizes, strides, box, swizzle) in enumerate(made_of):
        status = encode()(
            ctypes.c_void_p(maps.ctypes.data + at * _BYTES),
            _UINT16,
            5,
            ctypes.c_void_p(address + offset),
            (ctypes.c_uint64 * 5)(*sizes),
            (ctypes.c_uint64 * 4)(*strides),
            (ctypes.c_uint32 * 5)(*box),
            (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1),
            _PLAIN,
            swizzle,
            _LINES_OF_128,
            _ZEROS,
        )
        if status:
            shape = " x ".join(map(str, reversed(sizes)))
            raise AdvisorError(f"the driver refuses a tensor map of {shape} values (error {status})")
    found = maps.view(np.dtype((np.void, len(made_of) * _BYTES))).view(Boxes)
    found.address, found.made_of = address, made_of
    return found


@lru_cache(maxsize=4096)
def descriptions(
    n: int,
    c: int,
    h: int,
    w: int,
    channels: int,
    columns: int,
    rows: int,
    groups: int,
    parts: Parts,
    step: int,
) -> tuple[Description, ...]:
    found: list[Description] = []
    for row, column in parts:
        height, width = (-(-(size - first) // step) for size, first in ((h, row), (w, column)))
        sizes = (c // groups, groups, width, height, n)
        strides = (2 * c // groups, 2 * c * step, 2 * c * w * step, 2 * c * w * h)
        box = (channels, 1, columns, rows, 1)
        found.append((2 * c * (row * w + column), sizes, strides, box, _SWIZZLE[2 * channels]))
    return tuple(found)
