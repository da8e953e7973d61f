"""Norms over a concatenation that grows by one feature map at a time, as DenseNet's layers see it, without copying it.

`features` begins one, `extended` appends a feature map, `batchnorm_act` normalises what there is so far. All feature maps lie
in one tensor, each written once. The batch statistics of a channel are taken once, when it is appended, and its gradients are
added up by the norms' own backwards: each gives the sum of its own and of all later norms' to the norm before it.

What there is so far is two tensors, each the part that is taken of memory with room for all. Of each there is one user: who has
made a next of it has no further use for it.

    tensor   [N, C, H, W], a pixel's channels beside each other. A tensor like any other, but that its pixels lie as far apart as all
             channels that there will be.
    moments  [2, C] fp32, mean and biased variance of each channel; None where PyTorch's own operations run. As far as autograd is
             concerned, what goes back through it are the two corrections of kernels/batchnorm_concat.

The memory fills from the first channel on or, with `front`, where each feature map comes before those that are there, from the last on.
"""

from __future__ import annotations

from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import nhwc, realigned
from advisor.ops.batchnorm_act import reference
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_concat import cuda, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("batchnorm_concat")

Parts = tuple[torch.Tensor, torch.Tensor | None]


class _Append(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        before: torch.Tensor | None,
        moments: torch.Tensor | None,
        feature: torch.Tensor,
        channels: int,
        front: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = feature.shape[1]
        if before is None or moments is None:
            there = 0
            room = cuda.concatenation(feature, channels), feature.new_empty((2, channels), dtype=torch.float32)
        else:
            there = before.shape[1]
            room = _room(before, moments, front)
        begin = channels - there - new if front else 0
        cuda.append(nhwc(feature), *room, begin if front else there)
        # Tensors of their own over the same memory: autograd sees no views.
        after = room[0].narrow(1, begin, there + new).detach(), room[1].narrow(1, begin, there + new).detach()
        Function.keep(ctx, *after)
        # First channel and how many, of what was there and of what is new.
        ctx.old, ctx.new = ((new, there), (0, new)) if front else ((0, there), (there, new))
        ctx.set_materialize_grads(False)
        return after

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        gradient, corrections = given
        if gradient is None:
            return (None,) * 5
        (x, moments), old, new = Function.kept(ctx), ctx.old, ctx.new
        feature = None
        if ctx.needs_input_grad[2]:
            if corrections is None:
                feature = gradient.narrow(1, *new)
            elif differentiable.wanted(gradient):
                feature = _corrected(gradient, corrections, x, moments).narrow(1, *new)
            else:
                feature = cuda.append_backward(cuda.rows(gradient), corrections, cuda.rows(x), moments, *new)
        if not old[1]:
            return None, None, feature, None, None
        corrected = None if corrections is None else corrections.narrow(1, *old)
        return gradient.narrow(1, *old), corrected, feature, None, None


def _room(tensor: torch.Tensor, moments: torch.Tensor, front: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All of the memory of which these are a part, as tensors over it."""
    (n, there, h, w), channels = tensor.shape, tensor.stride(3)
    before = channels - there if front else 0
    values = tensor.as_strided((n, channels, h, w), tensor.stride(), tensor.storage_offset() - before)
    return values, moments.as_strided((2, channels), (channels, 1), moments.storage_offset() - before)


def _corrected(
    gradient: torch.Tensor, corrections: torch.Tensor, x: torch.Tensor, moments: torch.Tensor
) -> torch.Tensor:
    """The gradient with what the norms put off taken off it."""
    mean, a, b = (row.view(1, -1, 1, 1) for row in (moments[0], *corrections))
    whole: torch.Tensor = gradient.float() - a - (x.float() - mean) * b
    return whole.to(gradient.dtype)


class _BatchNormAct(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        moments: torch.Tensor,
        *norm_fields: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        norm = Norm(*norm_fields)
        y = cuda.forward(x, moments, norm)
        Function.keep(ctx, x, moments, norm.weight, norm.bias)
        ctx.rest = norm[4:]
        ctx.set_materialize_grads(False)
        return y, x.detach(), moments.detach()

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        dy, later, corrections = given
        if dy is None:
            return later, corrections, *[None] * len(Norm._fields)
        x, moments, weight, bias = Function.kept(ctx)
        norm = Norm(None, None, weight, bias, *ctx.rest)
        if differentiable.wanted(dy):
            dx, dweight, dbias = _differentiable_backward(dy, x, norm)
            return dx if later is None else later + dx, corrections, None, None, dweight, dbias, *[None] * 4
        behind = None
        if later is not None:
            if corrections is None:
                corrections = torch.zeros_like(moments)
            behind = cuda.rows(later), corrections
        gradient, corrections, *own = cuda.backward(nhwc(dy), cuda.rows(x), behind, moments, norm)
        return gradient, corrections, None, None, *own, *[None] * 4


def _differentiable_backward(dy: torch.Tensor, x: torch.Tensor, norm: Norm) -> Any:
    """The backward in PyTorch's own operations, so that it can be differentiated again. It puts nothing off."""

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return reference.batchnorm_act(x, None, None, None, weight, bias, *norm[4:])

    return differentiable.gradients(function, dy, (x, *norm.affine))


def unsupported(feature: torch.Tensor, channels: int) -> str:
    """Why the kernels cannot take this as the first feature map of a concatenation of `channels`; empty when they can."""
    return nvrtc.on_device(feature) or spec.unsupported(
        shape=tuple(feature.shape),
        channels=channels,
        channels_last=feature.dim() == 4 and feature.is_contiguous(memory_format=torch.channels_last),
        dtype=storage.name(feature.dtype),
        arch=nvrtc.arch(feature.device.index or 0),
    )


def features(feature: torch.Tensor, channels: int, front: bool = False) -> Parts:
    """The first feature map, [N, C, H, W], of a concatenation that will have `channels` in the end.

    With `front` each feature map that is to come stands before those that are there.

    The kernels take channels_last fp16, bf16 or fp32 on CUDA; everything else runs PyTorch's own operations.
    """
    feature = realigned(feature)
    reason = dispatch.refusal(unsupported(feature, channels), spec.wins(dtype=storage.name(feature.dtype)))
    if reason:
        fell_back[reason] += 1
        return feature, None
    found: Parts = _Append.apply(None, None, feature, channels, front)
    return found


def extended(tensor: torch.Tensor, moments: torch.Tensor | None, feature: torch.Tensor, front: bool = False) -> Parts:
    """What there is so far with one more feature map, [N, C, H, W]. `front` is that of `features`."""
    if moments is not None:
        if _fits(tensor, feature):
            found: Parts = _Append.apply(tensor, moments, feature, tensor.stride(3), front)
            return found
        fell_back["a later feature map differs from the first"] += 1
    return torch.cat((feature, tensor) if front else (tensor, feature), 1), None


def _fits(tensor: torch.Tensor, feature: torch.Tensor) -> bool:
    """Whether the kernels can write `feature` beside what there is."""
    (n, there, h, w), channels = tensor.shape, tensor.stride(3)
    return (
        feature.dtype == tensor.dtype
        and feature.device == tensor.device
        and (feature.shape[0], *feature.shape[2:]) == (n, h, w)
        and there + feature.shape[1] <= channels
        and not feature.shape[1] % storage.vector_width(storage.name(feature.dtype))
        and not nvrtc.on_device(feature)
    )


def batchnorm_act(
    tensor: torch.Tensor, moments: torch.Tensor | None, *norm: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """act(batch_norm(all features so far)) in training mode; running statistics are updated in place.

    Args:
        tensor, moments: used for nothing else afterwards: their place take the second and the third result.
        norm: the fields of a `Norm`, none of them None.

    Returns:
        A new tensor like the concatenation, and what there is for whoever comes next.
    """
    of = Norm(*norm)
    if moments is None or not all(running.is_contiguous() for running in of.running or ()):
        return reference.batchnorm_act(tensor, None, *of), tensor, None
    engaged[of.activation] += 1
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] = _BatchNormAct.apply(tensor, moments, *of)
    return found
