"""Automatic mixed precision: the models' forward passes in bf16 or fp16 where that is known to be sound.

Parameters, gradients, optimizer and checkpoints stay fp32, and the outputs of each root come back as fp32, so the script's loss
and metrics see what they always saw. Loses where the step is bound by launches (casts are extra kernels) and on devices without
matrix units for the dtype.

bf16 has fp32's range and needs no loss scaling. fp16 does: see `scaling`.
Sources: https://pytorch.org/docs/stable/amp.html ; Micikevicius et al., Mixed Precision Training, 2018.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from advisor.core import architectures
from advisor.core.profile import StepProfile
from advisor.core.units import percent_text
from advisor.core.verdict import Check
from advisor.loop import ranks
from advisor.loop.training import RootModule, Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import AUTOCAST, ForwardStack, Layer
from advisor.transforms.patch import all_or_nothing, map_tensors, parameters_of, target_of, tensors_in
from advisor.transforms.scaling import scale_losses
from advisor.transforms.targets import replicated, targets

_HALF = (torch.float16, torch.bfloat16)
_LABELS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Autocast(Transform):
    dtype: ClassVar[torch.dtype]

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        reason = self.device_refuses(training.device, parameters) or _training_refuses(training)
        if reason:
            return Match(applies=False, reason=reason)
        sites, unmatched = [], []
        for root in training.roots:
            applied = ForwardStack.of(target_of(training, root)).get(AUTOCAST)
            if applied is not None:  # then the output and its graph show our own casts, not the script's
                why_not = "is applied already" if applied is self._layer_for(training, parameters) else ""
            else:
                why_not = _module_refuses(root.module) or _output_refuses(root)
            if why_not:
                unmatched.append(f"{root.name}: {why_not}")
            else:
                sites.append(root.name)
        reason = "" if sites else "; ".join(unmatched) or "no model was found"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        """Parameters: `cache` ("false" switches autocast's cache of cast weights off)."""
        layer = self._layer_for(training, parameters)
        with all_or_nothing() as undo:
            for module in targets(training):
                if not _module_refuses(module):
                    stack = ForwardStack.of(module)
                    undo.push(functools.partial(_yielding.discard, module))
                    undo.push(functools.partial(stack.clear, AUTOCAST))
                    stack.set(AUTOCAST, layer)
            self._scale(training, undo)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        label = _LABELS[self.dtype]
        roots = training.roots
        layered = {r.name: target_of(training, r) for r in roots}
        layered = {
            name: module for name, module in layered.items() if ForwardStack.of(module).get(AUTOCAST) is not None
        }
        on = [name for name, module in layered.items() if module not in _yielding]
        if not on:
            why = "the script's own autocast is on" if layered else "no model runs under autocast"
            return Check(passed=False, detail=why)
        if after is None:
            return Check(passed=True, detail=f"{', '.join(on)} under {label} autocast")
        rows = [row for row in after.kernels if row.kind in ("conv", "gemm")]
        total = sum(row.time_us for row in rows)
        share = sum(row.time_us for row in rows if row.dtype == label) / total if total else 0.0
        return Check(
            passed=share > 0.5 if total else None,
            detail=f"{percent_text(share)} of convolution and product time is {label}"
            if total
            else "no convolutions or products",
            numbers={"half_frac": share},
        )

    def _layer_for(self, training: Training, parameters: Mapping[str, str]) -> Layer:
        return _layer(self.dtype, training.device.type, parameters.get("cache", "true") != "false")

    def device_refuses(self, device: torch.device, parameters: Mapping[str, str]) -> str:
        """Why this device is not for the dtype; empty where it is."""
        raise NotImplementedError

    def _scale(self, training: Training, undo: Undo) -> None:
        """What the dtype needs beside autocast."""


class AutocastBf16(_Autocast):
    """bf16 autocast around every root. On a CPU only with native bf16 products, or with parameter `cpu` = "always"."""

    id = "amp_bf16"
    dtype = torch.bfloat16

    def device_refuses(self, device: torch.device, parameters: Mapping[str, str]) -> str:
        if device.type == "cuda":
            native = torch.cuda.get_device_capability(device) >= divmod(architectures.BF16, 10)
            return "" if native else "this GPU has no bf16 matrix units (compute capability below 8.0)"
        if device.type == "cpu":
            fast = _cpu_has_bf16() or parameters.get("cpu") == "always"
            return "" if fast else "this CPU has no bf16 instructions (AVX512_BF16 or AMX)"
        return f"autocast is not proved on {device.type}"


class AutocastFp16(_Autocast):
    """fp16 autocast with loss scaling. On a CPU only with parameter `cpu` = "always"."""

    id = "amp_fp16"
    dtype = torch.float16

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        reason = _scaling_refuses(training)
        return Match(applies=False, reason=reason) if reason else super().match(training, parameters)

    def device_refuses(self, device: torch.device, parameters: Mapping[str, str]) -> str:
        if device.type == "cuda":
            native = torch.cuda.get_device_capability(device) >= divmod(architectures.FP16, 10)
            return "" if native else "this GPU has no fp16 matrix units (compute capability below 7.0)"
        return "" if parameters.get("cpu") == "always" else "fp16 autocast is for GPUs"

    def _scale(self, training: Training, undo: Undo) -> None:
        scale_losses(training, undo)


def _layer(dtype: torch.dtype, device_type: str, cache: bool) -> Layer:
    return _layers.setdefault((dtype, device_type, cache), _make_layer(dtype, device_type, cache))


# Modules whose last calls were under the script's own autocast.
_yielding: WeakSet[torch.nn.Module] = WeakSet()

# One layer object for each setting, so that a forward stack recognises it when it is switched on again.
_layers: dict[tuple[torch.dtype, str, bool], Layer] = {}


def _make_layer(dtype: torch.dtype, device_type: str, cache: bool) -> Layer:
    def to_fp32(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == dtype else tensor

    def wrap(inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(device_type):  # the script's own choice for this call stands
                if not torch.compiler.is_compiling():
                    _yielding.add(module)
                return inner(*args, **kwargs)
            with torch.autocast(device_type, dtype=dtype, cache_enabled=cache):
                output = inner(*args, **kwargs)
            return map_tensors(output, to_fp32)

        return forward

    return wrap


def _cpu_has_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe)() for probe in probes if hasattr(torch.cpu, probe))


def _training_refuses(training: Training) -> str:
    if training.scalers:
        return "the script scales its losses itself (GradScaler), so it has mixed precision already"
    floating = {parameter.dtype for parameter in parameters_of(training) if parameter.is_floating_point()}
    if floating and floating != {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floating))
        return f"parameters are {names}, not all fp32"
    return ""


