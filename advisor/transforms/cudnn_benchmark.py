"""cudnn.benchmark: cuDNN times its convolution algorithms once for each shape and keeps the fastest.

Loses where input shapes change, because each new shape is timed again; so it is tried only with fixed shapes. The first step
takes longer, and an algorithm may sum in another order.

Only a fresh process shows what it does: PyTorch keeps the first plan of each shape for the life of the thread, under a key that
the flag is no part of, so in a loop that has run already it changes nothing. Dtype and memory format are parts of it. So in a plan
the flag goes on with the last of the changes that decide those, before a convolution runs with them: any earlier, and cuDNN would
time those of the plain first steps too, for nothing. In a plan without such changes it is on from the script's start.
Sources: aten/src/ATen/native/cudnn/Conv_v8.cpp, CacheKeyWrapper and run_single_conv (the plan of the heuristic is cached as well).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing


class CudnnBenchmark(Transform):
    """Let cuDNN choose convolution algorithms by timing."""

    id = "cudnn_benchmark"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        cudnn = torch.backends.cudnn
        if training.device.type != "cuda" or cudnn.version() is None or not cudnn.enabled:
            return Match(applies=False, reason="the step does not run on cuDNN")
        if not training.fixed_shapes:
            return Match(applies=False, reason="input shapes change, and each new shape would be timed again")
        if cudnn.benchmark:
            return Match(applies=False, reason="cudnn.benchmark is already on")
        if cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return Match(applies=False, reason="the script asks for deterministic algorithms")
        sites = tuple(
            name
            for root in training.roots
            for name, module in root.module.named_modules()
            if isinstance(module, torch.nn.modules.conv._ConvNd)
        )
        if not sites:
            return Match(applies=False, reason="no convolution modules")
        return Match(applies=True, sites=sites)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            before = torch.backends.cudnn.benchmark
            undo.push(lambda: setattr(torch.backends.cudnn, "benchmark", before))
            torch.backends.cudnn.benchmark = True
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        if not torch.backends.cudnn.benchmark:
            return Check(passed=False, detail="cudnn.benchmark is off")
        if before is None or after is None:
            return Check(passed=True, detail="cudnn.benchmark is on")
        old, new = ({row.name for row in p.kernels if row.kind in ("conv", "gemm")} for p in (before, after))
        if old == new:
            return Check(
                passed=False,
                detail="the same kernels run as before; shapes seen before the flag was set keep their algorithm",
            )
        return Check(
            passed=True,
            detail=f"{len(new - old)} convolution kernels are new, {len(old - new)} are gone",
            numbers={"new_kernels": float(len(new - old)), "gone_kernels": float(len(old - new))},
        )
