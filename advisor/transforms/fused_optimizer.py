"""Fused optimizer: one kernel for many parameters, in place of several for each.

Takes SGD, Adam, AdamW and Adagrad to `fused=True`; any other optimizer that was told `foreach=False` on a GPU to the multi-tensor
implementation. Loses at times with few, large parameters. Fused kernels round in another order. What torch does on the host around a
fused kernel is left out of the steps in which nothing has changed for it (`steady_steps`).

`optimizer.state_dict()` stays as the plain script's: its flags, and Adam's step counters on the host, so a checkpoint does not
turn the fused implementation on in a script that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing
from advisor.transforms.skip import lacks_momentum, skip_step_hooks
from advisor.transforms.steady_steps import gather_once
from advisor.transforms.targets import UPDATES_COMPILED, sharded

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
# Operators of each implementation.
_OPERATORS = {"fused": "aten::_fused_", "foreach": "aten::_foreach_"}
_FLAGS = ("fused", "foreach")
_ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


class FusedOptimizer(Transform):
    """Switch optimizers to their fused, else multi-tensor, implementation."""

    id = "fused_optimizer"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.updates_compiled:
            return Match(applies=False, reason=UPDATES_COMPILED)
        sites, unmatched = [], []
        for optimizer in training.optimizers:
            name, why_not = type(optimizer).__name__, _why_not(optimizer)
            if why_not:
                unmatched.append(f"{name}: {why_not}")
            else:
                sites.append(f"{name} ({_implementation(optimizer)})")
        reason = "" if sites else "; ".join(unmatched) or "no optimizer"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            for optimizer in training.optimizers:
                if not _why_not(optimizer):
                    _switch(optimizer, _implementation(optimizer), undo)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        on = [
            o
            for o in training.optimizers
            if any(group.get("fused") or group.get("foreach") for group in o.param_groups)
        ]
        if not on:
            return Check(passed=False, detail="no optimizer has the fused or multi-tensor flag")
        names = ", ".join(type(optimizer).__name__ for optimizer in on)
        if before is None or after is None:
            return Check(passed=True, detail=f"{names}: flag set")
        # By the operator that ran the kernels: a single-tensor, a multi-tensor and a fused update share a phase.
        kinds = {_implementation(optimizer) for optimizer in on}
        calls = [sum(_calls(profile, kind) for kind in kinds) for profile in (before, after)]
        numbers = {"calls_before": calls[0], "calls_after": calls[1]}
        if calls[1] <= calls[0]:
            told = " or ".join(sorted(_OPERATORS[kind] for kind in kinds))
            return Check(passed=False, detail=f"{names}: no more kernels of {told} ran than before", numbers=numbers)
        return Check(passed=True, detail=f"{names}: {calls[1]:g} fused or multi-tensor kernels a step", numbers=numbers)


def _calls(profile: StepProfile, kind: str) -> float:
    return sum(row.calls for row in profile.kernels if row.op.startswith(_OPERATORS[kind]))


def _implementation(optimizer: torch.optim.Optimizer) -> str:
    return "fused" if type(optimizer) in _FUSED else "foreach"


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    parameters = _parameters(optimizer)
    groups = optimizer.param_groups
    kind = _implementation(optimizer)
    if not parameters:
        return "has no parameters"
    if any(group.get("fused") for group in groups):
        return "is fused already"
    if any(group.get("differentiable") for group in groups):
        return "is differentiable"
    if sharded(parameters) and not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        # FSDP2's are DTensors, which know fused Adam alone (seen up to torch 2.13): the script's next step would raise.
        return "has parameters that are no plain tensors (sharded)"
    if not all(parameter.is_floating_point() for parameter in parameters):
        return "has parameters that are not real floating point"
    if len({parameter.device for parameter in parameters}) > 1:
        return "has parameters on several devices"
    if any(parameter.grad is not None and parameter.grad.layout != torch.strided for parameter in parameters):
        return "has sparse gradients"
    if any(isinstance(value, torch.Tensor) for group in groups for value in (group.get("betas") or ())):
        return "has tensors as betas"
    if kind == "foreach":
        if "foreach" not in groups[0]:
            return "has neither a fused nor a multi-tensor implementation"
        if any(group["foreach"] is not False for group in groups) or parameters[0].device.type != "cuda":
            return "uses the multi-tensor implementation where it helps already"
    elif not _fused_works(type(optimizer), parameters[0].device, parameters[0].dtype):
        return f"has no fused implementation on {parameters[0].device.type} in torch {torch.__version__}"
    return ""


def _fused_works(cls: type[Any], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one fused step on a throw-away parameter succeeds: support differs by class, device and torch release."""
    if cls is torch.optim.Adagrad and device.type == "cuda":
        return False  # the class itself refuses `fused` there (seen up to torch 2.13), whatever its kernel can do
    # The kernels themselves: a throw-away optimizer's `step` would be seen by everyone who watches optimizers.
    weight, gradient, first, second = ([torch.zeros(1, device=device, dtype=dtype)] for _ in range(4))
    step = [torch.ones((), device=device)]
    rates: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
    adam: dict[str, Any] = {**rates, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
    try:
        if cls is torch.optim.SGD:
            sgd: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
            torch._fused_sgd_(weight, gradient, [], **rates, **sgd)
        elif cls is torch.optim.Adagrad:
            torch._fused_adagrad_(weight, gradient, first, step, **rates, lr_decay=0.0, eps=1e-8)
        else:
            torch._fused_adam_(weight, gradient, first, second, [], step, **adam)
    except (RuntimeError, TypeError, AttributeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def _switch(optimizer: torch.optim.Optimizer, kind: str, undo: Undo) -> None:
    flags = {"fused": kind == "fused", "foreach": kind == "foreach"}
    original = {name: optimizer.defaults[name] for name in _FLAGS if name in optimizer.defaults}
    groups = [{name: group[name] for name in _FLAGS if name in group} for group in optimizer.param_groups]
    attributes = {name: vars(optimizer)[name] for name in _ATTRIBUTES if name in vars(optimizer)}

    def plain_flags(index: int) -> dict[str, Any]:
        return groups[index] if index < len(groups) else original  # a group added meanwhile has the defaults

    def put_back() -> None:
        for index, group in enumerate(optimizer.param_groups):
            group.update(plain_flags(index))
        optimizer.defaults.update(original)
        for name in _ATTRIBUTES:
            if name in attributes:
                setattr(optimizer, name, attributes[name])
            else:
                vars(optimizer).pop(name, None)
        _move_steps(optimizer, to_host=True)

    def switch_on(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update({name: value for name, value in flags.items() if name in group})
        if kind == "fused":
            _move_steps(optimizer, to_host=False)

    def plain_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        for index, group in enumerate(state_dict["param_groups"]):
            group.update(plain_flags(index))
        return {**state_dict, "state": _state_with_host_steps(optimizer, state_dict["state"])}

    undo.push(put_back)
    optimizer.defaults.update({name: value for name, value in flags.items() if name in original})
    if kind == "fused":
        # What the constructor sets with fused=True: GradScaler then hands the scale to the kernel and does not wait for it.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # private to torch
        optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]  # private to torch
    switch_on(optimizer)
    undo.push(optimizer.register_state_dict_post_hook(plain_state_dict).remove)
    undo.push(optimizer.register_load_state_dict_post_hook(switch_on).remove)
    if kind == "fused":
        gather_once(optimizer, undo)
    if isinstance(optimizer, torch.optim.SGD) and kind == "fused":
        skip_step_hooks(undo, optimizer, _first_fused_step_overflowed)


def _first_fused_step_overflowed(optimizer: torch.optim.Optimizer) -> bool:
    """Fused SGD allocates its momentum in the first step and, when that step overflowed, leaves it uninitialised."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return False
    return lacks_momentum(optimizer) and bool(found_inf)


def _hosted_steps(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """State dictionaries whose step counter lives on the host unless the optimizer is fused."""
    return _counted(optimizer, [group for group in optimizer.param_groups if not group.get("capturable")])


def _counted(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """State dictionaries of these groups that have a step counter, and their parameters."""
    return [
        (optimizer.state[parameter], parameter)
        for group in groups
        for parameter in group["params"]
        if parameter in optimizer.state and isinstance(optimizer.state[parameter].get("step"), torch.Tensor)
    ]


def moved_to_host(steps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Zero-dimensional copies on the host, in one transfer for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, step in enumerate(steps):
        groups.setdefault((step.device, step.dtype), []).append(index)
    copies = list(steps)
    for (device, _), indices in groups.items():
        if device.type != "cpu":
            for index, value in zip(indices, torch.stack([steps[i] for i in indices]).cpu(), strict=True):
                copies[index] = value.clone()
    return copies


def _move_steps(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
    if to_host:
        hosted = _hosted_steps(optimizer)
        for (state, _), step in zip(hosted, moved_to_host([state["step"] for state, _ in hosted]), strict=True):
            state["step"] = step
        for state, _ in _counted(optimizer, optimizer.param_groups):
            state["step"] = state["step"].to(torch.promote_types(torch.get_default_dtype(), torch.float32))
    else:
        # A default dtype of fp64 makes them fp64 where nothing is fused, of which CUDA's kernel would read the half that is 0.
        for state, parameter in _counted(optimizer, optimizer.param_groups):
            state["step"] = state["step"].to(parameter.device, torch.float32)


def _state_with_host_steps(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> dict[Any, Any]:
    hosted = {id(entry) for entry, _ in _hosted_steps(optimizer)}
    keys = [key for key, entry in state.items() if id(entry) in hosted and entry["step"].device.type != "cpu"]
    steps = moved_to_host([state[key]["step"] for key in keys])
    return {**state, **{key: {**state[key], "step": step} for key, step in zip(keys, steps, strict=True)}}
