"""Large depthwise taps: the kernels, emulated, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from advisor.ops.large_depthwise import cuda, spec


@pytest.mark.parametrize(
    ("shape", "taps", "dtype"),
    [
        ((2, 2, 16, 16), (9, 9), torch.bfloat16),
        ((3, 1, 19, 70), (13, 13), torch.float16),
        ((9, 1, 7, 7), (13, 13), torch.float32),
        ((1, 1, 70, 12), (1, 11), torch.bfloat16),
        ((2, 1, 12, 20), (31, 31), torch.float32),
    ],
)
def test_three_directions(emulated, shape: tuple[int, ...], taps: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    padding = taps[0] // 2, taps[1] // 2
    call = spec.call(shape, taps, padding)
    x, weight, bias = torch.randn(shape), torch.randn(shape[1], 1, *taps) / sum(taps), torch.randn(shape[1])
    x = x.to(dtype)
    exact_x, exact_w = x.double().requires_grad_(), weight.to(dtype).double().requires_grad_()
    exact = F.conv2d(exact_x, exact_w, bias.double(), padding=padding, groups=shape[1])
    dy = torch.randn(exact.shape).to(dtype)
    exact_dx, exact_dw = torch.autograd.grad(exact, (exact_x, exact_w), dy.double())
    bound = {torch.float32: 4e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]

    def near(found: torch.Tensor, expected: torch.Tensor, limit: float = bound) -> None:
        assert ((found.double() - expected).norm() / expected.norm()).item() < limit

    near(cuda.forward(x, weight, bias, call), exact)
    near(cuda.backward_data(dy, weight, call), exact_dx)
    near(cuda.backward_weight(dy, x, weight, call), exact_dw, 4e-7)


@pytest.mark.parametrize("shape", [(2, 5, 3, 7), (3, 8, 9, 8), (1, 130, 5, 14), (2, 66, 11, 6), (1, 72, 8, 17)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_images_are_turned_into_planes_and_back(emulated, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows that fill no vector, no tile, several tiles."""
    torch.manual_seed(0)
    planes = torch.randn(shape).to(dtype)
    images = planes.contiguous(memory_format=torch.channels_last)
    found = cuda.planes(images)
    assert found.is_contiguous()
    assert torch.equal(found, planes)
    back = cuda.images(planes)
    assert back.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back, planes)
