"""Max, average and global average pooling: the bundled kernels, or PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, dispatch, nvrtc, storage
from advisor.ops.operation import Arguments, Gradients, Operation, Saved, shape_alone
from advisor.ops.pooling import cuda, spec
from advisor.ops.pooling.spec import Pair, PoolWindow

DEAD = 255  # for a position: ReLU gives zero there


def unsupported(x: torch.Tensor, window: PoolWindow | None) -> str:
    """Why the kernels cannot take this call; empty when they can. `window` None: the whole image."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    channels_last = alignment.is_nhwc(x)
    return _unsupported(tuple(x.shape), channels_last, x.dtype, window, x.device.index or 0)


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, window: PoolWindow | None, device: int
) -> str:
    reason = spec.TENSORS.refusal(
        shape=shape, channels_last=channels_last, dtype=storage.name(dtype), arch=nvrtc.arch(device)
    )
    if reason or window is None:
        return reason
    return spec.unsupported_window(window, height=shape[2], width=shape[3])


def _refusal(operation: str, x: torch.Tensor, window: PoolWindow | None, other: str = "") -> str:
    """Why PyTorch's own operation runs; empty when the kernels do. `other`: why it is, for what x does not tell."""
    wins = spec.wins(operation, dtype=storage.name(x.dtype), nbytes=x.numel() * x.element_size())
    return dispatch.refusal(unsupported(x, window) or other, wins)


def flat_indices(index: torch.Tensor, shape: tuple[int, ...], window: PoolWindow) -> torch.Tensor:
    """PyTorch's own indices (h * W + w, int64) from positions in the window: what second derivatives are taken with."""
    _, _, _, width = shape
    oh = torch.arange(index.shape[2], device=index.device)[:, None] * window.stride[0] - window.padding[0]
    ow = torch.arange(index.shape[3], device=index.device) * window.stride[1] - window.padding[1]
    position = index.long()
    h = oh + position // window.kernel[1] * window.dilation[0]
    w = ow + position % window.kernel[1] * window.dilation[1]
    return h * width + w


