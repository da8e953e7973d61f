"""torch.compile on the root modules, in place: names in `state_dict` stay the plain ones.

A candidate like the others: measured, kept where it wins. It pays a long first step (tens of seconds), so the break-even
step is reported. With kernel families in force Inductor gets the graph with advisor's kernels in it.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from typing import ClassVar

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.compiles import is_compiled
from advisor.loop.training import Training
from advisor.transforms import capture
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.targets import targets


class Compile(Transform):
    """torch.compile, mode default."""

    id = "compile"
    mode: ClassVar[str] = "default"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        modules = targets(training)
        if any(map(is_compiled, modules)):
            return Match(applies=False, reason="the script compiles the model itself")
        if not modules:
            return Match(applies=False, reason="no module was seen")
        if not training.fixed_shapes:
            return Match(
                applies=False, reason="input shapes change from step to step, and each shape would compile again"
            )
        if training.device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
            return Match(applies=False, reason="no C++ compiler on this machine")
        if training.device.type == "cuda" and importlib.util.find_spec("triton") is None:
            return Match(applies=False, reason="Triton is not installed")
        return Match(applies=True, sites=tuple(root.name for root in training.roots))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        return capture.set_mode(targets(training), self.mode)

    def release(self, training: Training) -> None:
        capture.release(targets(training))

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        graphs = sum(
            layer.graphs
            for module in targets(training)
            if (layer := capture.current(module)) is not None and layer.mode is not None
        )
        if not graphs:
            return Check(passed=False, detail="nothing was captured")
        if after is not None and after.kernels and training.device.type == "cuda":
            generated = sum(row.calls for row in after.kernels if row.name.startswith("triton_"))
            return Check(
                passed=generated > 0,
                detail=f"{generated:.0f} generated kernels a step" if generated else "no generated kernel ran",
                numbers={"generated": generated},
            )
        from torch._dynamo.utils import counters

        unique = int(counters["stats"].get("unique_graphs", 0))
        return Check(passed=unique > 0, detail=f"{unique} graphs compiled", numbers={"graphs": unique})


class CompileMaxAutotune(Compile):
    """torch.compile, mode max-autotune without its own CUDA graphs (cuda_graphs is a candidate of its own)."""

    id = "compile_max_autotune"
    mode = "max-autotune-no-cudagraphs"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="autotuning is worth its time on a GPU only")
        return super().match(training, parameters)
