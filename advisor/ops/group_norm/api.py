"""GroupNorm (or InstanceNorm) + activation as one operation in NHWC: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `group_norm`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.group_norm`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, misplaced, nhwc
from advisor.ops.group_norm import cuda, reference, spec
from advisor.ops.operation import Arguments, Gradients, Operation, Saved


def _refusal(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _eps: float,
    activation: str,
    dtype: torch.dtype,
    _slope: float,
) -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    reason = nvrtc.on_device(x) or misplaced(x, weight, bias)
    if reason:
        return reason
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.data_ptr() % 16 == 0
    parameters = tuple(p.dtype for p in (weight, bias) if p is not None)
    return dispatch.refusal(
        *_standing(x.shape, channels_last, groups, x.dtype, dtype, parameters, activation, x.device.index or 0)
    )


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size,
    channels_last: bool,
    groups: int,
    dtype: torch.dtype,
    result: torch.dtype,
    parameters: tuple[torch.dtype, ...],
    activation: str,
    device: int,
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    types = {"dtype": storage.name(dtype), "result": storage.name(result)}
    given = tuple(storage.name(p) for p in parameters)
    unsupported = spec.unsupported(
        shape=tuple(shape),
        channels_last=channels_last,
        groups=groups,
        parameters=given,
        activation=activation,
        arch=nvrtc.arch(device),
        **types,
    )
    wins = spec.wins(channels=shape[1], groups=groups, activation=activation, **types)
    return unsupported, wins or spec.narrow(given)


def _fp32(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter as the kernels read it: no copy when it is that already."""
    return None if parameter is None else parameter.float()


@lru_cache(maxsize=256)
def _name(groups: int, channels: int, activation: str, dtype: torch.dtype, result: torch.dtype) -> str:
    return spec.name(groups, channels, activation, storage.name(dtype), storage.name(result))


def _readable(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter aligned, where the kernels get it itself and no copy in fp32."""
    return aligned(parameter) if parameter is not None and parameter.dtype == torch.float32 else parameter


def _forward(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    dtype: torch.dtype,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, channels_last, and saved [N, G, 2] fp32: mean and inverse standard deviation."""
    return cuda.forward(x, groups, _fp32(weight), _fp32(bias), eps, activation, dtype, slope)


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, groups, weight, bias, _, activation, _, slope = arguments
    dx, dweight, dbias = cuda.backward(nhwc(dy), x, saved[0], _fp32(weight), _fp32(bias), groups, activation, slope)
    return (
        dx,
        None if weight is None else dweight.to(weight.dtype),
        None if bias is None else dbias.to(bias.dtype),
    )


_GROUP_NORM = Operation(
    name="group_norm",
    forward=_forward,
    backward=_backward,
    pytorch=reference.group_norm,
    refusal=_refusal,
    label=lambda x, groups, weight, bias, eps, activation, dtype, slope: _name(
        groups, x.shape[1], activation, x.dtype, dtype
    ),
    readable=lambda x, groups, weight, bias, *others: (nhwc(x), groups, _readable(weight), _readable(bias), *others),
    fake=lambda x, groups, weight, bias, eps, activation, dtype, slope: (
        torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last),
        x.new_empty((x.shape[0], groups, 2), dtype=torch.float32),
    ),
)
group_norm_op = _GROUP_NORM.compiled


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str = "none",
    dtype: torch.dtype | None = None,
    slope: float = 0.01,
) -> torch.Tensor:
    """act(group_norm(x)): statistics over the pixels and the channels of a group, per sample, in training as in evaluation.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        groups: a divisor of C; as many groups as channels is instance normalisation.
        weight, bias: [C] fp32, fp16 or bf16, or None.
        activation: a key of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
        dtype: of the result; None: x's own. Under autocast PyTorch's own result is fp32.

    Returns:
        A new tensor of x's shape; channels_last from the kernels.
    """
    return _GROUP_NORM(x, groups, weight, bias, eps, activation, dtype or x.dtype, slope)
