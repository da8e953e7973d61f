"""BatchNorm (+ residual add) (+ activation) by advisor's own kernels, wherever the captured graph has the pattern.

Wins where the step is bound by memory traffic and tensors are channels_last: the eager ops move 7 to 14 tensor passes
where 8 to 10 are needed and run at a third of the bandwidth in bf16 (docs/benchmarks). Loses nothing elsewhere: what the
kernels do not support runs PyTorch's own operations. Same maths in another order of summation.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from advisor.core.findings import Semantics
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.ops import nvrtc
from advisor.profiling.training import Training
from advisor.transforms import capture
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.targets import targets

_NORMS = (torch.nn.BatchNorm2d, torch.nn.BatchNorm1d, torch.nn.BatchNorm3d)


class FusedBatchNormAct(Transform):
    """Substitutes `advisor::batchnorm_act`."""

    id = "fused_bn_act"
    title = "Fused BatchNorm + add + activation kernels"
    semantics = Semantics.REASSOCIATED
    after = ("channels_last",)
    order = 40

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="the kernels need a CUDA GPU")
        reason = nvrtc.unavailable()
        if reason:
            return Match(applies=False, reason=reason)
        sites: list[str] = []
        unmatched: list[str] = []
        for root in targets(training):
            for path, module in root.named_modules():
                if isinstance(module, torch.nn.SyncBatchNorm):
                    unmatched.append(f"{path}: SyncBatchNorm")
                elif isinstance(module, torch.nn.BatchNorm2d):
                    (sites if module.affine and module.track_running_stats else unmatched).append(path)
        if not sites:
            return Match(
                applies=False,
                reason="no BatchNorm2d with parameters and running statistics",
                unmatched=tuple(unmatched),
            )
        return Match(applies=True, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        return capture.set_fuse(
            [root for root in targets(training) if any(isinstance(module, _NORMS) for module in root.modules())]
        )

    def release(self, training: Training) -> None:
        capture.release(targets(training))

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        matched: dict[str, str] = {}
        unmatched: dict[str, str] = {}
        for root in targets(training):
            layer = capture.current(root)
            if layer is not None and layer.fuse:
                matched.update(layer.report.matched)
                unmatched.update(layer.report.unmatched)
        if not matched:
            why = "; ".join(f"{path}: {reason}" for path, reason in list(unmatched.items())[:3])
            return Check(
                passed=False, detail="no pattern was found in the captured graph" + (f" ({why})" if why else "")
            )
        if after is not None and after.kernels:
            seen = sum(row.calls for row in after.kernels if row.name.startswith("batchnorm_act_"))
            if not seen:
                return Check(passed=False, detail="no batchnorm_act kernel ran in the traced step")
            return Check(
                passed=True,
                detail=f"{len(matched)} batch norms replaced, {seen:.0f} kernel launches a step",
                numbers={"matched": len(matched), "launches": seen},
            )
        from advisor.ops.batchnorm_act import api

        ran = sum(api.engaged.values())
        return Check(
            passed=ran > 0,
            detail=f"{len(matched)} batch norms replaced; the kernels ran {ran} times",
            numbers={"matched": len(matched), "calls": ran},
        )
