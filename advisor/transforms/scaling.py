"""Loss scaling for fp16 without the script's help.

Every `backward` starts from a loss multiplied by the scale, and the gradients of all leaves are divided by it again before `backward`
returns. So the script sees these true at all times: clipping, inspection, accumulation, several losses and several optimizers stay right.
A step whose gradients overflowed is skipped, and the scale follows the rule of `torch.amp.GradScaler`. It falls behind the backward pass,
for a script may see the overflow (a norm that is not finite) and leave its step out itself.

What looks inside a backward pass sees scaled gradients. `autocast` refuses where parameters or modules have hooks for it; `retain_grad`,
hooks of a tensor in the graph, and hooks that come later cannot be seen ahead.

What other threads train meanwhile is left alone.

The scale is a power of two, so scaling and unscaling are exact as long as nothing overflows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from advisor.loop.threads import works_for
from advisor.loop.training import Training
from advisor.transforms.base import Undo
from advisor.transforms.patch import replace_attribute
from advisor.transforms.skip import lacks_momentum, skip_step_hooks

# The defaults of torch.amp.GradScaler.
_INITIAL_SCALE, _GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000

Overflows = dict[torch.optim.Optimizer | None, torch.Tensor]
"""Optimizer, None for those that are gone → above 0 where its gradients have overflowed. Those without gradients are not in it."""


class LossScale:
    """The scale, and what the last backward pass found. All tensors are fp32 scalars on the training's device."""

    def __init__(self, device: torch.device, undo: Undo) -> None:
        self.scale = torch.full((), _INITIAL_SCALE, dtype=torch.float32, device=device)
        self.inverse = self.scale.reciprocal()  # of the scale at the last backward
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        # Neither is held alive. A script may make a new optimizer over the same parameters in every epoch, and read their gradients before
        # its first step: so parameters are looked after beyond the optimizer that brought them.
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self.parameters: dict[int, ref[torch.Tensor]] = {}
        # Optimizer → above 0 when its gradients overflowed.
        self.found_inf: WeakKeyDictionary[torch.optim.Optimizer, torch.Tensor] = WeakKeyDictionary()
        self.stepped = True  # since the last backward pass
        self.undo = undo
        self.active = True
        self._thread = threading.current_thread()

    def here(self) -> bool:
        """Whether it is on, and the caller works for the thread that trains with it; where that has ended, for the next one that asks."""
        if not self._thread.is_alive():
            self._thread = threading.current_thread()
        return self.active and works_for(self._thread)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Look after this optimizer's gradients from now on."""
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self._parameters(optimizer)
            skip_step_hooks(self.undo, optimizer, self.overflowed)
            self.undo.push(optimizer.register_step_post_hook(_drop_flag).remove)

    @torch.no_grad()
    def adopt_late(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Hook before any optimizer's step: one that nobody knew of yet still holds scaled gradients, but of parameters known before."""
        if optimizer not in self.optimizers and self.here():
            unscaled = {id(parameter) for parameter in self._alive()}
            self.adopt(optimizer)
            found = self._multiply(self._parameters(optimizer), self.inverse, unscaled)
            if found is not None:
                self.found_inf[optimizer] = found

    @torch.no_grad()
    def rescale(self, outputs: list[torch.Tensor]) -> Overflows:
        """Before a backward from these outputs: bring gradients of earlier backward passes up to the scale of the one that is about to add to
        them. Which have overflowed already.
        """
        # The script's own too: an image whose gradient it wants, a weight that it updates itself. The kernel takes one device and layout.
        device = self.scale.device
        self._note(
            t for t in _leaves(outputs) if (t.device, t.dtype, t.layout) == (device, torch.float32, torch.strided)
        )
        return self._multiply_all(self.scale)

    @torch.no_grad()
    def unscale(self, before: Overflows) -> None:
        """Divide all gradients by the scale, note overflow for each optimizer, and move the scale on.

        Args:
            before: what `rescale` found.
        """
        self.inverse = self.scale.double().reciprocal().float()
        found = self._multiply_all(self.inverse)
        # Gradients hold what earlier backward passes left, overflow included, so the latest check is the whole answer for a step. For the
        # scale, what overflowed before was counted then.
        self.found_inf.update((optimizer, flag) for optimizer, flag in found.items() if optimizer is not None)
        new = [flag - before[optimizer] if optimizer in before else flag for optimizer, flag in found.items()]
        if new:
            self._move_scale(new[0] if len(new) == 1 else torch.stack(new).sum())

    def _move_scale(self, overflow: torch.Tensor) -> None:
        """GradScaler's rule, which counts good steps: of the backward passes between two steps, the first."""
        if not self.stepped:
            self.growth_tracker.sub_(1)  # which is then added
        self.stepped = False
        torch._amp_update_scale_(self.scale, self.growth_tracker, overflow, _GROWTH, _BACKOFF, _GROWTH_INTERVAL)

    def _multiply_all(self, factor: torch.Tensor) -> Overflows:
        """Multiply all gradients, those that several optimizers share once."""
        done: set[int] = set()
        found: dict[torch.optim.Optimizer | None, torch.Tensor | None] = {
            optimizer: self._multiply(self._parameters(optimizer), factor, done) for optimizer in self.optimizers
        }
        if len(done) < len(self.parameters):
            others = [parameter for parameter in self._alive() if id(parameter) not in done]
            found[None] = self._multiply(others, factor, done)
        return {optimizer: flag for optimizer, flag in found.items() if flag is not None}

    def _multiply(self, parameters: list[torch.Tensor], factor: torch.Tensor, done: set[int]) -> torch.Tensor | None:
        """Multiply the gradients of these but for the `done`, to which they are added. Above 0 where one of them all has overflowed; None
        where there are none."""
        due: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                (others if id(parameter) in done else due).append(parameter.grad)
            done.add(id(parameter))
        if not due and not others:
            return None
        found = torch.zeros((), device=self.scale.device)
        if due:
            torch._amp_foreach_non_finite_check_and_unscale_(due, found, factor)
        if others:
            torch._amp_foreach_non_finite_check_and_unscale_(others, found, torch.ones_like(factor))
        return found

    def _parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Those that its groups hold by now, for the script may add some at any time; noted for when it is gone."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._note(parameters)
        return parameters

    def _note(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            known = self.parameters.get(id(parameter))
            if known is None or known() is not parameter:
                self.parameters[id(parameter)] = ref(parameter)

    def _alive(self) -> list[torch.Tensor]:
        alive = {key: parameter for key, known in self.parameters.items() if (parameter := known()) is not None}
        self.parameters = {key: self.parameters[key] for key in alive}
        return list(alive.values())

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer's step must be skipped from outside.

        A fused optimizer is given the device's own flag and skips without the host; any other makes the host wait for it.
        """
        found = self.found_inf.pop(optimizer, None)
        if found is None:  # no backward since its last step
            return False
        self.stepped = True
        if getattr(optimizer, "_step_supports_amp_scaling", False) and not lacks_momentum(optimizer):
            optimizer.found_inf = found  # type: ignore[attr-defined]  # private to torch
            return False
        return bool(found.item())


def scale_losses(training: Training, undo: Undo) -> None:
    """Scale every loss from here on, until undo."""
    state = LossScale(training.device, undo)
    plain = torch.autograd.backward

    @functools.wraps(plain)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        # A graph of gradients, or gradients of chosen leaves: true as they are, only without protection from underflow. And inside of another
        # backward pass (a reentrant checkpoint's) it starts from that one's gradients, which are scaled.
        inner = torch._C._current_graph_task_id() != -1
        scaling = not inner and not create_graph and inputs is None and grad_variables is None and state.here()
        if scaling:
            before = state.rescale(_listed(tensors))
            grad_tensors = _scaled(tensors, grad_tensors, state.scale)
        try:
            plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        finally:
            if scaling:
                state.unscale(before)

    def stop() -> None:
        state.active = False

    undo.push(stop)
    for optimizer in training.optimizers:
        state.adopt(optimizer)
    undo.push(register_optimizer_step_pre_hook(state.adopt_late).remove)
    replace_attribute(undo, torch.autograd, "backward", backward)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _leaves(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Those to which a backward from these outputs brings gradients: 60 µs for 54 convolutions with norms, on a core of an EPYC."""
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for below, _ in waiting.pop().next_functions:
            if below is None or below in seen:
                continue
            seen.add(below)
            if type(below).__name__ == "AccumulateGrad":
                yield below.variable
            else:
                waiting.append(below)


def _drop_flag(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    vars(optimizer).pop("found_inf", None)


def _scaled(tensors: Any, grad_tensors: Any, scale: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients to start from, times the scale; for a scalar without one, the scale itself."""
    outputs = _listed(tensors)
    if grad_tensors is None:
        starts: list[Any] = [None] * len(outputs)
    else:
        starts = _listed(grad_tensors)

    def scaled(output: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor | None:
        if start is None:
            # Not a scalar: plain backward raises its own error.
            return torch.ones_like(output) * scale.to(output.dtype) if output.numel() == 1 else None
        return start * scale.to(start.dtype)

    return [scaled(output, start) for output, start in zip(outputs, starts, strict=True)]
