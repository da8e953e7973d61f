"""A wrapper of one device or one process, passed by: the module inside is called with the very arguments.

With one device DataParallel calls the module that it holds, on the host's account: each call walks through all parameters and buffers
to see that they lie on the device (260 µs for a ResNet-18 on a 2.x GHz Xeon), and scatters the inputs to where they are. Gains where
the host bounds the step. DistributedDataParallel of one process copies each gradient into a bucket, sums it with nobody's, and copies it
back: two kernels a parameter and a hook. Called past the wrapper its reducer stays out, as under `no_sync`. One with a communication hook
is left alone: the hook may do more than send. The wrapper stays, with its hooks and the keys of its `state_dict`; a call whose inputs
still have to be brought to the device, or that holds more than tensors and plain values, goes the wrapper's way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from advisor.core.profile import StepProfile
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import WRAPPER, ForwardStack
from advisor.transforms.patch import all_or_nothing
from advisor.transforms.targets import of_one

_PLAIN = (type(None), bool, int, float, str)


class SingleDevice(Transform):
    """Call what a wrapper of one device or one process holds."""

    id = "single_device"
    traced = False  # calls are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        fits, unmatched = [], []
        for wrapper in _wrappers(training):
            name, why_not = type(wrapper.module).__name__, _why_not(wrapper)
            if why_not:
                unmatched.append(f"{name}: {why_not}")
            else:
                fits.append(name)
        nothing = "no model is wrapped in nn.DataParallel over one device or DistributedDataParallel of one process"
        reason = "" if fits else "; ".join(unmatched) or nothing
        return Match(applies=bool(fits), reason=reason, sites=tuple(fits), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            for wrapper in _wrappers(training):
                if _why_not(wrapper):
                    continue
                stack, layer = ForwardStack.of(wrapper), _PassBy()
                undo.push(functools.partial(stack.forget, layer))
                stack.set(WRAPPER, layer)
                undo.push(functools.partial(stack.clear, WRAPPER))
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        layers = [ForwardStack.of(wrapper).get(WRAPPER) for wrapper in _wrappers(training)]
        calls = sum(layer.calls for layer in layers if isinstance(layer, _PassBy))
        detail = (
            f"{counted(calls, 'call')} went to the module directly" if calls else "no call went to the module directly"
        )
        return Check(passed=calls > 0, detail=detail, numbers={"calls": float(calls)})


class _PassBy:
    """A layer for the wrapper's ForwardStack."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, inner: Callable[..., Any], wrapper: torch.nn.Module) -> Callable[..., Any]:
        held: Any = wrapper
        device = _device(wrapper)

        def forward(*args: Any, **kwargs: Any) -> Any:
            module = held.module
            # `module.to(device)` moves all tensors, so one of them tells where all are.
            sample = next(module.parameters(), None)
            if sample is None or not all(_lies_on(device, value) for value in (sample.data, *args, *kwargs.values())):
                return inner(*args, **kwargs)
            self.calls += 1
            return module(*args, **kwargs)

        return forward


def _device(wrapper: torch.nn.Module) -> torch.device:
    # DistributedDataParallel takes no module without parameters, nor one on several devices.
    ddp = isinstance(wrapper, DistributedDataParallel)
    device = next(wrapper.parameters()).device if ddp else getattr(wrapper, "src_device_obj", None)
    assert isinstance(device, torch.device)
    return device


def _why_not(wrapper: torch.nn.Module) -> str:
    """What a wrapper does beside calling its module."""
    if not isinstance(wrapper, DistributedDataParallel):
        return ""
    held: Any = wrapper
    for hook, *_ in getattr(held, "_comm_hooks", ()):
        name = getattr(hook, "__qualname__", type(hook).__name__)
        return f"DistributedDataParallel hands each gradient to a communication hook ({name})"
    if getattr(held, "mixed_precision", None) is not None:
        return "DistributedDataParallel casts its parameters"
    if len({parameter.device for parameter in wrapper.parameters()}) > 1:
        return "it lies on several devices"
    return ""


def _lies_on(device: torch.device, value: Any) -> bool:
    """Whether DataParallel would hand this on as it is. Where it asks for gradients it would be another tensor of autograd's."""
    if isinstance(value, torch.Tensor):
        return value.device == device and not value.requires_grad
    return type(value) in _PLAIN


def _wrappers(training: Training) -> list[Any]:
    found = {id(root.module): root.module for root in training.roots}.values()
    return [m for m in found if of_one(m) and type(m) in (torch.nn.DataParallel, DistributedDataParallel)]
