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


def boxes(x: torch.Tensor, channels: int, columns: int, rows: int) -> Any:
    """The map of x for boxes of one image's `rows` x `columns` pixels of `channels` channels, as a kernel's argument.

    Args:
        x: [N, C, H, W] of a 16-bit dtype, channels_last, 16-byte aligned, C a multiple of 8. The map holds its address, not its memory.
        channels: 32 or 64; what a box has beyond those of x, or beyond its edges, is copied as zeros.

    Raises:
        AdvisorError: when the driver refuses the map.
    """
    return _boxes(x.data_ptr(), *x.shape, channels, columns, rows)


@lru_cache(maxsize=4096)
def _boxes(address: int, n: int, c: int, h: int, w: int, channels: int, columns: int, rows: int) -> Any:
    memory = np.zeros(_BYTES + _ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    found = memory[begin : begin + _BYTES]
    status = _encode()(
        ctypes.c_void_p(found.ctypes.data),
        _UINT16,
        4,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(c, w, h, n),
        (ctypes.c_uint64 * 3)(2 * c, 2 * c * w, 2 * c * w * h),
        (ctypes.c_uint32 * 4)(channels, columns, rows, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        _PLAIN,
        _SWIZZLE[2 * channels],
        _LINES_OF_128,
        _ZEROS,
    )
    if status:
        raise AdvisorError(f"the driver refuses a tensor map of {n} x {h} x {w} x {c} values (error {status})")
    return found.view(np.dtype((np.void, _BYTES)))