def _module_refuses(module: torch.nn.Module) -> str:
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.BCELoss):
            return f"{name} is a BCELoss, which autocast refuses"
    return ""


def _output_refuses(root: RootModule) -> str:
    for tensor in tensors_in(root.output):
        if tensor.dtype in _HALF:
            return f"its output is {_LABELS[tensor.dtype]} already"
        if casts_weights(tensor):
            return "it casts its weights already (autocast or by hand)"
    return ""


def casts_weights(output: torch.Tensor) -> bool:
    """Whether the autograd graph of `output` casts a leaf: what autocast does with fp32 weights."""
    seen: set[Any] = set()
    queue = [output.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [next_node for next_node, _ in node.next_functions]
        if node.name() == "ToCopyBackward0" and any(n is not None and hasattr(n, "variable") for n in following):
            return True
        queue.extend(following)
    return False


def _scaling_refuses(training: Training) -> str:
    for optimizer in training.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            return "LBFGS takes several gradients in a step, and cannot do without those that overflow"
    for parameter in parameters_of(training):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "a parameter has gradient hooks, which would see scaled gradients"
    every = torch.nn.modules.module
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        return "hooks of all modules' backward passes would see scaled gradients"
    for root in training.roots:
        for name, module in root.module.named_modules():
            if module._backward_hooks or module._backward_pre_hooks:
                return f"{name or root.name} has backward hooks, which would see scaled gradients"
        if any(tensor.requires_grad for tensor in tensors_in((root.args, root.kwargs)) if tensor.is_leaf):
            return f"{root.name} gets an input that requires a gradient, which would stay scaled"
    owned = {id(p) for optimizer in training.optimizers for group in optimizer.param_groups for p in group["params"]}
    if any(parameter.requires_grad and id(parameter) not in owned for parameter in parameters_of(training)):
        return "some trained parameters belong to no known optimizer, so their gradients would stay scaled"
    if ranks.joined()[1] > 1:
        # DDP's gradients are all ranks' when a backward pass ends. Others are one's own, or a shard's: each rank would skip steps of its own,
        # and an infinity that the script brings in from another rank afterwards would go into the weights.
        sent = replicated(training)
        if any(parameter.requires_grad and id(parameter) not in sent for parameter in parameters_of(training)):
            return "gradients that DistributedDataParallel does not send may overflow in one of the processes alone"
    return ""
