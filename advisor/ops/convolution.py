"""What families of convolutions share that are told by input and weight alone: whether kernels can take the tensors, and operations of torch.library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from advisor.ops import alignment, nvrtc, storage

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Gradients = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[bool]], tuple[torch.Tensor | None, torch.Tensor | None]
]


@lru_cache(maxsize=4096)
def _unsupported(
    spec: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_shape: tuple[int, ...],
    weight_dtype: torch.dtype,
    stride: int,
    padding: int,
    groups: int,
    arch: int,
) -> str:
    reason: str = spec.unsupported(
        shape=shape,
        channels_last=True,
        dtype=storage.name(dtype),
        weight_shape=weight_shape,
        weight_dtype=storage.name(weight_dtype),
        stride=(stride, stride),
        padding=(padding, padding),
        dilation=(1, 1),
        groups=groups,
        arch=arch,
    )
    return reason


def unsupported(spec: Any, x: torch.Tensor, weight: torch.Tensor, *, stride: int, padding: int, groups: int = 1) -> str:
    """Why the kernels of a family with this `spec` cannot take these tensors, not dilated; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    arch = nvrtc.arch(x.device.index or 0)
    shapes = tuple(x.shape), x.dtype, tuple(weight.shape), weight.dtype
    reason = _unsupported(spec, *shapes, stride, padding, groups, arch)
    if reason:
        return reason
    if weight.device != x.device:
        return "weight and input are on different devices"
    return "" if alignment.is_nhwc(x) else "input is not channels_last and aligned"


def compiled_operation(
    name: str, forward: Forward, gradients: Gradients, *, stride: int
) -> Callable[..., torch.Tensor]:
    """`advisor::<name>` (x, weight) and `advisor::<name>_backward`, with fake kernels and autograd, for graphs that Inductor compiles.

    Args:
        forward: the result y [N, O, ceil(H / stride), ceil(W / stride)] of x [N, I, H, W], channels_last, and weight [O, I, R, S].
        gradients: dx and dweight, each where wanted, of dy, x, weight and which of the two are wanted.

    Returns:
        The operation, whose x has the dtype of the result, which is channels_last.
    """
    nhwc = torch.channels_last

    @torch.library.custom_op(f"advisor::{name}", mutates_args=())
    def operation(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return forward(x.contiguous(memory_format=nhwc), weight).contiguous(memory_format=nhwc)

    @operation.register_fake
    def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        n, _, h, w = x.shape
        shape = (n, weight.shape[0], (h + stride - 1) // stride, (w + stride - 1) // stride)
        return alignment.empty_nhwc(shape, x)

    @torch.library.custom_op(f"advisor::{name}_backward", mutates_args=())
    def backward(
        dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dx_wanted: bool, dweight_wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dx and dweight; empty where not wanted. dweight is contiguous."""
        dx, dweight = gradients(dy, x.contiguous(memory_format=nhwc), weight, (dx_wanted, dweight_wanted))
        return (
            x.new_empty(0) if dx is None else dx.contiguous(memory_format=nhwc),
            weight.new_empty(0) if dweight is None else dweight.contiguous(),
        )

    @backward.register_fake
    def _(
        dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dx_wanted: bool, dweight_wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.empty_like(x, memory_format=nhwc) if dx_wanted else x.new_empty(0),
            weight.new_empty(weight.shape) if dweight_wanted else weight.new_empty(0),
        )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def through(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx_wanted, dweight_wanted = ctx.needs_input_grad[:2]
        dx, dweight = backward(dy, x, weight, dx_wanted, dweight_wanted)
        return dx if dx_wanted else None, dweight if dweight_wanted else None

    operation.register_autograd(through, setup_context=setup)
    return operation
