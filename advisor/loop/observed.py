"""What a close look at the first steps has shown beyond the objects themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.loop.layouts import LayoutWatch, is_channels_last
from advisor.loop.values import autocast_dtype


@dataclass(slots=True, eq=False)
class ConvCall:
    """The latest call of a convolution module, seen while looking."""

    input_shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    followed_by_bn: bool = False
    cudnn: bool = True  # it was switched on then: a script may switch it off around a part of the step
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IteratorSeen:
    """Settings of an iterator of torch's that no torch DataLoader has made: libraries have loaders of their own around them."""

    workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int

    @classmethod
    def of(cls, iterator: Any) -> IteratorSeen:
        """Read from torch's own attributes."""
        return cls(
            workers=iterator._num_workers,
            pin_memory=bool(iterator._pin_memory),
            persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
            prefetch_factor=getattr(iterator, "_prefetch_factor", None) or 0,
        )


@dataclass(slots=True, eq=False)
class BatchSeen:
    """The latest batch of a training loader."""

    nbytes: int = 0
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()  # of its largest tensor
    pointers: frozenset[int] = frozenset()
    moved_unchanged: bool = False
    non_blocking: bool = False
    source: str = ""
    iterator: IteratorSeen | None = None


def subtracts_means(norm: torch.nn.Module, conv: torch.nn.Module) -> bool:
    """Whether `norm`, behind `conv`, is a batch norm; or an instance norm, which matters for the convolution's bias alone."""
    kinds = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm._InstanceNorm
    return isinstance(norm, kinds if conv.bias is not None else kinds[:1])


@dataclass(slots=True, eq=False)
class Observations:
    """What looking at the first steps has shown beyond the objects themselves."""

    convs: dict[int, ConvCall] = field(default_factory=dict)  # by id of the module
    autocast: torch.dtype | None = None
    zero_grad_to_none: bool | None = None
    clipping: bool = False
    clipped_scaled: str = ""  # the line that has clipped gradients which a GradScaler had scaled and not unscaled
    stack_us: list[float] = field(
        default_factory=list
    )  # what it takes to note where a call comes from, under anomaly detection
    no_sync: bool = False  # DDP was called inside its `no_sync()`
    batch: BatchSeen = field(default_factory=BatchSeen)
    layouts: LayoutWatch = field(default_factory=LayoutWatch)
    first_ns: int = 0  # perf_counter at the first batch or module call
    last_conv: tuple[torch.nn.Module, torch.Tensor] | None = (
        None  # the latest, and what it returned; within one outermost call
    )

    def note_convolution(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Some module was called: a convolution, or perhaps the norm behind one."""
        if isinstance(module, torch.nn.modules.conv._ConvNd) and args and isinstance(args[0], torch.Tensor):
            value = args[0]
            cudnn = torch.backends.cudnn
            self.convs[id(module)] = ConvCall(
                tuple(value.shape),
                autocast_dtype(value.device.type) or value.dtype,
                is_channels_last(value),
                cudnn=cudnn.enabled,
                deterministic=cudnn.deterministic,
            )
            if isinstance(output, torch.Tensor):
                self.last_conv = (module, output)
        elif self.last_conv is not None and subtracts_means(module, self.last_conv[0]):
            conv, conv_output = self.last_conv
            if args and args[0] is conv_output and id(conv) in self.convs:
                self.convs[id(conv)].followed_by_bn = True
