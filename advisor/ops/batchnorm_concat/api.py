"""Norms over a concatenation that grows by one feature map at a time, as DenseNet's layers see it, without copying it.

`features` begins one, `extended` appends a feature map, `batchnorm_act` normalises what there is so far. All feature maps lie
in one tensor, each written once. The batch statistics of a channel are taken once, when it is appended, and its gradients are
added up by the norms' own backwards: each gives the sum of its own and of all later norms' to the norm before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import nhwc, realigned
from advisor.ops.batchnorm_act import reference
from advisor.ops.batchnorm_concat import cuda, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("batchnorm_concat")


@dataclass(frozen=True, slots=True, eq=False)
class _Room:
    """Memory of one concatenation: values [N, C, H, W], a pixel's channels beside each other, and moments [2, C].

    It fills from the first channel on or, where each feature map comes before those that are there, from the last on.
    """

    values: torch.Tensor
    moments: torch.Tensor
    front: bool

    def begin(self, channels: int) -> int:
        """The first channel of those taken when `channels` are."""
        return self.values.shape[1] - channels if self.front else 0

    def taken(self, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is there when `channels` are, as tensors of their own over the same memory: autograd sees no views."""
        begin = self.begin(channels)
        return self.values.narrow(1, begin, channels).detach(), self.moments.narrow(1, begin, channels).detach()


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """Feature maps that have been concatenated so far.

    Attributes:
        tensor: [N, C, H, W], all of them. A tensor like any other, but that its pixels may lie further apart than C.
        moments: [2, C], mean and biased variance of each channel; None where PyTorch's own operations run. As far as autograd
            is concerned, what goes back through it are the two corrections of kernels/batchnorm_concat.
        front: whether the next feature map comes before them, not behind.
        room: where there is space for more.
    """

    tensor: torch.Tensor
    moments: torch.Tensor | None = None
    front: bool = False
    room: _Room | None = None


class _Append(Function):
    @staticmethod
    def forward(
        ctx: Any, before: torch.Tensor | None, moments: torch.Tensor | None, feature: torch.Tensor, room: _Room
    ) -> tuple[torch.Tensor, torch.Tensor]:
        there, channels = 0 if before is None else before.shape[1], feature.shape[1]
        cuda.append(nhwc(feature), room.values, room.moments, room.begin(there + channels) if room.front else there)
        after = room.taken(there + channels)
        ctx.save_for_backward(*after)
        # First channel and how many, of what was there and of what is new.
        ctx.old, ctx.new = (0, there), (there, channels)
        if room.front:
            ctx.new, ctx.old = (0, channels), (channels, there)
        ctx.set_materialize_grads(False)
        return after

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        gradient, corrections = given
        if gradient is None:
            return None, None, None, None
        (x, moments), old, new = ctx.saved_tensors, ctx.old, ctx.new
        feature = None
        if ctx.needs_input_grad[2]:
            if corrections is None:
                feature = gradient.narrow(1, *new)
            elif differentiable.wanted(gradient):
                feature = _corrected(gradient, corrections, x, moments).narrow(1, *new)
            else:
                feature = cuda.append_backward(cuda.rows(gradient), corrections, cuda.rows(x), moments, *new)
        if not old[1]:
            return None, None, feature, None
        return gradient.narrow(1, *old), None if corrections is None else corrections.narrow(1, *old), feature, None


def _corrected(
    gradient: torch.Tensor, corrections: torch.Tensor, x: torch.Tensor, moments: torch.Tensor
) -> torch.Tensor:
    """The gradient with what the norms put off taken off it."""
    mean, a, b = (row.view(1, -1, 1, 1) for row in (moments[0], *corrections))
    whole: torch.Tensor = gradient.float() - a - (x.float() - mean) * b
    return whole.to(gradient.dtype)


