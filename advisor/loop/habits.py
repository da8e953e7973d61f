"""What a script does around its models in each step, observed while a close look lasts: it zeroes gradients, clips them, moves batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from advisor.loop.observed import Observations
from advisor.loop.patches import Patch, Patches
from advisor.loop.sources import user_line
from advisor.loop.training import Training
from advisor.loop.values import sent


class Habits:
    """Notes what it sees in what `seen` gives at that time."""

    def __init__(self, training: Training, patches: Patches, seen: Callable[[], Observations]) -> None:
        self._training, self._patches, self._seen = training, patches, seen

    def patch(self) -> list[Patch]:
        """`zero_grad`, clipping and host-to-device moves are observed from now on."""
        replace = self._patches.replace
        patched = [
            replace(owner, "zero_grad", self._zero_grad(owner.zero_grad))
            for owner in (torch.optim.Optimizer, torch.nn.Module)
        ]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = self._clip(getattr(torch.nn.utils, name))
            patched += [replace(torch.nn.utils, name, clip), replace(torch.nn.utils.clip_grad, name, clip)]
        # What a `clip_grad_norm_` that the script has imported by its name calls.
        within = self._clip(torch.nn.utils.clip_grad._clip_grads_with_norm_)
        patched.append(replace(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", within))
        if torch.version.cuda is not None:
            patched += [replace(torch.Tensor, name, self._move(getattr(torch.Tensor, name))) for name in ("to", "cuda")]
        return patched

    def _zero_grad(self, plain: Any) -> Any:
        def observe(held: list[torch.Tensor]) -> None:
            if held:
                seen = self._seen()
                zeroed = held[0].grad is not None
                # Of several networks one may zero its own.
                self._training.zeroes_gradients |= zeroed
                seen.zero_grad_to_none = not (zeroed or seen.zero_grad_to_none is False)

        record = self._patches.guard(observe)

        @wraps(plain)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            held = _with_gradient(owner) if self._patches.active else []
            result = plain(owner, *args, **kwargs)
            record(held)
            return result

        return zero_grad

    def _clip(self, plain: Any) -> Any:
        observe = self._patches.guard(self._observe_clip)

        @wraps(plain)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Iterator):  # `model.parameters()` can be gone through once
                args = (list(args[0]), *args[1:])
            observe(args[0] if args else kwargs.get("parameters"))
            return plain(*args, **kwargs)

        return clip

    def _observe_clip(self, given: Any) -> None:
        seen = self._seen()
        seen.clipping = True
        if seen.clipped_scaled or isinstance(given, (Iterator, type(None))):
            return
        first = given if isinstance(given, torch.Tensor) else next(iter(given), None)
        if first is not None and any(_scaled(scaler, first, self._training) for scaler in self._training.scalers):
            seen.clipped_scaled = user_line()

    def _move(self, plain: Any) -> Any:
        observe = self._patches.guard(self._observe_move)

        @wraps(plain)
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(tensor, *args, **kwargs)
            if not torch.compiler.is_compiling():
                observe(tensor, result, args, kwargs)
            return result

        return move

    def _observe_move(self, tensor: torch.Tensor, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = sent(tensor)
        if type(tensor) is not torch.Tensor or type(result) is not torch.Tensor:
            return  # a fake tensor has no address
        if result.device.type != "cuda" or tensor.device.type != "cpu":
            return
        batch = self._seen().batch
        if tensor.data_ptr() in batch.pointers:
            batch.moved_unchanged = True
            batch.non_blocking = bool(kwargs.get("non_blocking", any(arg is True for arg in args)))


def _scaled(scaler: Any, parameter: torch.Tensor, training: Training) -> bool:
    """Whether the parameter's gradient is still multiplied by this scaler's scale: `unscale_` has not been called for its optimizer."""
    if not scaler.is_enabled() or scaler._scale is None:
        return False
    owners = [
        o for o in training.optimizers for group in o.param_groups if any(p is parameter for p in group["params"])
    ]
    if not owners:
        return False
    state = scaler._per_optimizer_states.get(id(owners[0]))
    return state is None or state["stage"].name == "READY"


def _with_gradient(owner: Any) -> list[torch.Tensor]:
    """The first parameter of an optimizer or a module that has a gradient."""
    if isinstance(owner, torch.nn.Module):
        parameters = owner.parameters()
    else:
        parameters = (p for group in owner.param_groups for p in group["params"])
    for parameter in parameters:
        if parameter.grad is not None:
            return [parameter]
    return []
