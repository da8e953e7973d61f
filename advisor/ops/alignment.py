"""Whether a parameter's memory can be read in 16-byte vectors: views into a flat buffer (FSDP, flattened optimizers) may not be."""

from __future__ import annotations

from typing import TypeVar

import torch

Parameter = TypeVar("Parameter", torch.Tensor, torch.Tensor | None)


def _begins_aligned(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() % 16 == 0
    except RuntimeError:  # it has outlived a torch.func transform, and has no memory of its own
        return False


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous and begins at a multiple of 16 bytes."""
    return tensor.is_contiguous() and _begins_aligned(tensor)


def is_nhwc(tensor: torch.Tensor) -> bool:
    """Whether the tensor is 4-D, channels_last and begins at a multiple of 16 bytes."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and _begins_aligned(tensor)


def is_ndhwc(tensor: torch.Tensor) -> bool:
    """Whether the tensor is 5-D, channels_last_3d and begins at a multiple of 16 bytes."""
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d) and _begins_aligned(tensor)


def realigned(tensor: Parameter) -> Parameter:
    """The tensor itself, or a copy (with its gradient) where it is channels_last and begins between two 16-byte vectors.

    For operations of which PyTorch's own must not see such a tensor either: cuDNN's batch norm in fp32 ends in a misaligned
    address there, after which the process can use its GPU no more (seen with cuDNN 9.19 on an H200).
    """
    if tensor is None or torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # which has no memory of its own
        return tensor
    if tensor.data_ptr() % 16 == 0 or not tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    return tensor.clone(memory_format=torch.channels_last)


def empty_nhwc(shape: tuple[int, int, int, int], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised channels_last [N, C, H, W] tensor on the device of `like`, in its dtype or this one.

    By its strides: torch.empty takes two to three times as long, 4.6 us to 1.5, for reading dtype, device and memory format (torch 2.13).
    """
    _, c, h, w = shape
    return like.new_empty_strided(shape, (h * w * c, 1, w * c, c), dtype=dtype)


def nhwc(tensor: Parameter) -> Parameter:
    """The [N, C, H, W] tensor itself where it is channels_last and begins at a multiple of 16 bytes, else a copy that does. None stays None."""
    return tensor if tensor is None else dense(tensor, torch.channels_last)


def dense(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """The tensor itself where it has this format and begins at a multiple of 16 bytes, else a copy that does."""
    found = tensor.contiguous(memory_format=memory_format)
    return found if found.data_ptr() % 16 == 0 else found.clone()


def lying_as(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`found`, [N, C, H, W] contiguous, in the memory format of x."""
    nhwc = is_nhwc(x) and not x.is_contiguous()
    return found.contiguous(memory_format=torch.channels_last) if nhwc else found


def aligned(tensor: Parameter) -> Parameter:
    """The tensor itself where it is aligned, else a copy that is. None stays None."""
    return tensor if tensor is None or is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def misplaced(x: torch.Tensor, *parameters: torch.Tensor | None) -> str:
    """Why a kernel that reads `x` cannot read these parameters where they are; empty when it can."""
    for parameter in parameters:
        if parameter is not None and (parameter.device != x.device or not is_aligned(parameter)):
            return "parameters are not contiguous, aligned and on the input's device"
    return ""
