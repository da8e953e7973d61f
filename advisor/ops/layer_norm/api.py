"""LayerNorm over the channels as one operation without permutes: the bundled kernels, or PyTorch's own.

Two entries over the same kernels: `layer_norm`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.layer_norm`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, dense, misplaced
from advisor.ops.layer_norm import cuda, reference, spec
from advisor.ops.operation import Arguments, Gradients, Operation, Saved


def _format(dim: int) -> torch.memory_format:
    return torch.contiguous_format if dim == -1 else torch.channels_last


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype, result: torch.dtype) -> str:
    return spec.name(storage.name(dtype), storage.name(result))


def _refusal(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _eps: float,
    dim: int,
    dtype: torch.dtype,
) -> str:
    """Why PyTorch's own operation runs; empty when the kernels do."""
    reason = nvrtc.on_device(x) or misplaced(x, weight, bias)
    if reason:
        return reason
    if dim == 1 and x.dim() != 4:
        return f"{x.dim()}-D input"
    contiguous = x.is_contiguous(memory_format=_format(dim)) and x.data_ptr() % 16 == 0
    parameters = tuple(p.dtype for p in (weight, bias) if p is not None)
    return dispatch.refusal(*_standing(x.shape, dim, contiguous, x.dtype, dtype, parameters, x.device.index or 0))


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size,
    dim: int,
    contiguous: bool,
    dtype: torch.dtype,
    result: torch.dtype,
    parameters: tuple[torch.dtype, ...],
    device: int,
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    types = {"dtype": storage.name(dtype), "result": storage.name(result)}
    channels = shape[dim]
    unsupported = spec.unsupported(
        rows=shape.numel() // max(channels, 1),
        channels=channels,
        contiguous=contiguous,
        parameters=tuple(storage.name(p) for p in parameters),
        arch=nvrtc.arch(device),
        **types,
    )
    return unsupported, spec.wins(channels=channels, **types)


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, weight, bias, eps, dim, _ = arguments
    dx, dweight, dbias = cuda.backward(dense(dy, _format(dim)), x, weight, eps, dim)
    return dx, None if weight is None else dweight, None if bias is None else dbias


_LAYER_NORM = Operation(
    name="layer_norm",
    forward=cuda.forward,
    backward=_backward,
    pytorch=reference.layer_norm,
    refusal=_refusal,
    label=lambda x, weight, bias, eps, dim, dtype: _name(x.dtype, dtype),
    readable=lambda x, weight, bias, eps, dim, dtype: (
        *(dense(x, _format(dim)), aligned(weight), aligned(bias), eps, dim, dtype),
    ),
    fake=lambda x, weight, bias, eps, dim, dtype: torch.empty_like(x, dtype=dtype, memory_format=_format(dim)),
    layout=lambda x, weight, bias, eps, dim, dtype: _format(dim),
)
layer_norm_op = _LAYER_NORM.compiled


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Layer normalisation over `dim`: the last one, or dimension 1 of an [N, C, H, W] tensor.

    Args:
        x: the kernels take fp16, bf16 or fp32 on CUDA with the channels contiguous in memory (channels_last for dim 1);
            everything else runs PyTorch's own operation.
        weight, bias: [C] fp32, or None.
        dtype: of the result; None: x's own. Under autocast PyTorch's own result is fp32.

    Returns:
        A new tensor of x's shape and layout.
    """
    return _LAYER_NORM(x, weight, bias, eps, dim, dtype or x.dtype)
