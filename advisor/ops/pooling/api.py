"""Max, average and global average pooling: the bundled kernels, or PyTorch's own operations.

For each, two entries over the same kernels: a plain function for eager code (thin: an autograd.Function) and an operation in
torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.function import Function
from advisor.ops.pooling import cuda, spec
from advisor.ops.pooling.spec import Pair, Window

engaged, fell_back = dispatch.counters("pooling")
DEAD = 255  # for a position: ReLU gives zero there


def unsupported(x: torch.Tensor, window: Window | None) -> str:
    """Why the kernels cannot take this call; empty when they can. `window` None: the whole image."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    channels_last = alignment.is_nhwc(x)
    return _unsupported(tuple(x.shape), channels_last, x.dtype, window, x.device.index or 0)


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, window: Window | None, device: int
) -> str:
    reason = spec.unsupported_tensor(
        shape=shape, channels_last=channels_last, dtype=storage.name(dtype), arch=nvrtc.arch(device)
    )
    if reason or window is None:
        return reason
    return spec.unsupported_window(window, height=shape[2], width=shape[3])


def _refused(operation: str, x: torch.Tensor, window: Window | None, other: str = "") -> bool:
    """Whether PyTorch's own operation is to run; counts which of both it is. `other`: why it is, for what x does not tell."""
    wins = spec.wins(operation, dtype=storage.name(x.dtype), nbytes=x.numel() * x.element_size())
    reason = dispatch.refusal(unsupported(x, window) or other, wins)
    if reason:
        fell_back[reason] += 1
        return True
    engaged[operation] += 1
    return False


def flat_indices(index: torch.Tensor, shape: tuple[int, ...], window: Window) -> torch.Tensor:
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


class _MaxPool(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, window: Window) -> torch.Tensor:
        y, index = cuda.max_pool_forward(x, window, indices=ctx.needs_input_grad[0])
        Function.keep(ctx, index)
        ctx.shape, ctx.window = tuple(x.shape), window
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        (index,) = Function.kept(ctx)
        if differentiable.wanted(dy):
            return _to_chosen(dy, flat_indices(index, ctx.shape, ctx.window), ctx.shape), None
        return cuda.max_pool_backward(alignment.nhwc(dy), index, ctx.shape, ctx.window), None


class _BiasReluMaxPool(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, window: Window) -> torch.Tensor:
        y, index = cuda.bias_max_pool_forward(x, alignment.aligned(bias.float()), window)
        Function.keep(ctx, index)
        ctx.shape, ctx.window, ctx.dtype = tuple(x.shape), window, bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        (index,) = Function.kept(ctx)
        if differentiable.wanted(dy):
            alive = index != DEAD
            g = dy.where(alive, 0)
            at = flat_indices(index, ctx.shape, ctx.window).where(alive, 0)
            return _to_chosen(g, at, ctx.shape), g.float().sum((0, 2, 3)).to(ctx.dtype), None
        dx, dbias = cuda.bias_max_pool_backward(alignment.nhwc(dy), index, ctx.shape, ctx.window)
        return dx, dbias.to(ctx.dtype), None


class _AvgPool(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, window: Window, count_include_pad: bool, divisor_override: int | None
    ) -> torch.Tensor:
        ctx.shape, ctx.call = tuple(x.shape), (window, count_include_pad, divisor_override)
        return cuda.avg_pool_forward(x, window, count_include_pad, divisor_override)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        window, count_include_pad, divisor_override = ctx.call
        if differentiable.wanted(dy):
            like = dy.new_zeros(()).expand(ctx.shape)  # only its shape is read
            dx = torch.ops.aten.avg_pool2d_backward(
                dy,
                like,
                window.kernel,
                window.stride,
                window.padding,
                window.ceil_mode,
                count_include_pad,
                divisor_override,
            )
            return dx, None, None, None
        return cuda.avg_pool_backward(alignment.nhwc(dy), ctx.shape, *ctx.call), None, None, None


class _GlobalAvgPool(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = tuple(x.shape)
        return cuda.global_avg_pool_forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        if differentiable.wanted(dy):
            return (dy / (ctx.shape[2] * ctx.shape[3])).expand(ctx.shape)
        return cuda.global_avg_pool_backward(alignment.aligned(dy), ctx.shape)


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
    window = spec.window(kernel, stride, padding, dilation, ceil_mode)
    if _refused("max_pool", x, window):
        return F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
    result: torch.Tensor = _MaxPool.apply(x, window)
    return result


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
    window = spec.window(kernel, stride, padding, dilation, ceil_mode)
    elsewhere = "not all on one device" if bias.device != x.device else ""
    if _refused(spec.BIAS_RELU, x, window, spec.unsupported_bias(window) or elsewhere):
        z = F.relu(x + bias.to(x.dtype).view(1, -1, 1, 1))
        return F.max_pool2d(z, kernel, stride, padding, dilation, ceil_mode)
    result: torch.Tensor = _BiasReluMaxPool.apply(x, bias, window)
    return result


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
    window = spec.window(kernel, stride, padding, ceil_mode=ceil_mode)
    if _refused("avg_pool", x, window):
        return F.avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    result: torch.Tensor = _AvgPool.apply(x, window, count_include_pad, divisor_override)
    return result


def global_avg_pool2d(x: torch.Tensor) -> torch.Tensor:
    """[N, C, 1, 1]: the mean over all pixels, as x.mean((2, 3), keepdim=True). x as in `max_pool2d`."""
    if _refused("global_avg_pool", x, None):
        return x.mean((2, 3), keepdim=True)
    result: torch.Tensor = _GlobalAvgPool.apply(x)
    return result


def _pair(values: list[int]) -> Pair:
    first, second = values
    return first, second


def _window(kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool) -> Window:
    """A window from the lists that torch.library passes."""
    return spec.window(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), ceil_mode)


