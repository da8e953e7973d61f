"""The launch that lays an input out with eight channels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

import math

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.few_channels import spec


def pad_channels(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x [N, C, ...], NCHW or NHWC, in `dtype` and with zeros behind its channels, [N, 8, ...] channels_last."""
    n, channels, *size = x.shape
    pixels, device = math.prod(size), x.device.index or 0
    defines = spec.defines(storage.name(x.dtype), storage.name(dtype), channels, planes=x.is_contiguous())
    kernel = nvrtc.function(spec.PAD, *spec.KERNELS[spec.PAD], tuple(defines.items()), device)
    strides = [math.prod(size[axis + 1 :]) * spec.CHANNELS for axis in range(len(size))]
    y = x.new_empty_strided((n, spec.CHANNELS, *size), (pixels * spec.CHANNELS, 1, *strides), dtype=dtype)
    arguments = (x.data_ptr(), y.data_ptr(), np.uint32(n * pixels), np.uint32(pixels))
    kernel((spec.blocks(n * pixels), 1, 1), (spec.THREADS, 1, 1), arguments, 0, nvrtc.stream(device))
    return y
