"""Steps of a fused optimizer without what torch does around its kernel, as long as a step finds all as the last one left it.

Before each fused kernel torch gathers parameters, gradients and state into lists, a look-up in `optimizer.state` for each, sorts them by
device and dtype, and writes the state back: with 62 tensors 80 us of host time, of which the kernel's call takes 13 (SGD). Where nothing was
put in another's place since the last step, those lists are the same but for the gradients, and the kernel is called with them.

It is done where torch gathers, in `Optimizer._init_group`, which then hands back empty lists, as for a group without gradients: `step` itself,
its hooks and what a scheduler has put around it stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch._guards import TracingContext

from advisor.transforms.base import Undo
from advisor.transforms.patch import replace_attribute

Group = dict[str, Any]
State = dict[str, Any]
States = dict[torch.Tensor, State]


def gather_once(optimizer: torch.optim.Optimizer, undo: Undo) -> None:
    """Let an optimizer whose groups are fused keep its lists from step to step; `undo` takes it back. SGD, Adam and AdamW; others stay."""
    kind = _KINDS.get(type(optimizer))
    if kind is None:
        return
    gathering = _Gathering(optimizer, kind)
    replace_attribute(undo, optimizer, "_init_group", gathering)
    # The state that has been replaced is not to be held until the next step.
    undo.push(optimizer.register_load_state_dict_post_hook(lambda _: gathering.forget()).remove)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of optimizers.

    Attributes:
        names: of a parameter's state those entries that its kernel takes with this group's settings, in the kernel's order.
        update: the kernel's call: group, parameters, gradients, and a list for each of `names`.
    """

    names: Callable[[Group], tuple[str, ...]]
    update: Callable[..., None]


class _Gathering:
    """Stands for an optimizer's `_init_group`."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: _Kind) -> None:
        self._optimizer = weakref.ref(optimizer)  # whose attribute this is
        self._kind = kind
        self._lists: dict[int, _Lists] = {}

    def __call__(self, group: Group, *lists: list[Any]) -> bool:
        """What torch's own returns, whether something in the group is sparse or complex: False where the update has been made."""
        optimizer = self._optimizer()
        assert optimizer is not None
        ready = None if _needs_torch(optimizer, group) else self._ready(group, optimizer.state)
        if ready is None:
            # Of the class, and looked up now: torch.compile puts its own in that place.
            sparse = bool(type(optimizer)._init_group(optimizer, group, *lists))  # type: ignore[attr-defined]  # private to torch
            if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and group["momentum"] and not sparse:
                _start_late_momentum(optimizer, group, *lists)
            return sparse
        known, gradients = ready
        self._kind.update(group, known.trained, gradients, *known.tensors)
        return False

    def forget(self) -> None:
        """Gather anew in the next step."""
        self._lists.clear()

    def _ready(self, group: Group, state: States) -> tuple[_Lists, list[torch.Tensor]] | None:
        """The group's lists and its gradients; None where torch has to gather."""
        names = self._kind.names(group)
        known = self._lists.get(id(group))
        if known is not None and known.hold(group, names, state):
            gradients = known.gradients()
            if gradients is not None:
                return known, gradients
        if known is not None:
            self.forget()
        known = _gathered(group, names, state)
        if known is None:
            return None
        self._lists[id(group)] = known
        gradients = known.gradients()
        return None if gradients is None else (known, gradients)


