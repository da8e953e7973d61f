"""The launch that lays an input out with eight channels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

import math

import torch

from advisor.ops import storage
from advisor.ops.few_channels import spec
from advisor.ops.launches import launch


def pad_channels(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x [N, C, ...], NCHW or NHWC, in `dtype` and with zeros behind its channels, [N, 8, ...] channels_last."""
    n, channels, *size = x.shape
    pixels, device = math.prod(size), x.device.index or 0
    defines = spec.defines(storage.name(x.dtype), storage.name(dtype), channels, planes=x.is_contiguous())
    strides = [math.prod(size[axis + 1 :]) * spec.CHANNELS for axis in range(len(size))]
    y = x.new_empty_strided((n, spec.CHANNELS, *size), (pixels * spec.CHANNELS, 1, *strides), dtype=dtype)
    blocks = spec.blocks(n * pixels)
    launch(spec.PAD, defines, device, blocks, spec.THREADS, (n * pixels, pixels)).run(x, y)
    return y
