"""Layouts of what is looked at by PyTorch's own operations: in NHWC some of cuDNN's algorithms are too slow to be waited for.

For depthwise filters of many taps they are the slowest: to try them took a RepLKNet 17 s (transforms/replay.py). No step ever runs them: the
plain one is in NCHW, and with the change kernels run in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_MANY_TAPS = 49


def in_nhwc(*values: Any) -> bool:
    """Whether one of these tensors, or of those in lists and the like, is in channels_last and nothing else."""
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return any(_nhwc(tensor) and not tensor.is_contiguous() for tensor in tensors)


def nchw(value: torch.Tensor) -> torch.Tensor:
    """The value in NCHW, by its strides as well: of one channel both layouts are contiguous, and convolutions take it for what these say."""
    return value.clone(memory_format=torch.contiguous_format) if _nhwc(value) else value


def _nhwc(value: torch.Tensor) -> bool:
    return value.dim() in FORMATS and value.is_contiguous(memory_format=FORMATS[value.dim()])


def many_taps_in_nchw(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """As `_ManyTapsInNCHW`, in a model that has such filters: code that Dynamo has captured would be captured anew inside."""
    return _ManyTapsInNCHW() if any(map(_many_taps, model.parameters())) else contextlib.nullcontext()


class _ManyTapsInNCHW(TorchFunctionMode):
    """Inside, depthwise convolutions of many taps run in NCHW, and what they give is laid out as what they were given."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.conv2d or len(args) < 2 or not _many_taps(args[1]):
            return func(*args, **kwargs)
        found = func(nchw(args[0]), nchw(args[1]), *args[2:], **kwargs)
        return found.contiguous(memory_format=torch.channels_last) if in_nhwc(args[0]) else found


def _many_taps(weight: Any) -> bool:
    if not isinstance(weight, torch.Tensor) or weight.dim() != 4:
        return False
    return weight.size(1) == 1 and weight.size(0) > 1 and weight.size(2) * weight.size(3) > _MANY_TAPS
