"""Squeeze-and-excite as one operation in NHWC: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `squeeze_excite`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.squeeze_excite`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, misplaced, nhwc
from advisor.ops.operation import Arguments, Gradients, Operation, Saved
from advisor.ops.squeeze_excite import cuda, reference, spec


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


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, w1, b1, w2, b2, activation, gate = arguments
    dx, dw1, db1, dw2, db2 = cuda.backward(nhwc(dy), x, saved[0], w1, w2, activation, gate)
    return dx, dw1, None if b1 is None else db1, dw2, None if b2 is None else db2


_SQUEEZE_EXCITE = Operation(
    name="squeeze_excite",
    forward=cuda.forward,
    backward=_backward,
    pytorch=reference.squeeze_excite,
    refusal=_refusal,
    label=lambda x, w1, b1, w2, b2, activation, gate: spec.name(activation, gate),
    readable=lambda x, w1, b1, w2, b2, *others: (nhwc(x), aligned(w1), aligned(b1), aligned(w2), aligned(b2), *others),
    fake=lambda x, w1, b1, w2, b2, activation, gate: (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty(x.shape[0] * (2 * x.shape[1] + w1.shape[0]), dtype=torch.float32),
    ),
)
squeeze_excite_op = _SQUEEZE_EXCITE.compiled


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
    return _SQUEEZE_EXCITE(x, w1, b1, w2, b2, activation, gate)
