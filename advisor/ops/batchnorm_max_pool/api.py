"""BatchNorm in training mode, activation and max-pooling as one operation: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `batchnorm_max_pool`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.batchnorm_max_pool`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_act.reference import activate
from advisor.ops.batchnorm_max_pool import cuda, reference, spec
from advisor.ops.operation import NONE, OWN, Arguments, Gradients, Operation, Saved
from advisor.ops.pooling.api import flat_indices
from advisor.ops.pooling.spec import PoolWindow, window


def unsupported(x: torch.Tensor, activation: str, slope: float, pool: PoolWindow) -> str:
    """Why the kernels cannot take this call; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    channels_last = alignment.is_nhwc(x)
    return _unsupported(tuple(x.shape), channels_last, x.dtype, activation, slope, pool, x.device.index or 0)


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...],
    channels_last: bool,
    dtype: torch.dtype,
    activation: str,
    slope: float,
    pool: PoolWindow,
    device: int,
) -> str:
    return spec.unsupported(
        shape=shape,
        window=pool,
        channels_last=channels_last,
        dtype=storage.name(dtype),
        activation=activation,
        slope=slope,
        arch=nvrtc.arch(device),
    )


def _forward(
    x: torch.Tensor,
    norm: Norm,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, statistics, positions and chosen elements, as `cuda.forward`."""
    return cuda.forward(x, norm, window(kernel, stride, padding, dilation, ceil_mode), moments=moments)


def _pure(
    x: torch.Tensor,
    norm: Norm,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_forward`. Statistics are [4, C], with the new running mean and variance, which the caller copies back."""
    return cuda.forward(x, norm, window(kernel, stride, padding, dilation, ceil_mode), in_place=False)


def _fake(x: torch.Tensor, _norm: Norm, *pool: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, c, h, w = x.shape
    shape = n, c, *window(*pool[:5]).output(h, w)
    y, index, chosen = (alignment.empty_nhwc(shape, x, dtype) for dtype in (None, torch.uint8, None))
    return y, x.new_empty((4, c), dtype=torch.float32), index, chosen


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, norm, *pool, _ = arguments
    statistics, index, chosen = saved
    above = alignment.nhwc(dy), x, statistics, alignment.nhwc(index), alignment.nhwc(chosen)
    dx, dweight, dbias = cuda.backward(*above, norm, window(*pool))
    return dx, None, None, dweight, dbias, None


def _twice(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    """The gradient of differentiable torch ops, in fp32; which elements were chosen is taken as constant."""
    x, norm, *pool, _ = arguments
    at = flat_indices(saved[1], tuple(x.shape), window(*pool)).flatten(2)

    def pooled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        centred = wide - wide.mean((0, 2, 3), keepdim=True)
        invstd = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + norm.eps)
        z = centred * invstd * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
        y = activate(z, norm.activation, norm.slope)
        return y.flatten(2).gather(2, at).view(dy.shape)

    dx, dweight, dbias = differentiable.gradients(pooled, dy.float(), (x, *norm.affine))
    return dx, None, None, dweight, dbias, None


def _refusal(x: torch.Tensor, norm: Norm, *pool: Any) -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    reason = unsupported(x, norm.activation, norm.slope, window(*pool[:5]))
    return dispatch.refusal(reason, spec.wins(norm.activation, storage.name(x.dtype)))


_BATCH_NORM_MAX_POOL = Operation(
    name="batchnorm_max_pool",
    forward=_forward,
    pure=_pure,
    backward=_backward,
    reads=lambda *_: (True, False, False, True, True, False),
    flows=lambda *_: (OWN, NONE, NONE, OWN, OWN, NONE),
    twice=_twice,
    pytorch=lambda x, norm, *pool: reference.batchnorm_max_pool(x, *norm, *pool[:5]),
    refusal=_refusal,
    label=lambda x, norm, *_: norm.activation,
    readable=lambda x, *others: (alignment.nhwc(x), *others),
    fake=_fake,
)


def batchnorm_max_pool(x: torch.Tensor, *norm_and_pool: Any, moments: torch.Tensor | None = None) -> torch.Tensor:
    """max_pool2d(act(batch_norm(x))) in training mode; running statistics are updated in place.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        norm_and_pool: the fields of a `Norm`, none of them None; then kernel, stride, padding, dilation and ceil_mode of the pooling.
        moments: of x, as the kernel that made it left them (ops/moments.py), in place of a pass over x; None for that pass.

    Returns:
        A new tensor [N, C, OH, OW] like x.
    """
    norm, pool = Norm._make(norm_and_pool[:8]), norm_and_pool[8:]
    # One object for equal windows: its numbers are told as pairs.
    return _BATCH_NORM_MAX_POOL(alignment.realigned(x), *norm, *window(*pool).arguments, moments)