class _BatchNormAct(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        moments: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
        activation: str,
        slope: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = cuda.forward(x, moments, running_mean, running_var, weight, bias, momentum, eps, activation, slope)
        ctx.save_for_backward(x, moments, weight, bias)
        ctx.variant = eps, activation, slope
        ctx.set_materialize_grads(False)
        return y, x.detach(), moments.detach()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        dy, later, corrections = given
        nothing = [None] * 6
        if dy is None:
            return later, corrections, None, None, *nothing
        x, moments, weight, bias = ctx.saved_tensors
        if differentiable.wanted(dy):
            dx, dweight, dbias = _differentiable_backward(dy, x, weight, bias, *ctx.variant)
            return dx if later is None else later + dx, corrections, dweight, dbias, *nothing
        behind = None
        if later is not None:
            if corrections is None:
                corrections = torch.zeros_like(moments)
            behind = cuda.rows(later), corrections
        gradient, corrections, dweight, dbias = cuda.backward(
            nhwc(dy), cuda.rows(x), behind, moments, weight, bias, *ctx.variant
        )
        return gradient, corrections, dweight, dbias, *nothing


def _differentiable_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    activation: str,
    slope: float,
) -> Any:
    """The backward in PyTorch's own operations, so that it can be differentiated again. It puts nothing off."""

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return reference.batchnorm_act(x, None, None, None, weight, bias, 0.0, eps, activation, slope)

    return differentiable.gradients(function, dy, (x, weight, bias))


def unsupported(feature: torch.Tensor, channels: int) -> str:
    """Why the kernels cannot take this as the first feature map of a concatenation of `channels`; empty when they can."""
    return nvrtc.on_device(feature) or spec.unsupported(
        shape=tuple(feature.shape),
        channels=channels,
        channels_last=feature.dim() == 4 and feature.is_contiguous(memory_format=torch.channels_last),
        dtype=storage.name(feature.dtype),
        arch=nvrtc.arch(feature.device.index or 0),
    )


def features(feature: torch.Tensor, channels: int, front: bool = False) -> Features:
    """The first feature map, [N, C, H, W], of a concatenation that will have `channels` in the end.

    With `front` each feature map that is to come stands before those that are there.

    The kernels take channels_last fp16, bf16 or fp32 on CUDA; everything else runs PyTorch's own operations.
    """
    feature = realigned(feature)
    reason = dispatch.refusal(unsupported(feature, channels), spec.wins(dtype=storage.name(feature.dtype)))
    if reason:
        fell_back[reason] += 1
        return Features(feature, front=front)
    moments = torch.empty((2, channels), dtype=torch.float32, device=feature.device)
    return _appended(None, None, feature, _Room(cuda.concatenation(feature.detach(), channels), moments, front))


def extended(before: Features, feature: torch.Tensor) -> Features:
    """What there is so far with one more feature map, [N, C, H, W]. `before` is used for nothing else then."""
    if before.room is not None and before.moments is not None:
        if _fits(before.room, before.tensor, feature):
            return _appended(before.tensor, before.moments, feature, before.room)
        fell_back["a later feature map differs from the first"] += 1
    parts = (feature, before.tensor) if before.front else (before.tensor, feature)
    return Features(torch.cat(parts, 1), front=before.front)


def _appended(
    before: torch.Tensor | None, moments: torch.Tensor | None, feature: torch.Tensor, room: _Room
) -> Features:
    tensor, moments = _Append.apply(before, moments, feature, room)
    return Features(tensor, moments, room.front, room)


def _fits(room: _Room, before: torch.Tensor, feature: torch.Tensor) -> bool:
    """Whether the kernels can write `feature` beside `before`."""
    n, c, h, w = feature.shape
    whole = room.values
    return (
        feature.dtype == whole.dtype
        and feature.device == whole.device
        and (n, h, w) == (whole.shape[0], *whole.shape[2:])
        and before.shape[1] + c <= whole.shape[1]
        and not c % storage.vector_width(storage.name(feature.dtype))
        and not nvrtc.on_device(feature)
    )


def batchnorm_act(
    x: Features,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
) -> tuple[torch.Tensor, Features]:
    """act(batch_norm(all features so far)) in training mode; running statistics are updated in place.

    Args:
        x: used for nothing else afterwards: its place takes the second result.
        running_mean, running_var, weight, bias: [C] fp32.
        activation: a key of `batchnorm_act.spec.ACTIVATIONS`; `slope` is LeakyReLU's.

    Returns:
        A new tensor like the concatenation, and the features for whoever comes next.
    """
    if x.moments is None or not (running_mean.is_contiguous() and running_var.is_contiguous()):
        y = reference.batchnorm_act(
            x.tensor, None, running_mean, running_var, weight, bias, momentum, eps, activation, slope
        )
        return y, Features(x.tensor, front=x.front)
    engaged[activation] += 1
    y, tensor, moments = _BatchNormAct.apply(
        x.tensor, x.moments, weight, bias, running_mean, running_var, momentum, eps, activation, slope
    )
    return y, Features(tensor, moments, x.front, x.room)
