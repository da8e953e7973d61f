"""Normalisation of uint8 images on the GPU: the bundled kernel, or PyTorch's own operations with the same result."""

from __future__ import annotations

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.input import cuda, reference, spec

engaged, fell_back = dispatch.counters("input")


def normalise(
    pixels: torch.Tensor,
    table: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Each channel's bytes replaced by the values they stand for.

    Args:
        pixels: [N, C, H, W] uint8, in any memory layout.
        table: [C, 256] fp32 on the same device: the value of each byte.
        dtype: of the result; fp16 and bf16 are the fp32 values rounded once.
        memory_format: of the result: contiguous_format or channels_last.

    Returns:
        [N, C, H, W]; in fp32 its bits are the table's. It has no gradient.
    """
    y_nhwc = memory_format == torch.channels_last
    unsupported = _unsupported(pixels, dtype, y_nhwc=y_nhwc)
    x_nhwc = not unsupported and _is_nhwc(pixels)
    wins = (
        spec.wins(pixels.shape[1], x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=storage.name(dtype)) if not unsupported else ""
    )
    reason = dispatch.refusal(unsupported, wins)
    if reason:
        fell_back[reason] += 1
        return reference.normalise(pixels, table).to(dtype, memory_format=memory_format)
    engaged["normalise"] += 1
    return cuda.normalise(pixels, table.contiguous(), dtype, x_nhwc=x_nhwc, y_nhwc=y_nhwc)


def _is_nhwc(pixels: torch.Tensor) -> bool:
    return pixels.dim() == 4 and pixels.is_contiguous(memory_format=torch.channels_last)


def _unsupported(pixels: torch.Tensor, dtype: torch.dtype, *, y_nhwc: bool) -> str:
    reason = nvrtc.on_device(pixels)
    if reason:
        return reason
    x_nhwc = _is_nhwc(pixels)  # not before: inside torch.func.vmap nobody may ask
    if not x_nhwc and not pixels.is_contiguous():
        return "sliced images"
    return spec.unsupported(
        shape=tuple(pixels.shape),
        x_nhwc=x_nhwc,
        y_nhwc=y_nhwc,
        dtype=storage.name(dtype),
        arch=nvrtc.arch(pixels.device.index or 0),
    )
