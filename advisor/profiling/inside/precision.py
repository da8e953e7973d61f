"""`advisor profile --precision`: with which precision each convolution and linear layer of one live step was computed, how far that is from
fp64 on this step's own tensors, and how far the other precisions would be.

The step is the script's own, with hooks that keep each layer's first samples: input, result, and the gradient that arrives at the result.
After it the three products are made again of these in fp64 and in each precision. The forward's error is that of what the script
computed; its gradients' are of the same products of the samples kept, in the precision that ran, as a gradient of the weight is a sum over the
whole batch of which a few samples are no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from advisor.core import architectures
from advisor.core.precision import DATA, FORWARD, WEIGHT, Audited, PrecisionRecord
from advisor.loop.training import Training
from advisor.profiling.inside.facts import tf32_flags

SAMPLES = 2  # of a batch that are kept of each layer
MOST_LAYERS = 400
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}


@dataclass(slots=True)
class _Seen:
    """The first call of a layer in the step. `wanted`: whether the step has the gradient of its input, and of its weight."""

    path: str
    module: Any
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor  # as it was in the forward: the step's end has updated it
    bias: torch.Tensor | None
    autocast: torch.dtype | None
    wanted: tuple[bool, bool]
    dy: torch.Tensor | None = None


@dataclass(slots=True)
class Audit:
    """Watches one step: `begin` before it, `end` behind it."""

    training: Training
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Put the hooks on."""
        for root in self.training.roots:
            for path, module in root.module.named_modules():
                if isinstance(module, _LAYERS) and len(self._hooks) < MOST_LAYERS:
                    name = f"{root.name}.{path}" if path else root.name
                    self._hooks.append(module.register_forward_hook(self._hook(name)))

    def _hook(self, path: str) -> Callable[..., None]:
        def keep(module: Any, given: tuple[Any, ...], y: Any) -> None:
            x = given[0] if given else None
            if id(module) in self._seen or not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
                return
            kind = x.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            bias = None if module.bias is None else module.bias.detach().clone()
            few_in, few_out = (tensor.detach()[:SAMPLES].clone() for tensor in (x, y))
            wanted = x.requires_grad, module.weight.requires_grad  # neither of images, and of frozen layers
            seen = _Seen(path, module, few_in, few_out, module.weight.detach().clone(), bias, autocast, wanted)
            self._seen[id(module)] = seen
            if y.requires_grad:

                def arrived(gradient: torch.Tensor) -> None:
                    seen.dy = gradient.detach()[:SAMPLES].clone()

                y.register_hook(arrived)

        return keep

    def leave(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def end(self) -> PrecisionRecord:
        """Take the hooks off and say what was seen."""
        self.leave()
        rows: list[Audited] = []
        notes: list[str] = []
        flags = tf32_flags()
        for seen in self._seen.values():
            try:
                rows += _rows(seen, flags)
            except Exception as error:  # one layer that cannot be made again costs its own rows alone
                notes.append(f"{seen.path}: {type(error).__name__}: {error}")
        self._seen.clear()
        return PrecisionRecord(rows=tuple(rows), samples=SAMPLES, notes=tuple(notes[:10]))


def _rows(seen: _Seen, flags: dict[str, bool]) -> Iterator[Audited]:
    ran, by = _ran(seen, flags)
    exact = _products(seen, "fp64")
    others = {name: _products(seen, name) for name in ("fp32", "tf32", "bf16", "fp16") if _can(name, seen.x.device)}
    for product, value in exact.items():
        if value is None:
            continue
        errors = {name: _error(found[product], value) for name, found in others.items()}
        own = _error(seen.y, value) if product == FORWARD else errors.get(ran)
        yield Audited(
            module=seen.path,
            product=product,
            ran=ran,
            by=by,
            error=own,
            errors={n: e for n, e in errors.items() if e is not None},
        )


def _ran(seen: _Seen, flags: dict[str, bool]) -> tuple[str, str]:
    """The precision of the layer's products, and by whom it was switched."""
    own = seen.weight.dtype
    dtype = seen.autocast if seen.autocast is not None and own == torch.float32 else own
    if dtype in _NAMES:
        return _NAMES[dtype], "autocast" if seen.autocast is not None else "the module's own dtype"
    which = "tf32_matmul" if isinstance(seen.module, nn.Linear) else "tf32_conv"
    if seen.x.device.type != "cuda":
        return "fp32", "fp32 throughout"
    default = which == "tf32_conv"  # torch allows cuDNN TF32, and cuBLAS not
    on = flags.get(which, default)
    return ("tf32" if on else "fp32"), ("torch's default" if on == default else "the script or its environment")


def _can(name: str, device: torch.device) -> bool:
    return name != "tf32" or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= divmod(architectures.TF32, 10)
    )


def _products(seen: _Seen, precision: str) -> dict[str, torch.Tensor | None]:
    """Forward, gradient of the input and of the weight, of the samples kept."""
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    module, device = seen.module, seen.x.device.type
    x = seen.x.to(dtype).detach().requires_grad_()
    weight = seen.weight.to(dtype).detach().requires_grad_()
    bias = None if seen.bias is None else seen.bias.to(dtype)
    with torch.enable_grad(), torch.autocast(device, enabled=False), _tf32(precision == "tf32"):
        y = F.linear(x, weight, bias) if isinstance(module, nn.Linear) else module._conv_forward(x, weight, bias)
        if seen.dy is None:
            return {FORWARD: y.detach(), DATA: None, WEIGHT: None}
        made = torch.autograd.grad(y, (x, weight), seen.dy.to(dtype))
    dx, dweight = (found if wanted else None for found, wanted in zip(made, seen.wanted, strict=True))
    return {FORWARD: y.detach(), DATA: dx, WEIGHT: dweight}


def _error(found: torch.Tensor | None, exact: torch.Tensor) -> float | None:
    """Relative, in the 2-norm; None where there is nothing to be relative to."""
    if found is None or found.shape != exact.shape:
        return None
    size = exact.norm().item()
    return (found.double() - exact).norm().item() / size if size > 0 else None


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """With TF32 products or without, by the settings that this torch has."""
    places: list[tuple[Any, str, Any]] = []
    for backend in (torch.backends.cudnn, torch.backends.cuda.matmul):
        conv = getattr(backend, "conv", backend)
        if hasattr(conv, "fp32_precision"):
            places.append((conv, "fp32_precision", "tf32" if allowed else "ieee"))
        else:
            places.append((backend, "allow_tf32", allowed))
    before = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)
