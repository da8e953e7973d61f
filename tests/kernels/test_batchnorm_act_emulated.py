"""The BatchNorm(+add)+activation kernels against their fp64 reference, emulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from advisor.ops.batchnorm_act import api, reference, spec

# Relative L2 error against fp64 that rounding each output once allows (half an ulp of the mantissa), times two.
BOUND = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [
    (2, 8, 1, 1),
    (3, 16, 5, 7),
    (1, 72, 9, 9),
    (5, 200, 7, 7),
    (2, 1016, 3, 3),  # 127 vectors of 8: a prime number
    (16, 24, 14, 14),  # more rows than one pass of the blocks
]
VARIANTS = [(a, False) for a in spec.ACTIVATIONS] + [(a, True) for a in sorted(spec.RESIDUAL_ACTIVATIONS)]


def relative(got: torch.Tensor, want: torch.Tensor, floor: float = 1e-30) -> float:
    assert torch.isfinite(got).all()
    return ((got.double() - want).norm() / want.norm().clamp_min(floor)).item()


def case(shape: tuple[int, ...], dtype: torch.dtype, residual: bool, seed: int, offset: float = 0.5):
    g = torch.Generator().manual_seed(seed)
    n, c, h, w = shape

    def tensor(scale: float = 1.5, shift: float = offset) -> torch.Tensor:
        return (torch.randn(n, h, w, c, generator=g) * scale + shift).to(dtype).permute(0, 3, 1, 2)

    weight = torch.rand(c, generator=g) + 0.5
    bias = torch.randn(c, generator=g)
    running = [torch.zeros(c), torch.ones(c)]
    return tensor(), tensor() if residual else None, running, weight, bias, tensor(1.0, 0.0)


def expected(x, residual, running, weight, bias, dy, activation):
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    r = residual.detach().double().requires_grad_() if residual is not None else None
    buffers = [b.double().clone() for b in running]
    z = reference.batchnorm_act(
        leaves[0], r, *[b.clone() for b in buffers], leaves[1], leaves[2], 0.1, 1e-5, "none"
    ).detach()
    for kink in (-3.0, 0.0, 3.0, 6.0):  # where the slope jumps, fp32 rounding of z decides: no gradient there
        dy[(z - kink).abs() < 1e-3] = 0
    y = reference.batchnorm_act(leaves[0], r, *buffers, leaves[1], leaves[2], 0.1, 1e-5, activation, 0.01)
    grads = torch.autograd.grad(y, [*leaves, *([r] if r is not None else [])], dy.double())
    return y.detach(), buffers, grads


def check(shape, activation, residual, dtype):
    x, r, running, weight, bias, dy = case(shape, dtype, residual, seed=sum(shape))
    want_y, want_running, want_grads = expected(x, r, running, weight, bias, dy, activation)
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    rr = r.detach().requires_grad_() if r is not None else None
    y = api.batchnorm_act(leaves[0], rr, *running, leaves[1], leaves[2], 0.1, 1e-5, activation, 0.01)
    assert y.is_contiguous(memory_format=torch.channels_last)
    got = torch.autograd.grad(y, [*leaves, *([rr] if rr is not None else [])], dy)
    assert relative(y, want_y) < BOUND[dtype]
    for mine, want in zip(running, want_running, strict=True):
        assert relative(mine, want) < 1e-5
    # With few rows a channel dx is what cancellation leaves of dy: judge it against dy's size then.
    floor = 0.05 * dy.double().norm().item()
    for mine, want in zip(got, want_grads, strict=True):
        assert relative(mine, want, floor) < max(3 * BOUND[dtype], 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "residual"), VARIANTS)
def test_every_variant_matches_fp64(emulated, activation, residual, dtype):
    for shape in ((3, 16, 5, 7), (2, 136, 6, 6)):
        check(shape, activation, residual, dtype)
    assert emulated.launches == dict.fromkeys(sum(spec.KERNELS.values(), ()), 2)
