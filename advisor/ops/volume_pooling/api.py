"""Max and average pooling of volumes: the bundled kernels, or PyTorch's own operations. For eager code; Inductor has its own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.function import Function
from advisor.ops.volume_pooling import cuda, reference, spec
from advisor.ops.volume_pooling.spec import Triple, Window

engaged, fell_back = dispatch.counters("volume_pooling")


def _refused(operation: str, x: torch.Tensor, window: Window) -> bool:
    """Whether PyTorch's own operation is to run; counts which of both it is."""
    reason = nvrtc.on_device(x) or dispatch.refusal(
        *_standing(operation, x.shape, alignment.is_ndhwc(x), x.dtype, window, x.device.index or 0)
    )
    if reason:
        fell_back[reason] += 1
        return True
    engaged[operation] += 1
    return False


@lru_cache(maxsize=4096)
def _standing(
    operation: str, shape: torch.Size, channels_last: bool, dtype: torch.dtype, window: Window, device: int
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    name = storage.name(dtype)
    unsupported = spec.unsupported(
        operation,
        shape=tuple(shape),
        window=window,
        channels_last=channels_last,
        dtype=name,
        arch=nvrtc.arch(device),
    )
    return unsupported, spec.wins(operation, dtype=name)


class _MaxPool3d(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, window: Window) -> torch.Tensor:
        y, index = cuda.max_pool3d_forward(x, window, indices=ctx.needs_input_grad[0])
        Function.keep(ctx, index)
        ctx.shape, ctx.window = tuple(x.shape), window
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        (index,) = Function.kept(ctx)
        if differentiable.wanted(dy):
            return _to_chosen(dy, index, ctx.shape, ctx.window), None
        return cuda.max_pool3d_backward(alignment.dense(dy, torch.channels_last_3d), index, ctx.shape, ctx.window), None


def _to_chosen(dy: torch.Tensor, index: torch.Tensor, shape: tuple[int, ...], window: Window) -> torch.Tensor:
    """dx in differentiable torch ops: each of dy added to the element that its window has chosen."""
    at = index.long()
    _, kh, kw = window.kernel
    taps = (at // (kh * kw), at // kw % kh, at % kw)
    flat = torch.zeros_like(at)
    for axis, tap in enumerate(taps):
        ones = [1] * 5
        ones[2 + axis] = -1
        begin = torch.arange(index.shape[2 + axis], device=at.device) * window.stride[axis] - window.padding[axis]
        flat = flat * shape[2 + axis] + begin.view(ones) + tap
    plain = torch.zeros((*shape[:2], shape[2] * shape[3] * shape[4]), dtype=dy.dtype, device=dy.device)
    chosen = flat.flatten(2)
    return plain.scatter_add(2, chosen, dy.reshape(chosen.shape)).view(shape)


class _AvgPool3d(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, window: Window) -> torch.Tensor:
        ctx.shape, ctx.window = tuple(x.shape), window
        return cuda.avg_pool3d_forward(x, window)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        if differentiable.wanted(dy):
            like = torch.zeros((), dtype=dy.dtype, device=dy.device).expand(
                ctx.shape
            )  # only its shape is read; dy may be a batch
            kernel, stride, _ = ctx.window
            return differentiable.gradient(lambda x: reference.avg_pool3d(x, kernel, stride), dy, like), None
        return cuda.avg_pool3d_backward(alignment.dense(dy, torch.channels_last_3d), ctx.shape, ctx.window), None


def max_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple, padding: Triple = (0, 0, 0)) -> torch.Tensor:
    """The largest value of each window.

    Args:
        x: [N, C, D, H, W]; the kernels take channels_last_3d fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's operation.
    """
    window = spec.window(kernel, stride, padding)
    if _refused("max_pool3d", x, window):
        return F.max_pool3d(x, *window)
    result: torch.Tensor = _MaxPool3d.apply(x, window)
    return result


def avg_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple) -> torch.Tensor:
    """The mean of each window, without padding; as `max_pool3d`."""
    window = spec.window(kernel, stride)
    if _refused("avg_pool3d", x, window):
        return reference.eager_avg_pool3d(x, kernel, stride)
    result: torch.Tensor = _AvgPool3d.apply(x, window)
    return result
