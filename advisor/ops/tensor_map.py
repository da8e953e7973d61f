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


def boxes(x: torch.Tensor, channels: int, columns: int, rows: int, groups: int = 1, step: int = 1) -> Any:
    """The map of x for boxes of one image's `rows` x `columns` pixels of `channels` channels of one group, as a kernel's argument.

    Args:
        x: [N, C, H, W] of a 16-bit dtype, channels_last, 16-byte aligned. The map holds its address, not its memory.
        channels: 32 or 64; what a box has beyond those of a group of x, or beyond the image's edges, is copied as zeros.
        groups: of C / groups channels, a multiple of 8.
        step: from one pixel of a box to the next, along both sides: 1, or 2 for every other one.

    Raises:
        AdvisorError: when the driver refuses the map.
    """
    return _boxes(x.data_ptr(), *x.shape, channels, columns, rows, groups, step)


@lru_cache(maxsize=4096)
def _boxes(
    address: int, n: int, c: int, h: int, w: int, channels: int, columns: int, rows: int, groups: int, step: int
) -> Any:
    memory = np.zeros(_BYTES + _ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    found = memory[begin : begin + _BYTES]
    group = c // groups
    across, down = (step * (pixels - 1) + 1 for pixels in (columns, rows))  # pixels of x that a box's are taken from
    status = _encode()(
        ctypes.c_void_p(found.ctypes.data),
        _UINT16,
        5,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 5)(group, groups, w, h, n),
        (ctypes.c_uint64 * 4)(2 * group, 2 * c, 2 * c * w, 2 * c * w * h),
        (ctypes.c_uint32 * 5)(channels, 1, across, down, 1),
        (ctypes.c_uint32 * 5)(1, 1, step, step, 1),
        _PLAIN,
        _SWIZZLE[2 * channels],
        _LINES_OF_128,
        _ZEROS,
    )
    if status:
        raise AdvisorError(f"the driver refuses a tensor map of {n} x {h} x {w} x {c} values (error {status})")
    return found.view(np.dtype((np.void, _BYTES)))