def _to_chosen(dy: torch.Tensor, at: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """dx of `shape` in a differentiable torch op: each of dy [N, C, OH, OW] added to the element at `at`, as `flat_indices` has them."""
    flat = torch.zeros((*shape[:2], shape[2] * shape[3]), dtype=dy.dtype, device=dy.device)
    at = at.flatten(2)
    return flat.scatter_add(2, at, dy.reshape(at.shape)).view(shape)


def _window(_x: object, *arguments: Any) -> PoolWindow:
    return spec.window(*arguments)


def _pooled(shape: Sequence[int], window: PoolWindow) -> tuple[int, int, int, int]:
    n, c, h, w = shape
    return n, c, *window.output(h, w)


def _read(x: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    return alignment.nhwc(x), *others


def _max_forward(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    *,
    kept: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and the positions of the maxima (bytes, like y)."""
    return cuda.max_pool_forward(x, _window(x, kernel, stride, padding, dilation, ceil_mode), indices=kept)


def _max_backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    shape = arguments[0].shape
    return (cuda.max_pool_backward(alignment.nhwc(dy), alignment.nhwc(saved[0]), shape, _window(*arguments)),)


def _max_twice(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    shape = arguments[0].shape
    return (_to_chosen(dy, flat_indices(saved[0], shape, _window(*arguments)), shape),)


def _max_fake(x: torch.Tensor, *window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _pooled(x.shape, _window(x, *window))
    return alignment.empty_nhwc(shape, x), alignment.empty_nhwc(shape, x, torch.uint8)


_MAX_POOL = Operation(
    name="max_pool2d",
    family="pooling",
    forward=_max_forward,
    backward=_max_backward,
    reads=shape_alone,
    twice=_max_twice,
    pytorch=F.max_pool2d,
    refusal=lambda x, *window: _refusal("max_pool", x, _window(x, *window)),
    label=lambda *_: "max_pool",
    readable=_read,
    fake=_max_fake,
)


def _bias_forward(x: torch.Tensor, bias: torch.Tensor, window: PoolWindow) -> tuple[torch.Tensor, torch.Tensor]:
    return cuda.bias_max_pool_forward(x, alignment.aligned(bias.float()), window)


def _bias_backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, bias, window = arguments
    dx, dbias = cuda.bias_max_pool_backward(alignment.nhwc(dy), saved[0], x.shape, window)
    return dx, dbias.to(bias.dtype)


def _bias_twice(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, bias, window = arguments
    alive = saved[0] != DEAD
    g = dy.where(alive, 0)
    at = flat_indices(saved[0], x.shape, window).where(alive, 0)
    return _to_chosen(g, at, x.shape), g.float().sum((0, 2, 3)).to(bias.dtype)


def _bias_refusal(x: torch.Tensor, bias: torch.Tensor, window: PoolWindow) -> str:
    elsewhere = "not all on one device" if bias.device != x.device else ""
    return _refusal(spec.BIAS_RELU, x, window, spec.unsupported_bias(window) or elsewhere)


def _bias_pytorch(x: torch.Tensor, bias: torch.Tensor, window: PoolWindow) -> torch.Tensor:
    return F.max_pool2d(F.relu(x + bias.to(x.dtype).view(1, -1, 1, 1)), *window.arguments)


_BIAS_RELU_MAX_POOL = Operation(
    name="bias_relu_max_pool2d",
    family="pooling",
    forward=_bias_forward,
    backward=_bias_backward,
    reads=lambda *_: (False, False),
    twice=_bias_twice,
    pytorch=_bias_pytorch,
    refusal=_bias_refusal,
    label=lambda *_: spec.BIAS_RELU,
    compiles=False,
)


def _avg_forward(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    window = _window(x, kernel, stride, padding, (1, 1), ceil_mode)
    return cuda.avg_pool_forward(x, window, count_include_pad, divisor_override)


def _avg_backward(dy: torch.Tensor, arguments: Arguments, _saved: Saved) -> Gradients:
    x, *window, ceil_mode, count_include_pad, divisor_override = arguments
    call = _window(x, *window, (1, 1), ceil_mode), count_include_pad, divisor_override
    return (cuda.avg_pool_backward(alignment.nhwc(dy), x.shape, *call),)


def _avg_twice(dy: torch.Tensor, arguments: Arguments, _saved: Saved) -> Gradients:
    x, *call = arguments
    like = dy.new_zeros(()).expand(x.shape)  # only its shape is read
    return (torch.ops.aten.avg_pool2d_backward(dy, like, *call),)


_AVG_POOL = Operation(
    name="avg_pool2d",
    family="pooling",
    forward=_avg_forward,
    backward=_avg_backward,
    reads=shape_alone,
    twice=_avg_twice,
    pytorch=F.avg_pool2d,
    refusal=lambda x, *call: _refusal("avg_pool", x, _window(x, *call[:3], (1, 1), call[3])),
    label=lambda *_: "avg_pool",
    readable=_read,
    fake=lambda x, *call: alignment.empty_nhwc(_pooled(x.shape, _window(x, *call[:3], (1, 1), call[3])), x),
)


def _global_twice(dy: torch.Tensor, arguments: Arguments, _saved: Saved) -> Gradients:
    shape = arguments[0].shape
    return ((dy / (shape[2] * shape[3])).expand(shape),)


_GLOBAL_AVG_POOL = Operation(
    name="global_avg_pool2d",
    family="pooling",
    forward=cuda.global_avg_pool_forward,
    backward=lambda dy, arguments, _saved: (cuda.global_avg_pool_backward(alignment.aligned(dy), arguments[0].shape),),
    reads=shape_alone,
    twice=_global_twice,
    pytorch=lambda x: x.mean((2, 3), keepdim=True),
    refusal=lambda x: _refusal("global_avg_pool", x, None),
    label=lambda *_: "global_avg_pool",
    readable=_read,
    fake=lambda x: alignment.empty_nhwc((x.shape[0], x.shape[1], 1, 1), x),
)


def max_pool2d(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """[N, C, OH, OW]: the largest value of each window, as F.max_pool2d, without indices.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's operation.
    """
    return _MAX_POOL(x, kernel, stride, padding, dilation, ceil_mode)


def bias_relu_max_pool2d(
    x: torch.Tensor,
    bias: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """[N, C, OH, OW]: the largest value of each window of relu(x + bias), which is not kept for the backward, nor written.

    Args:
        x: [N, C, H, W], as in `max_pool2d`: what a convolution without its bias gives.
        bias: [C], that convolution's.
    """
    return _BIAS_RELU_MAX_POOL(x, bias, spec.window(kernel, stride, padding, dilation, ceil_mode))


def avg_pool2d(
    x: torch.Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """[N, C, OH, OW]: the mean of each window, as F.avg_pool2d. x as in `max_pool2d`."""
    return _AVG_POOL(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)


def global_avg_pool2d(x: torch.Tensor) -> torch.Tensor:
    """[N, C, 1, 1]: the mean over all pixels, as x.mean((2, 3), keepdim=True). x as in `max_pool2d`."""
    return _GLOBAL_AVG_POOL(x)
