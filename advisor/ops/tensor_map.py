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

_SWIZZLE = {64: 2, 128: 3}  # by bytes of a pixel in shared memory


@lru_cache(maxsize=1)
def _encode() -> Any:
    """The driver's function; None where it has none."""
    try:
        return cuda_driver.load().cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None


def unavailable() -> str:
    """Why no map can be made here; empty when they can."""
    return "" if _encode() is not None else "the driver makes no tensor maps (CUDA 12.0 and newer does)"


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
    return _boxes(x.data_ptr(), *x.shape, channels, columns, rows, groups, parts, step)


@lru_cache(maxsize=4096)
def _boxes(
    address: int,
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
) -> Any:
    memory = np.zeros(len(parts) * _BYTES + _ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    found = memory[begin : begin + len(parts) * _BYTES]
    for at, (row, column) in enumerate(parts):
        height, width = (-(-(size - first) // step) for size, first in ((h, row), (w, column)))
        status = _encode()(
            ctypes.c_void_p(found.ctypes.data + at * _BYTES),
            _UINT16,
            5,
            ctypes.c_void_p(address + 2 * c * (row * w + column)),
            (ctypes.c_uint64 * 5)(c // groups, groups, width, height, n),
            (ctypes.c_uint64 * 4)(2 * c // groups, 2 * c * step, 2 * c * w * step, 2 * c * w * h),
            (ctypes.c_uint32 * 5)(channels, 1, columns, rows, 1),
            (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1),
            _PLAIN,
            _SWIZZLE[2 * channels],
            _LINES_OF_128,
            _ZEROS,
        )
        if status:
            raise AdvisorError(f"the driver refuses a tensor map of {n} x {h} x {w} x {c} values (error {status})")
    return found.view(np.dtype((np.void, len(parts) * _BYTES)))
