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
from advisor.ops.batchnorm_act.reference import activate
from advisor.ops.batchnorm_max_pool import cuda, reference, spec
from advisor.ops.operation import NONE, OWN, Arguments, Gradients, Operation, Saved
from advisor.ops.pooling.api import flat_indices
from advisor.ops.pooling.spec import Pair, PoolWindow, window


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
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    moments: torch.Tensor | None = None,
    *,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, statistics, positions and chosen elements, as `cuda.forward`."""
    norm = x, running_mean, running_var, weight, bias, momentum, eps, activation, slope
    pool = window(kernel, stride, padding, dilation, ceil_mode)
    return cuda.forward(*norm, pool, in_place=in_place, moments=moments)


def _pure(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_forward`. Statistics are [4, C], with the new running mean and variance, which the caller copies back."""
    norm = x, running_mean, running_var, weight, bias, momentum, eps, activation, slope
    return _forward(*norm, kernel, stride, padding, dilation, ceil_mode, in_place=False)


def _fake(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, c, h, w = x.shape
    shape = n, c, *window(*others[8:13]).output(h, w)
    y, index, chosen = (alignment.empty_nhwc(shape, x, dtype) for dtype in (None, torch.uint8, None))
    return y, x.new_empty((4, c), dtype=torch.float32), index, chosen


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, _, _, weight, bias, _, _, activation, slope, *pool, _ = arguments
    statistics, index, chosen = saved
    above = alignment.nhwc(dy), x, statistics, alignment.nhwc(index), alignment.nhwc(chosen)
    dx, dweight, dbias = cuda.backward(*above, weight, bias, activation, slope, window(*pool))
    return dx, None, None, dweight, dbias, None


def _twice(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    """The gradient of differentiable torch ops, in fp32; which elements were chosen is taken as constant."""
    x, _, _, weight, bias, _, eps, activation, slope, *pool, _ = arguments
    at = flat_indices(saved[1], tuple(x.shape), window(*pool)).flatten(2)

    def pooled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        centred = wide - wide.mean((0, 2, 3), keepdim=True)
        invstd = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + eps)
        z = centred * invstd * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
        y = activate(z, activation, slope)
        return y.flatten(2).gather(2, at).view(dy.shape)

    dx, dweight, dbias = differentiable.gradients(pooled, dy.float(), (x, weight, bias))
    return dx, None, None, dweight, dbias, None


def _refusal(x: torch.Tensor, *others: Any) -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    activation, slope, *pool = others[6:13]
    return dispatch.refusal(
        unsupported(x, activation, slope, window(*pool)), spec.wins(activation, storage.name(x.dtype))
    )


_BATCH_NORM_MAX_POOL = Operation(
    name="batchnorm_max_pool",
    forward=_forward,
    pure=_pure,
    backward=_backward,
    reads=lambda *_: (True, False, False, True, True, False),
    flows=lambda *_: (OWN, NONE, NONE, OWN, OWN, NONE),
    twice=_twice,
    pytorch=lambda *arguments: reference.batchnorm_max_pool(*arguments[:-1]),
    refusal=_refusal,
    label=lambda *arguments: arguments[7],
    readable=lambda x, *others: (alignment.nhwc(x), *others),
    fake=_fake,
)


def batchnorm_max_pool(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
    *,
    moments: torch.Tensor | None = None,
) -> torch.Tensor:
    """max_pool2d(act(batch_norm(x))) in training mode; running statistics are updated in place.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        running_mean, running_var, weight, bias: [C] fp32.
        activation: one of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
        moments: of x, as the kernel that made it left them (ops/moments.py), in place of a pass over x; None for that pass.

    Returns:
        A new tensor [N, C, OH, OW] like x.
    """
    norm = running_mean, running_var, weight, bias, momentum, eps, activation, slope
    pool = window(
        kernel, stride, padding, dilation, ceil_mode
    )  # one object for equal ones: its numbers are told as pairs
    return _BATCH_NORM_MAX_POOL(alignment.realigned(x), *norm, *pool.arguments, moments)
