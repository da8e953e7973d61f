"""A linear layer in strict fp32 as one operation: on tensor cores with fp32's own error, or PyTorch's own.

Its rows are the pixels of a 1 x 1 convolution, whose kernels it shares. Result and gradients are dispatched each by itself. cuBLAS multiplies
in strict fp32 unless a script allows TF32 for matrix products, which is a setting of its own.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional as F

from advisor.ops import alignment, dispatch, nvrtc, storage
from advisor.ops.convolution import computed_in
from advisor.ops.convolution_support import Sizes
from advisor.ops.exact_conv import cuda, spec, tf32
from advisor.ops.operation import Arguments, Gradients, Operation, Saved


def _call(x: torch.Tensor, weight: torch.Tensor) -> spec.ExactConv:
    return spec.linear_call(tuple(x.shape), weight.shape[0])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[.., I] as pixels [rows, I, 1, 1], contiguous and aligned."""
    return alignment.aligned(x.reshape(-1, x.shape[-1]).contiguous())[:, :, None, None]


def _taps(weight: torch.Tensor) -> torch.Tensor:
    return alignment.aligned(weight.contiguous())[:, :, None, None]


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    call = _call(x, weight)
    if spec.product_left(call, spec.FORWARD, spec.LINEAR):
        return F.linear(x, weight, bias)
    rows = _rows(x)
    parts = cuda.split_weight(_taps(weight), 1, gradient=False)
    y = cuda.forward(cuda.split(rows), parts, alignment.aligned(bias), rows, call)
    # A tensor of its own over that memory: what changes it in place (an activation) may do so with no view.
    return y.flatten(1).view(*x.shape[:-1], weight.shape[0]).detach()


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, weight, bias = arguments
    call = _call(x, weight)
    of_input, of_weight = (not spec.product_left(call, product, spec.LINEAR) for product in spec.GRADIENTS)
    rows = _rows(dy)
    flat = rows.flatten(1)
    parts = cuda.split(rows) if of_input or of_weight else None
    if of_weight and parts is not None:  # x's parts are freed before the input's gradient is allocated
        dweight = cuda.backward_weight(parts, cuda.split(_rows(x)), _taps(weight), call).reshape(weight.shape)
    else:
        dweight = flat.mT @ x.reshape(-1, x.shape[-1])
    if of_input and parts is not None:
        turned = cuda.split_weight(_taps(weight), 1, gradient=True)
        dx = cuda.backward_data(parts, turned, rows, call).flatten(1)
    else:
        dx = flat @ weight
    return dx.view(x.shape), dweight, None if bias is None else flat.sum(0)


def _refusal(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    """Why PyTorch's own runs; empty when the kernels do."""
    reason = nvrtc.on_device(x) or alignment.misplaced(x, weight, bias)
    if reason:
        return reason
    if computed_in(x) != torch.float32 or weight.dtype != torch.float32:
        return "not computed in fp32"
    device = x.device.index or 0
    standing = _standing(x.shape, weight.shape, storage.name(x.dtype), device)
    return dispatch.refusal(standing[0], tf32.ALLOWED if tf32.products_allowed() else standing[1])


@lru_cache(maxsize=4096)
def _standing(shape: torch.Size, weight_shape: torch.Size, dtype: str, device: int) -> tuple[str, str]:
    """Why the kernels cannot take a layer of these sizes, and why they do not."""
    if 0 in shape:
        return "empty input", ""
    call = spec.linear_call(tuple(shape), weight_shape[0])
    sizes = Sizes((call.batch, call.inputs, 1, 1), (*weight_shape, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    unsupported = spec.SUPPORTS.unsupported(sizes, dtype=dtype, weight_dtype=dtype, arch=nvrtc.arch(device), compute="")
    return unsupported, spec.wins(call, spec.LINEAR) or cuda.unmeasured(device)


_LINEAR = Operation(
    name="exact_linear",
    family="exact_conv",
    forward=_forward,
    backward=_backward,
    pytorch=F.linear,
    refusal=_refusal,
    label=lambda x, weight, bias: spec.linear_name(x.shape[-1], weight.shape[0]),
    fake=lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    layout=lambda *_: torch.contiguous_format,
)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` in fp32, with an error of fp32's own on the tensor cores.

    Args:
        x: [.., I]; the kernels take fp32 on CUDA while TF32 is off for matrix products, everything else runs PyTorch's own.
        weight: [O, I]; bias: [O] or None.

    Returns:
        A new tensor [.., O] in x's dtype (autocast's, if that is on).
    """
    return _LINEAR(x, weight, bias)
