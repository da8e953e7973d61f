"""Casts of many tensors at once: the bundled kernel, or torch's own multi-tensor copy with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import is_aligned, is_nhwc
from advisor.ops.casts import cuda, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("casts")

# Makes copies of tensors in another dtype.
Copies = Callable[[torch.dtype, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]


def copies_by_torch(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """As `copies`, by `torch._foreach_copy_`: on CUDA one launch for up to 64 tensors, of 65,536 elements a block."""
    found = tuple([torch.empty_like(tensor, dtype=dtype) for tensor in tensors])
    torch._foreach_copy_(found, tuple(tensors))
    return found


def copies(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """New tensors with the values and strides of `tensors`: the kernel makes those that it can read, torch's own copy the others.

    Args:
        tensors: of one dtype, on one device.
    """
    reason = _refusal(dtype, tensors)
    if reason:
        fell_back[reason] += 1
        return copies_by_torch(dtype, tensors)
    readable = [*map(_readable, tensors)]
    if not all(readable):
        return _apart(dtype, tensors, readable)
    engaged[f"to {storage.name(dtype)}"] += 1
    found = tuple([torch.empty_like(tensor, dtype=dtype) for tensor in tensors])
    # What looks on as PyTorch dispatches operations (transforms/beside.py) is shown who reads the tensors, and may launch it elsewhere.
    (_cast_into if torch._C._len_torch_dispatch_stack() else cuda.cast)(found, tensors)
    return found


def _readable(tensor: torch.Tensor) -> bool:
    """Whether it is dense, in an order that `empty_like` keeps, and not empty, and begins at a multiple of 16 bytes."""
    return (is_aligned(tensor) or is_nhwc(tensor)) and tensor.numel() > 0


def _apart(dtype: torch.dtype, tensors: Sequence[torch.Tensor], readable: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """As `copies`, where the kernel cannot read some of the tensors."""
    ours = [tensor for tensor, is_ours in zip(tensors, readable, strict=True) if is_ours]
    theirs = [tensor for tensor, is_ours in zip(tensors, readable, strict=True) if not is_ours]
    fell_back["no dense memory in vectors"] += 1
    made, left = iter(copies(dtype, ours) if ours else ()), iter(copies_by_torch(dtype, theirs))
    return tuple([next(made if is_ours else left) for is_ours in readable])


@torch.library.custom_op("advisor::cast_into", mutates_args=("copies",))
def _cast_into(copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Write each source's values into its copy, of another dtype: `cuda.cast` as an operation of PyTorch's dispatcher."""
    cuda.cast(copies, sources)


def _refusal(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> str:
    reason = nvrtc.on_device(tensors[0])
    if reason:
        return reason
    ours, theirs = storage.name(tensors[0].dtype), storage.name(dtype)
    half, other = (theirs, ours) if ours == "float32" else (ours, theirs)
    arch = nvrtc.arch(tensors[0].device.index or 0)
    elements = [*map(torch.Tensor.numel, tensors)]
    reason = spec.unsupported(half=half, other=other, elements=max(elements), arch=arch)
    if reason:
        return reason
    captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured:
        cuda.load(dtype, tensors[0])  # a capture that takes the kernel later could not
    return dispatch.refusal("", spec.wins(len(tensors), sum(elements), half, captured=captured))


class _Cast(Function):
    """Tensors of one dtype and device to `dtype`, and their gradients back, each in one pass."""

    @staticmethod
    def forward(ctx: Any, by: Copies, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.by, ctx.dtype = by, tensors[0].dtype
        ctx.set_materialize_grads(False)  # a weight that the loss does not see keeps no gradient
        return by(dtype, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [gradient for gradient in gradients if gradient is not None]
        if any(map(differentiable.wanted, there)):
            found = iter([gradient.to(ctx.dtype) for gradient in there])
        else:
            found = iter(ctx.by(ctx.dtype, there) if there else ())
        return None, None, *(None if gradient is None else next(found) for gradient in gradients)


def cast(dtype: torch.dtype, *tensors: torch.Tensor, by: Copies = copies) -> tuple[torch.Tensor, ...]:
    """Copies of `tensors` in `dtype`, with their strides, differentiable to any order: gradients are cast back the same way.

    Args:
        dtype: fp16 or bf16; any other runs torch's own copy.
        tensors: of one dtype, on one device. The kernel takes fp32 on a CUDA device of sm_80 and newer.
        by: what makes the copies.
    """
    reason = nvrtc.transformed() or nvrtc.outlived(*tensors)
    if reason:
        fell_back[reason] += 1
        return tuple([tensor.to(dtype) for tensor in tensors])
    found: tuple[torch.Tensor, ...] = _Cast.apply(by, dtype, *tensors)
    return found
