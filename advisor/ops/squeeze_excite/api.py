"""Squeeze-and-excite as one operation in NHWC: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `squeeze_excite`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.squeeze_excite`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, misplaced, nhwc
from advisor.ops.function import Function
from advisor.ops.squeeze_excite import cuda, reference, spec

engaged, fell_back = dispatch.counters("squeeze_excite")


def _refusal(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    reason = nvrtc.on_device(x) or misplaced(x, w1, b1, w2, b2)
    if reason:
        return reason
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.data_ptr() % 16 == 0
    parameters = tuple(p.dtype for p in (w1, b1, w2, b2) if p is not None)
    return dispatch.refusal(
        *_standing(x.shape, channels_last, w1.shape[0], x.dtype, parameters, activation, gate, x.device.index or 0)
    )


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size,
    channels_last: bool,
    hidden: int,
    dtype: torch.dtype,
    parameters: tuple[torch.dtype, ...],
    activation: str,
    gate: str,
    device: int,
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    unsupported = spec.unsupported(
        shape=tuple(shape),
        channels_last=channels_last,
        hidden=hidden,
        dtype=storage.name(dtype),
        parameters=tuple(storage.name(p) for p in parameters),
        activation=activation,
        gate=gate,
        arch=nvrtc.arch(device),
    )
    wins = spec.wins(channels=shape[1], hidden=hidden, activation=activation, gate=gate, dtype=storage.name(dtype))
    return unsupported, wins


def _differentiable(
    dy: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor | None, ...]:
    """dx and the parameters' gradients through PyTorch's own operations: these can be differentiated again."""
    return differentiable.gradients(
        lambda x, w1, b1, w2, b2: reference.squeeze_excite(x, w1, b1, w2, b2, activation, gate),
        dy,
        (x, w1, b1, w2, b2),
    )


class _SqueezeExcite(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        activation: str,
        gate: str,
    ) -> torch.Tensor:
        y, saved = cuda.forward(x, w1, b1, w2, b2, activation, gate)
        Function.keep(ctx, x, w1, b1, w2, b2, saved)
        ctx.activation, ctx.gate = activation, gate
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, w1, b1, w2, b2, saved = Function.kept(ctx)
        if differentiable.wanted(dy):
            return (*_differentiable(dy, x, w1, b1, w2, b2, ctx.activation, ctx.gate), None, None)
        dy = nhwc(dy)
        dx, dw1, db1, dw2, db2 = cuda.backward(dy, x, saved, w1, w2, ctx.activation, ctx.gate)
        return dx, dw1, None if b1 is None else db1, dw2, None if b2 is None else db2, None, None


def squeeze_excite(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> torch.Tensor:
    """x * gate(act(mean(x) W1ᵀ + b1) W2ᵀ + b2), the mean over the pixels.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        w1: [S, C] or [S, C, 1, 1]; w2: [C, S] or [C, S, 1, 1]; b1: [S], b2: [C], or None. fp32; the kernels compute in fp32
            what autocast would compute in half precision.
        activation, gate: keys of `spec.ACTIVATIONS` and `spec.GATES`.

    Returns:
        A new tensor like x.
    """
    reason = _refusal(x, w1, b1, w2, b2, activation, gate)
    if reason:
        fell_back[reason] += 1
        return reference.squeeze_excite(x, w1, b1, w2, b2, activation, gate)
    engaged[spec.name(activation, gate)] += 1
    result: torch.Tensor = _SqueezeExcite.apply(x, w1, b1, w2, b2, activation, gate)
    return result


@torch.library.custom_op("advisor::squeeze_excite", mutates_args=())
def squeeze_excite_op(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `squeeze_excite`, for compiled graphs, where `spec.unsupported` has nothing against it. CUDA only.

    Returns y, channels_last, and what the backward needs (see cuda.forward).
    """
    x = nhwc(x)
    engaged[spec.name(activation, gate)] += 1
    return cuda.forward(x, aligned(w1), aligned(b1), aligned(w2), aligned(b2), activation, gate)


@squeeze_excite_op.register_fake
def _(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty(x.shape[0] * (2 * x.shape[1] + w1.shape[0]), dtype=torch.float32),
    )


@torch.library.custom_op("advisor::squeeze_excite_backward", mutates_args=())
def squeeze_excite_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::squeeze_excite`: of x, w1, b1, w2, b2 (empty where there is no such bias)."""
    dy = nhwc(dy)
    x = nhwc(x)
    dx, dw1, db1, dw2, db2 = cuda.backward(dy, x, saved, aligned(w1), aligned(w2), activation, gate)
    return (
        dx,
        dw1,
        x.new_empty(0) if b1 is None else db1,
        dw2,
        x.new_empty(0) if b2 is None else db2,
    )


@squeeze_excite_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dw1, db1, dw2, db2 = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (w1, b1, w2, b2))
    return torch.empty_like(x, memory_format=torch.channels_last), dw1, db1, dw2, db2


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, w1, b1, w2, b2, activation, gate = inputs
    _, saved = output
    ctx.save_for_backward(x, w1, b1, w2, b2, saved)
    ctx.mark_non_differentiable(saved)
    ctx.activation, ctx.gate = activation, gate


def _op_backward(ctx: Any, dy: torch.Tensor, _saved: Any) -> tuple[Any, ...]:
    x, w1, b1, w2, b2, saved = ctx.saved_tensors
    dx, dw1, db1, dw2, db2 = squeeze_excite_backward_op(dy, x, saved, w1, b1, w2, b2, ctx.activation, ctx.gate)
    return dx, dw1, None if b1 is None else db1, dw2, None if b2 is None else db2, None, None


squeeze_excite_op.register_autograd(_op_backward, setup_context=_setup)
