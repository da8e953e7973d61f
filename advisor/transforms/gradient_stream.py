"""Convolutions' weight gradients on a stream of their own, inside the CUDA graph of the backward (`beside`).

Wins where a backward's kernels are short, so that starting and ending them is a good part of their time: images of 32 x 32, thin
1 x 1 convolutions. Where each fills the GPU for long, two at once only take each other's cache; on one H200 a ResNet-18 on CIFAR and
MobileNetV3 gained 9 and 3 % of the backward, ResNet-50 and DenseNet-121 lost 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from advisor.core.profile import StepProfile
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms import cuda_graphs
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.targets import targets

_FEWEST = 2  # convolutions: a single one's weight gradient has nothing beside it


class GradientStream(Transform):
    """Capture weight gradients beside the rest of the backward."""

    id = "gradient_stream"
    traced = False  # what is launched on the second stream is counted at the capture

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="streams are a CUDA GPU's")
        sites, unmatched = [], []
        for module in targets(training):
            name, why_not = type(module).__name__, _unfit(module)
            if why_not:
                unmatched.append(f"{name}: {why_not}")
            else:
                sites.append(name)
        reason = "" if sites else "; ".join(unmatched) or "no module was seen"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        return cuda_graphs.put_beside(module for module in targets(training) if not _unfit(module))

    def release(self, training: Training) -> None:
        cuda_graphs.release(targets(training))

    def warming(self, training: Training) -> bool:
        return cuda_graphs.warming(training)

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        layers = [layer for module in targets(training) if (layer := cuda_graphs.current(module)) is not None]
        moved, replays = sum(layer.moved for layer in layers), sum(layer.replays for layer in layers)
        numbers = {"moved": float(moved), "replays": float(replays)}
        if moved and replays:
            detail = f"{counted(moved, 'weight gradient')} on a second stream, in graphs replayed {replays} times"
            return Check(passed=True, detail=detail, numbers=numbers)
        failed = [reason for layer in layers for reason in layer.failures]
        detail = "no weight gradient was captured on a second stream" + (f" ({failed[0]})" if failed else "")
        return Check(passed=False, detail=detail, numbers=numbers)


def _unfit(module: torch.nn.Module) -> str:
    if cuda_graphs.current(module) is None:
        return "no CUDA graph holds its backward"
    convolutions = sum(isinstance(m, torch.nn.modules.conv._ConvNd) for m in module.modules())
    return "" if convolutions >= _FEWEST else f"{counted(convolutions, 'convolution')}, nothing to run beside"
