"""PReLU with a slope a channel: the bundled kernels, or PyTorch's own operation. For eager code; Inductor fuses it itself."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, is_nhwc, nhwc
from advisor.ops.operation import Arguments, Gradients, Operation, Saved
from advisor.ops.prelu import cuda, reference, spec


def _refusal(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why PyTorch's own operation runs; empty when the kernels do."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if weight.device != x.device or weight.shape != x.shape[1:2]:
        return "one slope for all channels, or elsewhere"
    return dispatch.refusal(
        _unsupported(x.shape, is_nhwc(x), x.dtype, x.device.index or 0), spec.wins(storage.name(x.dtype))
    )


@lru_cache(maxsize=4096)
def _unsupported(shape: torch.Size, channels_last: bool, dtype: torch.dtype, device: int) -> str:
    return spec.TENSORS.refusal(
        shape=tuple(shape), channels_last=channels_last, dtype=storage.name(dtype), arch=nvrtc.arch(device)
    )


def _fp32(weight: torch.Tensor) -> torch.Tensor:
    return aligned(weight.float())


def _forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return cuda.forward(x, _fp32(weight))


def _backward(dy: torch.Tensor, arguments: Arguments, _saved: Saved) -> Gradients:
    x, weight = arguments
    dx, dweight = cuda.backward(nhwc(dy), x, _fp32(weight))
    return dx, dweight.to(weight.dtype)


_PRELU = Operation(
    name="prelu",
    forward=_forward,
    backward=_backward,
    pytorch=reference.prelu,
    refusal=_refusal,
    label=lambda *_: "prelu",
    compiles=False,
)


def prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x where it is positive, else weight[c] * x.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's operation.
        weight: [C], or one value.

    Returns:
        A new tensor like x.
    """
    return _PRELU(x, weight)