def _needs_torch(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Whether this step has what only torch's way knows: a `GradScaler`'s scale or overflow, a rate in a tensor, a compiler that watches."""
    return (
        not group.get("fused")
        or getattr(optimizer, "found_inf", None) is not None
        or getattr(optimizer, "grad_scale", None) is not None
        or isinstance(group["lr"], torch.Tensor)
        or TracingContext.try_get() is not None  # Dynamo calls `_init_group` while it traces a step
    )


def _start_late_momentum(
    optimizer: torch.optim.Optimizer,
    group: Group,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momentum: list[torch.Tensor | None],
) -> None:
    """Give parameters that join a group in training (a layer is unfrozen) the buffer from which a usual step makes their first one.

    Torch's fused step knows a first step of whole groups alone. A first step puts the gradient g, with its weight decay, in the buffer, a
    usual one momentum * buffer + (1 - dampening) * g.
    """
    if all(buffer is None for buffer in momentum):
        return
    share = group["dampening"] / group["momentum"]
    scale: torch.Tensor | None = getattr(optimizer, "grad_scale", None)
    for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if momentum[index] is None:
            start = momentum[index] = torch.zeros_like(gradient)
            if share:
                start.add_(gradient, alpha=-share if group["maximize"] else share)
                if scale is not None:
                    start.div_(scale)
                start.add_(parameter, alpha=share * group["weight_decay"])


@dataclass(frozen=True, slots=True)
class _Lists:
    """A group's tensors as they were gathered.

    Attributes:
        group: whose `params` were `parameters`: with gradients `trained`, without `idle`.
        entries: all of the optimizer's state, `own` that of the trained ones, with `names` → `tensors` in each.
    """

    group: Group
    parameters: list[torch.Tensor]
    trained: list[torch.Tensor]
    idle: list[torch.Tensor]
    entries: list[State]
    own: list[State]
    names: tuple[str, ...]
    tensors: tuple[list[torch.Tensor], ...]

    def hold(self, group: Group, names: tuple[str, ...], state: States) -> bool:
        """Whether each is what the optimizer would gather now. No tensor is looked up by its hash: that is what takes long."""
        return (
            self.group is group
            and self.names == names
            and len(self.parameters) == len(group["params"])
            and all(map(is_, self.parameters, group["params"]))
            and len(self.entries) == len(state)
            and all(map(is_, self.entries, state.values()))
            and all(
                all(map(is_, tensors, [entry.get(name) for entry in self.own]))
                for name, tensors in zip(names, self.tensors, strict=True)
            )
        )

    def gradients(self) -> list[torch.Tensor] | None:
        """Those of the trained parameters; None when others have gradients than had when this was gathered."""
        found = [parameter.grad for parameter in self.trained]
        if any(gradient is None for gradient in found) or any(parameter.grad is not None for parameter in self.idle):
            return None
        return found  # type: ignore[return-value]  # no None among them, see above


def _gathered(group: Group, names: tuple[str, ...], state: States) -> _Lists | None:
    """A group's lists; None before its first step, and where they are of several devices or dtypes: torch sorts those."""
    parameters = list(group["params"])
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if len({(t.device, t.dtype) for p in trained for t in (p, p.grad) if t is not None}) != 1:
        return None
    own = [state[parameter] for parameter in trained if parameter in state] if names else []
    tensors = tuple([entry.get(name) for entry in own] for name in names)
    if any(len(found) < len(trained) or any(tensor is None for tensor in found) for found in tensors):
        return None
    return _Lists(
        group=group,
        parameters=parameters,
        trained=trained,
        idle=[parameter for parameter in parameters if parameter.grad is None],
        entries=list(state.values()),
        own=own,
        names=names,
        tensors=tensors,  # type: ignore[arg-type]  # no None among them, see above
    )


def _sgd(
    group: Group,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momentum: list[torch.Tensor] | None = None,
) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        momentum or [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def _adam(
    group: Group,
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    steps: list[torch.Tensor],
    first: list[torch.Tensor],
    second: list[torch.Tensor],
    largest: list[torch.Tensor] | None = None,
) -> None:
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    update = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    update(
        parameters,
        gradients,
        first,
        second,
        largest or [],
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _sgd_names(group: Group) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] else ()


def _adam_names(group: Group) -> tuple[str, ...]:
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


_KINDS = {
    torch.optim.SGD: _Kind(_sgd_names, _sgd),
    torch.optim.Adam: _Kind(_adam_names, _adam),
    torch.optim.AdamW: _Kind(_adam_names, _adam),
}
