"""BatchNorm (+ residual add) + activation as one operation: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `batchnorm_act`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.batchnorm_act`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
`frozen_batchnorm_act` normalises by the running statistics; it is for eager code alone, since Inductor fuses that itself.
`forked_batchnorm_act`, for eager code too, gives out its result twice, so that the two gradients are added up in its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import is_nhwc, nhwc, realigned
from advisor.ops.batchnorm_act import cuda, frozen, joined, over_ranks, reference, spec
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.operation import ABOVE, NONE, OWN, Arguments, Gradients, Operation, Saved, Unread

OVER_RANKS = "its statistics are those of all ranks"  # why a norm is left alone


def unsupported(x: torch.Tensor, residual: torch.Tensor | None, activation: str, *, joins: bool = False) -> str:
    """Why the kernels cannot take these tensors; empty when they can. `joins`: rows may be taken for one."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or not is_nhwc(residual)):
        return "residual differs in shape, dtype or layout"
    return spec.unsupported(
        shape=tuple(x.shape),
        channels_last=is_nhwc(x),
        dtype=storage.name(x.dtype),
        activation=activation,
        residual=residual is not None,
        arch=nvrtc.arch(x.device.index or 0),
        joins=joins,
    )


def _joined(x: torch.Tensor) -> bool:
    """Whether rows of x are taken for one."""
    return x.shape[1] % 8 != 0 and spec.joined(x.shape[1], storage.name(x.dtype)) > 1


