"""`advisor bench ops`: each bundled kernel beside eager PyTorch and torch.compile, in one process, with the limit and the error."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from advisor.bench import results, timing
from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import nvrtc, sources
from advisor.ops.batchnorm_act import api, reference, spec, verify

# [N, C, H, W] of the batch norms of ResNet-50 at batch 256, MobileNetV3 and CIFAR ResNet-18 at batch 128.
SHAPES = (
    (256, 64, 112, 112),
    (256, 256, 56, 56),
    (256, 512, 28, 28),
    (256, 1024, 14, 14),
    (256, 2048, 7, 7),
    (256, 72, 56, 56),
    (256, 672, 14, 14),
    (128, 64, 32, 32),
    (128, 512, 4, 4),
)
VARIANTS = (("relu", False), ("relu", True), ("none", False), ("hardswish", False))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One measurement. Times are medians in milliseconds; `spread` is (p90 - p10) / median of advisor's own."""

    name: str
    pass_: str  # forward, backward
    shape: tuple[int, ...]
    dtype: str
    layout: str
    advisor_ms: float
    eager_ms: float
    compile_ms: float | None
    limit_ms: float
    spread: float
    eager_spread: float
    n: int
    advisor_host_us: float  # host time of the call itself
    eager_host_us: float
    error: float
    baseline_error: float
    kernel_sha: str
    torch: str
    date: str


def run(*, pattern: str, json_out: Path | None, baselines: bool, say: Callable[[str], None]) -> int:
    """Measure, and write after each row, so that an interrupted run leaves what it had.

    Raises:
        AdvisorError: without a GPU (exit code 5), or when `pattern` matches nothing.
    """
    reason = nvrtc.unavailable()
    if reason:
        raise AdvisorError(f"no benchmark here: {reason}", exit_code=ExitCode.GPU_REQUIRED)
    cases = [
        (shape, activation, residual, dtype)
        for dtype in DTYPES
        for activation, residual in VARIANTS
        for shape in (SHAPES if dtype is torch.bfloat16 else SHAPES[:3])
        if pattern in _name(activation, residual)
    ]
    if not cases:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of a name such as bn+relu")
    target = json_out or results.folder() / "ops.json"
    bandwidth = timing.copy_gbps()
    rows: list[OpRow] = []
    for number, case in enumerate(cases):
        say(f"measuring {_name(case[1], case[2])}: {number + 1} of {len(cases)}")
        # Inductor compiles anew for each shape and dtype, seconds each: it is asked where training happens most.
        rows += _measure(*case, bandwidth=bandwidth, compiled=baselines and case[3] is torch.bfloat16)
        results.write(target, "ops", rows, copy_gbps=bandwidth)
    return ExitCode.OK


def _name(activation: str, residual: bool) -> str:
    return "bn" + ("+add" if residual else "") + ("" if activation == "none" else f"+{activation}")


def _measure(
    shape: tuple[int, int, int, int],
    activation: str,
    residual: bool,
    dtype: torch.dtype,
    *,
    bandwidth: float,
    compiled: bool,
) -> list[OpRow]:
    n, c, h, w = shape
    elements = n * c * h * w
    itemsize = dtype.itemsize
    weight = (torch.rand(c, device="cuda") + 0.5).requires_grad_()
    bias = torch.randn(c, device="cuda").requires_grad_()

    def running() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(c, device="cuda"), torch.ones(c, device="cuda")

    def tensor() -> torch.Tensor:
        return torch.randn(n, h, w, c, device="cuda").to(dtype).permute(0, 3, 1, 2)

    sets: list[dict[str, Any]] = [
        {
            "x": tensor().requires_grad_(),
            "r": tensor().requires_grad_() if residual else None,
            "dy": tensor(),
            "running": running(),
        }
        for _ in range(timing.rotation(elements * itemsize * (3 if residual else 2)))
    ]

    def of(function: Callable[..., torch.Tensor]) -> Callable[[dict[str, Any]], torch.Tensor]:
        return lambda s: function(s["x"], s["r"], *s["running"], weight, bias, 0.1, 1e-5, activation, 0.01)

    contenders = {"advisor": of(api.batchnorm_act), "eager": of(reference.batchnorm_act)}
    if compiled:
        torch._dynamo.reset()
        contenders["compile"] = of(torch.compile(reference.batchnorm_act, dynamic=False))
    forward = timing.interleaved(contenders, sets)
    # Statistics of its own for each: autograd refuses a graph whose buffers a later forward has changed.
    graphs = {
        name: [
            (run({**s, "running": running()}), [t for t in (s["x"], s["r"], weight, bias) if t is not None], s["dy"])
            for s in sets
        ]
        for name, run in contenders.items()
    }

    def backward_of(name: str) -> Callable[[int], object]:
        def run(index: int) -> object:
            y, leaves, dy = graphs[name][index]
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)

        return run

    backwards = {name: backward_of(name) for name in contenders}
    backward = timing.interleaved(backwards, range(len(sets)))
    hosts = timing.host(contenders, sets), timing.host(backwards, range(len(sets)))
    small = (min(n, 8), c, h, w)
    mine = verify.errors(small, dtype, activation, residual, seed=1)
    theirs = verify.errors(small, dtype, activation, residual, seed=1, function=reference.batchnorm_act)
    limits = spec.bytes_moved(elements=elements, itemsize=itemsize, residual=residual)
    made = datetime.date.today().isoformat()
    return [
        OpRow(
            name=_name(activation, residual),
            pass_=kind,
            shape=shape,
            dtype=str(dtype).removeprefix("torch."),
            layout="nhwc",
            advisor_ms=found["advisor"].median,
            eager_ms=found["eager"].median,
            compile_ms=found["compile"].median if "compile" in found else None,
            limit_ms=limit / bandwidth / 1e6,
            spread=(found["advisor"].p90 - found["advisor"].p10) / found["advisor"].median,
            eager_spread=(found["eager"].p90 - found["eager"].p10) / found["eager"].median,
            n=found["advisor"].n,
            advisor_host_us=host["advisor"],
            eager_host_us=host["eager"],
            error=mine[key],
            baseline_error=theirs[key],
            kernel_sha=sources.sha256(source),
            torch=torch.__version__,
            date=made,
        )
        for kind, found, limit, key, source, host in (
            ("forward", forward, limits[0], "output", spec.FORWARD, hosts[0]),
            ("backward", backward, limits[1], "gradient", spec.BACKWARD, hosts[1]),
        )
    ]
