"""Advisor's own kernels in place of PyTorch's operations, wherever the captured graph has a family's pattern: one transform a family.

Each wins where the step is bound by memory traffic and tensors are channels_last (docs/benchmarks). None loses elsewhere: what
the kernels do not support, or where no measurement says that they win, runs PyTorch's own operations. Same maths in another
order of summation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from advisor.core.profile import StepProfile
from advisor.core.stderr import say
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.ops import catalog, dispatch, nvrtc
from advisor.ops.family import Family
from advisor.ops.sites import native
from advisor.transforms import capture
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import SUBMODULE, ForwardStack
from advisor.transforms.layout_losses import layout_losses
from advisor.transforms.patch import all_or_nothing, target_of
from advisor.transforms.replay import replay

NOT_NHWC = "is not channels_last"  # part of the reason that specs give
NAMED = 3  # modules that a reason names


class KernelTransform(Transform):
    """Substitutes one family's operations; `of` makes the class for a family."""

    traced = False  # places in the graph and launches are counted by the family itself
    family: ClassVar[Family]

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="the kernels need a CUDA GPU")
        reason = nvrtc.unavailable() or dispatch.refusal("", self.family.not_dispatched())
        if reason:
            return Match(applies=False, reason=reason)
        sites = [site for root in training.roots for site in self._sites(root)]
        if not sites:
            wanted = (*self.family.modules, *(f"{name}()" for name in self.family.functions))
            return Match(applies=False, reason="the model has no " + ", ".join(wanted))
        return Match(applies=True, sites=tuple(sites))

    def _sites(self, root: RootModule) -> list[str]:
        """The places in this root that may hold the family's pattern."""
        return _modules(root.module, self.family) or _calls(root, self.family)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        if native.pending():  # here, and not in a step that is timed
            say("compiling what launches the kernels: half a minute, once")
            native.module()
        # A forward whose arguments nobody kept could not be looked at: its graph will tell.
        roots = [
            root
            for root in training.roots
            if self._sites(root) or (self.family.functions and not (root.args or root.kwargs))
        ]
        with all_or_nothing() as undo:
            for module in self._restated(roots):
                stack = ForwardStack.of(module)
                undo.push(functools.partial(stack.clear, SUBMODULE))
                stack.set(SUBMODULE, self.family.module("forward").layer)
            undo.push(capture.set_family([target_of(training, root) for root in roots], self.family.id).run)
        return undo

    def _restated(self, roots: Iterable[RootModule]) -> list[torch.nn.Module]:
        """Modules whose forward is exchanged for one that a graph can hold."""
        restated = self.family.restated
        if restated is None:
            return []
        modules = (root.module.get_submodule(path) for root in roots for path in _paths(root.module, self.family))
        return [module for module in modules if restated(module)]

    def release(self, training: Training) -> None:
        capture.release([target_of(training, root) for root in training.roots])

    def sites(self, training: Training) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return capture.sites(training, self.family.id)

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        report = capture.report(training, self.family.id)
        matched, unmatched = report.matched, report.unmatched
        if not matched:
            why = "; ".join(f"{path}: {reason}" for path, reason in list(unmatched.items())[:3])
            return Check(
                passed=False, detail="no pattern was found in the captured graph" + (f" ({why})" if why else "")
            )
        if after is not None and after.kernels:
            entries = {entry for entries in self.family.kernels.values() for entry in entries}
            seen = sum(row.calls for row in after.kernels if row.name in entries)
            if not seen:
                why = dispatch.told(self.family.id) + self._where_layout_is_lost(training)
                return Check(passed=False, detail=f"no kernel of {self.family.id} ran in the traced step; {why}")
            return Check(
                passed=True,
                detail=f"{counted(len(matched), 'place')} replaced, {seen:.0f} kernel launches a step",
                numbers={"matched": len(matched), "launches": seen},
            )
        ran = sum(self.family.engaged.values())
        return Check(
            passed=ran > 0,
            detail=f"{counted(len(matched), 'place')} replaced; {dispatch.told(self.family.id)}"
            + self._where_layout_is_lost(training),
            numbers={"matched": len(matched), "calls": ran},
        )

    def _where_layout_is_lost(self, training: Training) -> str:
        """Which modules gave the kernels NCHW, where more calls were left alone for that than were taken; else nothing."""
        left = sum(times for reason, times in self.family.fell_back.items() if NOT_NHWC in reason)
        if left <= sum(self.family.engaged.values()):
            return ""
        found = layout_losses(training)
        if not found:
            return "; the model is in NCHW, which channels_last changes"
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return f"; what returns NCHW of NHWC: {', '.join(found[:NAMED])}{more}"


def of(family: Family) -> type[KernelTransform]:
    """The transform that puts this family in place."""
    members = {
        "id": family.transform,
        "family": family,
        "__doc__": f"Puts {family.id} in place of {family.replaces}.",
    }
    return type(f"KernelTransform_{family.id}", (KernelTransform,), members)


def get(identifier: str) -> KernelTransform:
    """The transform with this id, which is a kernel family's."""
    return of(next(family for family in catalog.FAMILIES if family.transform == identifier))()


def _modules(root: torch.nn.Module, family: Family) -> list[str]:
    return [path or type(root).__name__ for path in _paths(root, family)]


def _paths(root: torch.nn.Module, family: Family) -> list[str]:
    wanted = set(family.modules)
    return [
        path
        for path, module in root.named_modules()
        if wanted & {base.__name__ for base in type(module).__mro__}
        and (family.having is None or family.having(module))
    ]


class _Calls(TorchFunctionMode):
    """Counts calls of a family's functions."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.functions = {getattr(F if hasattr(F, name) else torch, name): name for name in family.functions}
        self.taking = family.taking
        self.seen: dict[str, int] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = self.functions.get(function)
        if name is not None and (self.taking is None or self.taking(*args, **(kwargs or {}))):
            self.seen[name] = self.seen.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def _calls(root: RootModule, family: Family) -> list[str]:
    """Calls of `torch.nn.functional` in the root's own forward, for models that hold no module for an operation."""
    if not family.functions or not (root.args or root.kwargs):
        return []
    mode = _Calls(family)
    try:
        with mode:
            replay(root, hooks=False)
    except Exception:  # a forward that cannot be called once more holds no place that we could name
        return []
    return [f"{name}() x {count}" for name, count in mode.seen.items()]
