"""One cast of all weights a step: what autocast does with a kernel for each weight, and another for its gradient.

Autocast's copies are as many launches as the model has convolutions and linear layers, twice; on small images and in deep
nets each takes less time than its launch. Here the captured graph casts all weights in a few multi-tensor launches, and
their gradients too (`ops.weight_casts`). Parameters and `.grad` stay fp32, hooks and accumulation see what they saw.

All gradients of a group arrive together. DistributedDataParallel sends gradients while backward runs, so there it would cost
more than it saves, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from advisor.core.profile import StepProfile
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.ops import dispatch, weight_casts
from advisor.transforms import capture
from advisor.transforms.autocast import casts_weights
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import AUTOCAST, GRAPH, ForwardStack
from advisor.transforms.patch import target_of, tensors_in
from advisor.transforms.targets import data_parallel, sharded

# With fewer weights there is nothing to put together.
_FEWEST_WEIGHTS = 2


class FusedCasts(Transform):
    """Cast the weights of a captured forward together."""

    id = "fused_casts"
    traced = False  # places in the graph and calls are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="the launches saved are those of a CUDA GPU")
        sites, unmatched = [], []
        for root in training.roots:
            why_not = _refused(training, root)
            if why_not:
                unmatched.append(f"{root.name}: {why_not}")
            else:
                sites.append(root.name)
        reason = "" if sites else "; ".join(unmatched) or "no model was found"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        roots = [root for root in training.roots if not _module_refuses(root.module)]
        return capture.set_family([target_of(training, root) for root in roots], weight_casts.ID)

    def release(self, training: Training) -> None:
        capture.release([target_of(training, root) for root in training.roots])

    def sites(self, training: Training) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return capture.sites(training, weight_casts.ID)

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        report = capture.report(training, weight_casts.ID)
        ran = sum(weight_casts.engaged.values())
        numbers = {"weights": float(len(report.matched)), "calls": float(ran)}
        if not report.matched:
            why = "; ".join(f"{place}: {reason}" for place, reason in list(report.unmatched.items())[:3])
            return Check(passed=False, detail="no weight is cast in a captured graph" + (f" ({why})" if why else ""))
        if not ran:
            return Check(passed=False, detail=dispatch.told(weight_casts.ID), numbers=numbers)
        detail = f"{counted(len(report.matched), 'weight')} cast together"
        if before is None or after is None or not (before.kernels and after.kernels):
            return Check(passed=True, detail=detail, numbers=numbers)
        casts = [_casts(profile) for profile in (before, after)]
        numbers |= {"casts_before": casts[0], "casts_after": casts[1]}
        return Check(
            passed=casts[1] < casts[0],
            detail=f"{detail}; single casts {casts[0]:g} → {casts[1]:g} a step",
            numbers=numbers,
        )


def _casts(profile: StepProfile) -> float:
    return sum(row.calls for row in profile.kernels if row.op == "aten::_to_copy" and row.phase in _PHASES)


_PHASES = ("forward", "backward")


def _refused(training: Training, root: RootModule) -> str:
    why_not = _module_refuses(root.module)
    if why_not:
        return why_not
    target = target_of(training, root)
    layer = capture.current(target)
    if layer is not None and layer.mode is not None:
        return "torch.compile fuses casts itself"
    stack = ForwardStack.of(target)
    # A replayed graph hides its casts; what the capture finds in it is told by `effect`.
    if stack.get(AUTOCAST) is None and stack.get(GRAPH) is None:
        outputs = tensors_in(root.output)
        if not any(casts_weights(tensor) for tensor in outputs):
            return "autocast casts none of its weights"
    return ""


def _module_refuses(module: torch.nn.Module) -> str:
    if data_parallel(module):
        return "DistributedDataParallel sends gradients as they arrive, and these would arrive together"
    if isinstance(module, torch.nn.DataParallel) and len(module.device_ids or ()) > 1:
        return "DataParallel runs replicas of it"
    if sharded(module.parameters()):
        return "its parameters are sharded"
    if sum(parameter.dim() > 1 for parameter in module.parameters()) < _FEWEST_WEIGHTS:
        return "it has one weight at most"
    return ""
