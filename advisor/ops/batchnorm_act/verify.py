"""The kernels against their fp64 reference on the GPU present: what `advisor kernels verify` and the benchmarks run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from advisor.ops.batchnorm_act import api, reference, spec

# Relative L2 error that storing a result once in this dtype explains (half an ulp of the mantissa), with room for the
# statistics' own rounding.
BOUND = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 5e-6}
SHAPES = ((4, 64, 28, 28), (3, 72, 9, 7), (2, 1016, 5, 3))


def errors(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    seed: int,
    function: Callable[..., torch.Tensor] = api.batchnorm_act,
) -> dict[str, float]:
    """Largest relative L2 errors of `output` and `gradient` of `function` against fp64, for random [N, C, H, W] inputs.

    The gradient is taken away from the points where the activation's slope jumps: there rounding decides.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    n, c, h, w = shape

    def tensor() -> torch.Tensor:
        values = torch.randn(n, h, w, c, device="cuda", generator=generator)
        return (values * 1.5 + 0.5).to(dtype).permute(0, 3, 1, 2)

    x, r, dy = tensor(), tensor() if residual else None, tensor()
    weight = torch.rand(c, device="cuda", generator=generator) + 0.5
    bias = torch.randn(c, device="cuda", generator=generator)
    buffers = torch.zeros(c, device="cuda"), torch.ones(c, device="cuda")
    wide = [b.double() for b in buffers]

    def run(
        function: Callable[..., torch.Tensor], kind: torch.dtype, statistics: list[torch.Tensor], act: str
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [t.detach().to(kind).requires_grad_() for t in (x, *([r] if r is not None else []))]
        wide_kind = torch.float64 if kind == torch.float64 else torch.float32
        scale = [t.detach().to(wide_kind).requires_grad_() for t in (weight, bias)]
        y = function(leaves[0], leaves[1] if residual else None, *statistics, *scale, 0.1, 1e-5, act, 0.01)
        return y, [*leaves, *scale]

    with torch.no_grad():
        z, _ = run(reference.batchnorm_act, torch.float64, [b.clone() for b in wide], "none")
        for kink in (-3.0, 0.0, 3.0, 6.0):
            dy[(z - kink).abs() < 1e-3] = 0
    y, leaves = run(function, dtype, list(buffers), activation)
    want, wide_leaves = run(reference.batchnorm_act, torch.float64, wide, activation)
    got = torch.autograd.grad(y, leaves, dy)
    expected = torch.autograd.grad(want, wide_leaves, dy.double())
    floor = 0.05 * dy.double().norm()

    def relative(mine: torch.Tensor, other: torch.Tensor, least: torch.Tensor) -> float:
        return float((mine.double() - other).norm() / torch.maximum(other.norm(), least))

    tiny = torch.tensor(1e-30, device="cuda", dtype=torch.float64)
    return {
        "output": max(relative(a, b, tiny) for a, b in zip((y, *buffers), (want, *wide), strict=True)),
        "gradient": max(relative(a, b, floor) for a, b in zip(got, expected, strict=True)),
    }


def verify(say: Callable[[str], None]) -> list[dict[str, object]]:
    """One row a variant and dtype over `SHAPES`; `passed` is False also when the kernels did not run at all."""
    rows: list[dict[str, object]] = []
    variants = [(a, False) for a in spec.ACTIVATIONS] + [(a, True) for a in sorted(spec.RESIDUAL_ACTIVATIONS)]
    for number, (activation, residual) in enumerate(variants):
        say(f"verifying batchnorm_act: variant {number + 1} of {len(variants)}")
        for name in spec.STORAGE:
            before = sum(api.engaged.values())
            worst = {"output": 0.0, "gradient": 0.0}
            for seed, shape in enumerate(SHAPES):
                if shape[1] % spec.vector_width(name):
                    continue
                found = errors(shape, getattr(torch, name), activation, residual, seed)
                # not max(): a NaN must win
                worst = {key: found[key] if not found[key] <= worst[key] else worst[key] for key in worst}
            ran = sum(api.engaged.values()) > before
            rows.append(
                {
                    "kernel": "batchnorm_act",
                    "variant": ("add+" if residual else "") + activation,
                    "dtype": name,
                    "output_error": worst["output"],
                    "gradient_error": worst["gradient"],
                    "passed": ran and worst["output"] < BOUND[name] and worst["gradient"] < 3 * BOUND[name],
                }
            )
    return rows
