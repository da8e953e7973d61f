"""Max and average pooling of volumes: the bundled kernels, or PyTorch's own operations. For eager code; Inductor has its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.operation import Arguments, Gradients, Operation, Saved, shape_alone
from advisor.ops.volume_pooling import cuda, reference, spec
from advisor.ops.volume_pooling.spec import Triple, VolumeWindow


def _refusal(operation: str, x: torch.Tensor, window: VolumeWindow) -> str:
    """Why PyTorch's own operation runs; empty when the kernels do."""
    return nvrtc.on_device(x) or dispatch.refusal(
        *_standing(operation, x.shape, alignment.is_ndhwc(x), x.dtype, window, x.device.index or 0)
    )


def _window(_x: object, *arguments: Any) -> VolumeWindow:
    return spec.window(*arguments)


@lru_cache(maxsize=4096)
def _standing(
    operation: str, shape: torch.Size, channels_last: bool, dtype: torch.dtype, window: VolumeWindow, device: int
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    name = storage.name(dtype)
    unsupported = spec.unsupported(
        operation,
        shape=tuple(shape),
        window=window,
        channels_last=channels_last,
        dtype=name,
        arch=nvrtc.arch(device),
    )
    return unsupported, spec.wins(operation, dtype=name)


def _to_chosen(dy: torch.Tensor, index: torch.Tensor, shape: tuple[int, ...], window: VolumeWindow) -> torch.Tensor:
    """dx in differentiable torch ops: each of dy added to the element that its window has chosen."""
    at = index.long()
    _, kh, kw = window.kernel
    taps = (at // (kh * kw), at // kw % kh, at % kw)
    flat = torch.zeros_like(at)
    for axis, tap in enumerate(taps):
        ones = [1] * 5
        ones[2 + axis] = -1
        begin = torch.arange(index.shape[2 + axis], device=at.device) * window.stride[axis] - window.padding[axis]
        flat = flat * shape[2 + axis] + begin.view(ones) + tap
    plain = torch.zeros((*shape[:2], shape[2] * shape[3] * shape[4]), dtype=dy.dtype, device=dy.device)
    chosen = flat.flatten(2)
    return plain.scatter_add(2, chosen, dy.reshape(chosen.shape)).view(shape)


def _max_forward(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], *, kept: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y, index = cuda.max_pool3d_forward(x, _window(x, kernel, stride, padding), indices=kept)
    return y, index  # type: ignore[return-value]  # None where no backward follows; a schema knows no such result


def _max_backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    return (cuda.max_pool3d_backward(_dense(dy), saved[0], arguments[0].shape, _window(*arguments)),)


def _avg_forward(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    return cuda.avg_pool3d_forward(x, _window(x, kernel, stride))


def _avg_backward(dy: torch.Tensor, arguments: Arguments, _saved: Saved) -> Gradients:
    return (cuda.avg_pool3d_backward(_dense(dy), arguments[0].shape, _window(*arguments)),)


def _dense(dy: torch.Tensor) -> torch.Tensor:
    return alignment.dense(dy, torch.channels_last_3d)


_MAX_POOL = Operation(
    name="max_pool3d",
    family="volume_pooling",
    forward=_max_forward,
    backward=_max_backward,
    reads=shape_alone,
    twice=lambda dy, arguments, saved: (_to_chosen(dy, saved[0], arguments[0].shape, _window(*arguments)),),
    pytorch=F.max_pool3d,
    refusal=lambda x, *window: _refusal("max_pool3d", x, _window(x, *window)),
    label=lambda *_: "max_pool3d",
    compiles=False,
)
_AVG_POOL = Operation(
    name="avg_pool3d",
    family="volume_pooling",
    forward=_avg_forward,
    backward=_avg_backward,
    reads=shape_alone,
    twice=lambda dy, arguments, _saved: differentiable.shaped(
        dy, reference.avg_pool3d, arguments[0].shape, *arguments[1:]
    ),
    pytorch=reference.eager_avg_pool3d,
    refusal=lambda x, *window: _refusal("avg_pool3d", x, _window(x, *window)),
    label=lambda *_: "avg_pool3d",
    compiles=False,
)


def max_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple, padding: Triple = (0, 0, 0)) -> torch.Tensor:
    """The largest value of each window.

    Args:
        x: [N, C, D, H, W]; the kernels take channels_last_3d fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's operation.
    """
    return _MAX_POOL(x, kernel, stride, padding)


def avg_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple) -> torch.Tensor:
    """The mean of each window, without padding; as `max_pool3d`."""
    return _AVG_POOL(x, kernel, stride)