def _shape4(shape: Any) -> tuple[int, int, int, int]:
    n, c, h, w = shape
    return n, c, h, w


# For compiled graphs. CUDA only: the rewrite has checked what can be checked in a graph, and the layout is made right here.


@torch.library.custom_op("advisor::max_pool2d", mutates_args=())
def max_pool2d_op(
    x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `max_pool2d`; returns y and positions (bytes, like y)."""
    engaged["max_pool"] += 1
    return cuda.max_pool_forward(alignment.nhwc(x), _window(kernel, stride, padding, dilation, ceil_mode), indices=True)


@max_pool2d_op.register_fake
def _(
    x: torch.Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    window = _window(kernel, stride, padding, dilation, ceil_mode)
    shape = (x.shape[0], x.shape[1], *window.output(x.shape[2], x.shape[3]))
    return alignment.empty_nhwc(_shape4(shape), x), alignment.empty_nhwc(_shape4(shape), x, torch.uint8)


@torch.library.custom_op("advisor::max_pool2d_backward", mutates_args=())
def max_pool2d_backward_op(
    dy: torch.Tensor,
    index: torch.Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The gradient of `advisor::max_pool2d`."""
    window = _window(kernel, stride, padding, dilation, ceil_mode)
    return cuda.max_pool_backward(alignment.nhwc(dy), alignment.nhwc(index), _shape4(shape), window)


@max_pool2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    index: torch.Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    return alignment.empty_nhwc(_shape4(shape), dy)


def _max_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.shape, ctx.window = list(inputs[0].shape), inputs[1:]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _max_backward(ctx: Any, dy: torch.Tensor, _index: Any) -> tuple[Any, ...]:
    (index,) = ctx.saved_tensors
    return max_pool2d_backward_op(dy, index, ctx.shape, *ctx.window), None, None, None, None, None


max_pool2d_op.register_autograd(_max_backward, setup_context=_max_setup)

_NO_DILATION = [1, 1]


@torch.library.custom_op("advisor::avg_pool2d", mutates_args=())
def avg_pool2d_op(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """As `avg_pool2d`."""
    engaged["avg_pool"] += 1
    window = _window(kernel, stride, padding, _NO_DILATION, ceil_mode)
    return cuda.avg_pool_forward(alignment.nhwc(x), window, count_include_pad, divisor_override)


@avg_pool2d_op.register_fake
def _(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    window = _window(kernel, stride, padding, _NO_DILATION, ceil_mode)
    return alignment.empty_nhwc(_shape4((x.shape[0], x.shape[1], *window.output(x.shape[2], x.shape[3]))), x)


@torch.library.custom_op("advisor::avg_pool2d_backward", mutates_args=())
def avg_pool2d_backward_op(
    dy: torch.Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """The gradient of `advisor::avg_pool2d`."""
    window = _window(kernel, stride, padding, _NO_DILATION, ceil_mode)
    return cuda.avg_pool_backward(alignment.nhwc(dy), _shape4(shape), window, count_include_pad, divisor_override)


@avg_pool2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    return alignment.empty_nhwc(_shape4(shape), dy)


def _avg_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.shape, ctx.call = list(inputs[0].shape), inputs[1:]


def _avg_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return avg_pool2d_backward_op(dy, ctx.shape, *ctx.call), None, None, None, None, None, None


avg_pool2d_op.register_autograd(_avg_backward, setup_context=_avg_setup)


@torch.library.custom_op("advisor::global_avg_pool2d", mutates_args=())
def global_avg_pool2d_op(x: torch.Tensor) -> torch.Tensor:
    """As `global_avg_pool2d`."""
    engaged["global_avg_pool"] += 1
    return cuda.global_avg_pool_forward(alignment.nhwc(x))


@global_avg_pool2d_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return alignment.empty_nhwc((x.shape[0], x.shape[1], 1, 1), x)


@torch.library.custom_op("advisor::global_avg_pool2d_backward", mutates_args=())
def global_avg_pool2d_backward_op(dy: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """The gradient of `advisor::global_avg_pool2d`."""
    return cuda.global_avg_pool_backward(alignment.aligned(dy), _shape4(shape))


@global_avg_pool2d_backward_op.register_fake
def _(dy: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return alignment.empty_nhwc(_shape4(shape), dy)


def _global_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.shape = list(inputs[0].shape)


def _global_backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    dx: torch.Tensor = global_avg_pool2d_backward_op(dy, ctx.shape)
    return dx


global_avg_pool2d_op.register_autograd(_global_backward, setup_context=_global_setup)