def _kept(mask: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dy [N, C, H, W] in fp32 where the forward's bits are set, else zero."""
    return dy.float().where(differentiable.bits(mask, dy), 0.0)


def _through(dy: torch.Tensor, z: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The gradient at z in fp32, where dy is the activation's, differentiable itself."""
    if norm.activation == "none":
        return dy.float()
    return differentiable.gradient(lambda z: reference.activate(z, norm.activation, norm.slope), dy.float(), z)


def differentiable_backward(
    dy: torch.Tensor, x: torch.Tensor, norm: Norm, mask: torch.Tensor | None, residual: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The backward in differentiable torch ops, so that it can be differentiated again. fp32 statistics.

    The activation's slope is taken as constant where the forward kept a bit mask: it is 0 or 1 there.
    """
    wide = x.float()
    mean = wide.mean((0, 2, 3), keepdim=True)
    centred = wide - mean
    invstd = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + norm.eps)
    normal = centred * invstd
    scale, shift = (one.view(1, -1, 1, 1) for one in norm.affine)
    g = _kept(mask, dy) if mask is not None else _through(dy, normal * scale + shift, norm)
    dbias = g.sum((0, 2, 3))
    dweight = (g * normal).sum((0, 2, 3))
    count = x.numel() // x.shape[1]
    dx = scale * invstd * (g - dbias.view(1, -1, 1, 1) / count - normal * dweight.view(1, -1, 1, 1) / count)
    dresidual = g.to(x.dtype) if residual else None
    return dx.to(x.dtype), dresidual, dweight, dbias


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    way: str | None = None,
    forked: bool = False,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """y, with `forked` a second handle of it, saved statistics and mask, as `cuda.forward`, and the weight and the bias that there were not."""
    read = norm.filled(x)
    if over_ranks.Ranks.group is not None:
        # The launch updates running statistics by this rank's samples: by these it gets none.
        own = read._replace(running_mean=None, running_var=None)
        y, saved, mask = cuda.forward(
            x, residual, own, moments=moments, between=lambda s: over_ranks.gathered(s, x, norm)
        )
    elif _joined(x):
        y, saved, mask = joined.forward(x, residual, read)
    else:
        y, saved, mask = cuda.forward(x, residual, read, way=way, moments=moments)
    # The second is a tensor over the same memory. To autograd no view of the first, but with its version: a change in place of either is
    # seen by whoever has saved the other.
    return y, y.detach() if forked else None, saved, mask, *_made(read, norm)


def _made(read: Norm, norm: Norm) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of the weight and bias that are read those that the norm has not."""
    return read.weight if norm.weight is None else None, read.bias if norm.bias is None else None


def _pure(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, statistics [4, C] (mean, inverse standard deviation, new running mean and variance, which the caller copies back) and mask."""
    return cuda.forward(x, residual, norm, in_place=False)  # type: ignore[return-value]  # a mask that is None is an empty one to the library


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    masked = residual is not None and norm.activation != "none"
    width = storage.vector_width(storage.name(x.dtype))
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty((4, x.shape[1]), dtype=torch.float32),
        x.new_empty(x.numel() // width if masked else 0, dtype=torch.uint8),
    )


def _backward(above: tuple[torch.Tensor | None, ...], arguments: Arguments, saved: Saved) -> Gradients:
    x, residual, norm, way, *_ = arguments
    statistics, mask, *made = saved
    given = [dy for dy in above if dy is not None]
    # To make a slice, as a concatenation's gradient has it, dense for the kernels would cost what the sum does.
    if len(given) == 2 and not all(map(is_nhwc, given)):
        given = [given[0] + given[1]]
    of = x, statistics, mask, _read(norm, made), residual is not None
    if over_ranks.over_all(statistics):
        dy2 = nhwc(given[1]) if len(given) == 2 else None
        found = cuda.backward(nhwc(given[0]), dy2, *of, between=lambda c: over_ranks.add_up(c, statistics, x))
    elif _joined(x):
        found = joined.backward(nhwc(given[0]), *of)
    else:
        found = cuda.backward(nhwc(given[0]), nhwc(given[1]) if len(given) == 2 else None, *of, way=way)
    return *_told(found, residual, norm), None


def _read(norm: Norm, made: Sequence[torch.Tensor]) -> Norm:
    """The norm as `filled` gave it, of its own weight and bias and those that were made."""
    weight, bias = made[0] if norm.weight is None else norm.weight, made[1] if norm.bias is None else norm.bias
    return norm._replace(weight=weight, bias=bias)


def _told(found: Sequence[torch.Tensor | None], residual: torch.Tensor | None, norm: Norm) -> Gradients:
    """The gradients of x, residual, running statistics, weight and bias, of those that there are."""
    dx, dresidual, dweight, dbias = found
    affine_gradients = None if norm.weight is None else dweight, None if norm.bias is None else dbias
    return dx, None if residual is None else dresidual, None, None, *affine_gradients


def _twice(above: tuple[torch.Tensor | None, ...], arguments: Arguments, saved: Saved) -> Gradients:
    x, residual, norm, *_ = arguments
    statistics, mask, *made = saved
    if over_ranks.over_all(statistics):
        raise RuntimeError(
            "a batch norm over all ranks' samples cannot be differentiated twice: leave out fused_bn_act"
        )
    first, *others = [dy for dy in above if dy is not None]
    dy = first + others[0] if others else first
    found = differentiable_backward(dy, x, _read(norm, made), mask, residual is not None)
    return *_told(found, residual, norm), None


def _refusal(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, *_others: Any, variant: str = "") -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    kind = variant or _variant(x, norm)
    if over_ranks.Ranks.group is not None and kind == spec.JOINED:
        return OVER_RANKS
    dtype = storage.name(x.dtype)
    wins = spec.wins(activation=norm.activation, residual=residual is not None, dtype=dtype, variant=kind)
    return dispatch.refusal(unsupported(x, residual, norm.activation, joins=not variant), wins)


def _label(
    _x: object, residual: torch.Tensor | None, norm: Norm, _way: object = None, forked: bool = False, *_: Any
) -> str:
    return (norm.activation if residual is None else f"add+{norm.activation}") + (f" {spec.FORKED}" if forked else "")


_BATCH_NORM_ACT = Operation(
    name="batchnorm_act",
    forward=_forward,
    results=2,
    pure=_pure,
    backward=_backward,
    reads=lambda *_: (True, False, False, False, True, True, False),
    flows=lambda x, residual, norm, *_: (
        *(OWN, OWN if spec.writes_residual_gradient(norm.activation, True, forked=False) else ABOVE),
        *(NONE, NONE, OWN, OWN, NONE),
    ),
    twice=_twice,
    pytorch=lambda x, residual, norm, *_: reference.batchnorm_act(x, residual, *norm),
    refusal=_refusal,
    label=_label,
    readable=lambda x, residual, *others: (nhwc(x), nhwc(residual), *others),
    fake=_fake,
)


def batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *norm: Any,
    way: str | None = None,
    moments: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in training mode; running statistics are updated in place.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        residual: like x, or None.
        norm: the fields of a `Norm`, in its order.
        way: one of spec.WAYS, how each pass is launched where that can be; None for the one that is measured to be fastest.
        moments: of x, as the kernel that made it left them (ops/moments.py), in place of a pass over x; None for that pass.

    Where channels are no multiple of a vector's values, some rows are taken for one, and `way` and `moments` mean nothing.

    Returns:
        A new tensor like x.
    """
    result: torch.Tensor = _BATCH_NORM_ACT(realigned(x), realigned(residual), *Norm(*norm), way, False, moments)
    return result


def forked_batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *norm: Any,
    way: str | None = None,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `batchnorm_act`, for a result that is used twice: two tensors over one memory, each to be used in one place.

    The backward takes a gradient for each and adds them up in its kernels, in fp32; autograd's own sum, a launch that reads both
    and writes a third, falls away. Where the kernels do not run, or only one of the two gets a gradient, it is as with one.
    """
    x, residual, of = realigned(x), realigned(residual), Norm(*norm)
    if _refusal(x, residual, of, variant=spec.FORKED):
        y = _BATCH_NORM_ACT(x, residual, *of, way, False, moments)
        return y, y
    both: tuple[torch.Tensor, torch.Tensor] = _BATCH_NORM_ACT.taken(x, residual, *of, way, True, moments)
    return both


def _variant(x: torch.Tensor, norm: Norm) -> str:
    if x.dim() == 4 and _joined(x):
        return spec.JOINED
    if norm.running_mean is None:
        return spec.NO_STATISTICS
    return spec.NO_AFFINE if norm.weight is None or norm.bias is None else ""


def _frozen_forward(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, affine_gradients: bool
) -> tuple[torch.Tensor | None, ...]:
    read = norm.filled(x)
    return *frozen.forward(x, residual, read, affine_gradients), *_made(read, norm)


def _frozen_backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    return _frozen_gradients(frozen.backward, nhwc(dy), arguments, saved)


def _frozen_twice(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    return _frozen_gradients(_frozen_differentiable_backward, dy, arguments, saved)


def _frozen_gradients(
    by: Callable[..., Sequence[torch.Tensor | None]], dy: torch.Tensor, arguments: Arguments, saved: Saved
) -> Gradients:
    x, residual, norm, affine_gradients = arguments
    mask, *made = saved
    of = mask, _read(norm, made), residual is not None, affine_gradients
    return _told(by(dy, None if isinstance(x, Unread) else x, *of), residual, norm)


def _frozen_differentiable_backward(
    dy: torch.Tensor, x: torch.Tensor | None, mask: torch.Tensor, norm: Norm, residual: bool, affine_gradients: bool
) -> tuple[torch.Tensor | None, ...]:
    """As `differentiable_backward`, by running statistics."""
    mean, var, scale, shift = (one.view(1, -1, 1, 1) for one in norm.read)
    invstd = torch.rsqrt(var + norm.eps)
    normal = None if x is None else (x.float() - mean) * invstd
    if spec.frozen_masked(norm.activation, residual, affine_gradients):
        g = _kept(mask, dy)
    else:
        g = dy.float() if normal is None else _through(dy, normal * scale + shift, norm)
    dweight = (g * normal).sum((0, 2, 3)) if affine_gradients and normal is not None else None
    dbias = g.sum((0, 2, 3)) if affine_gradients else None
    return (g * scale * invstd).to(dy.dtype), g.to(dy.dtype), dweight, dbias


_FROZEN = Operation(
    name="frozen_batchnorm_act",
    family="batchnorm_act",
    forward=_frozen_forward,
    backward=_frozen_backward,
    reads=lambda x, residual, norm, affine_gradients: (
        *(
            spec.frozen_keeps_input(norm.activation, residual is not None, affine_gradients),
            False,
            True,
            True,
            True,
            True,
        ),
    ),
    twice=_frozen_twice,
    pytorch=lambda x, residual, norm, _: reference.frozen_batchnorm_act(x, residual, *norm[:4], *norm[5:]),
    refusal=lambda x, residual, norm, _: _refusal(x, residual, norm, variant=spec.FROZEN),
    label=lambda x, residual, norm, _: (
        f"frozen {norm.activation}" if residual is None else f"frozen add+{norm.activation}"
    ),
    compiles=False,
)


def frozen_batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *rest: Any,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in evaluation mode, by the running statistics, with gradients.

    Args: as of `batchnorm_act`; a norm's without its momentum. Where weight and bias want no gradient and the activation's slope is 0 or 1,
        x is not kept for the backward: a bit an element is.
    """
    norm = Norm(running_mean, running_var, weight, bias, 0.0, *rest)
    affine_gradients = any(one is not None and one.requires_grad for one in (weight, bias))
    result: torch.Tensor = _FROZEN(realigned(x), realigned(residual), *norm, affine_gradients)
    return result
