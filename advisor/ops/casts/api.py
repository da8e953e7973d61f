"""Casts of many tensors at once: the bundled kernel, or torch's own multi-tensor copy with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.casts import cuda, spec

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
    readable = [_readable(tensor) for tensor in tensors]
    if all(readable):
        engaged[f"to {storage.name(dtype)}"] += 1
        return cuda.cast(dtype, tensors)
    ours = [tensor for tensor, is_ours in zip(tensors, readable, strict=True) if is_ours]
    theirs = [tensor for tensor, is_ours in zip(tensors, readable, strict=True) if not is_ours]
    fell_back["no dense memory in vectors"] += 1
    made, left = iter(copies(dtype, ours) if ours else ()), iter(copies_by_torch(dtype, theirs))
    return tuple([next(made if is_ours else left) for is_ours in readable])


def _refusal(dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> str:
    reason = nvrtc.on_device(tensors[0])
    if reason:
        return reason
    ours, theirs = storage.name(tensors[0].dtype), storage.name(dtype)
    half, other = (theirs, ours) if ours == "float32" else (ours, theirs)
    arch = nvrtc.arch(tensors[0].device.index or 0)
    return dispatch.refusal(spec.unsupported(half=half, other=other, arch=arch), spec.wins(half))


def _readable(tensor: torch.Tensor) -> bool:
    """Whether its values lie one behind the other, in an order that `empty_like` keeps, from a multiple of 16 bytes on."""
    dense = tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))
    return dense and tensor.data_ptr() % 16 == 0 and 0 < tensor.numel() <= spec.MAX_ELEMENTS


class _Cast(torch.autograd.Function):
    """Tensors of one dtype and device to `dtype`, and their gradients back, each in one pass."""

    @staticmethod
    def forward(ctx: Any, by: Copies, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.by, ctx.dtype = by, tensors[0].dtype
        ctx.set_materialize_grads(False)  # a weight that the loss does not see keeps no gradient
        return by(dtype, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = [gradient for gradient in gradients if gradient is not None]
        found = iter(_Cast.apply(ctx.by, ctx.dtype, *there) if there else ())  # type: ignore[no-untyped-call]
        return None, None, *(None if gradient is None else next(found) for gradient in gradients)


def cast(dtype: torch.dtype, *tensors: torch.Tensor, by: Copies = copies) -> tuple[torch.Tensor, ...]:
    """Copies of `tensors` in `dtype`, with their strides, differentiable to any order: gradients are cast back the same way.

    Args:
        dtype: fp16 or bf16; any other runs torch's own copy.
        tensors: of one dtype, on one device. The kernel takes fp32 on a CUDA device of sm_80 and newer.
        by: what makes the copies.
    """
    found: tuple[torch.Tensor, ...] = _Cast.apply(by, dtype, *tensors)  # type: ignore[no-untyped-call]
    return found
