"""ZeRO-1 on the script's own optimizer: each rank keeps the state of its share of the parameters, updates them, and sends them to the others.

PyTorch's ZeroRedundancyOptimizer is an optimizer of its own, made of a class and its arguments; the script holds its optimizer already, with
schedulers and hooks on it (docs/decisions/0096). So that one steps, on this rank's parameters alone: its groups hold no others while it does.
Parameters go to the rank that has the fewest values, as ZeroRedundancyOptimizer deals them. `state_dict()` is the whole of all ranks.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from advisor.distributed.refused import refuse
from advisor.loop.sources import user_line


class SharedState:
    """Of one optimizer, from its next step on. `starts` is called before each of its steps; the hooks do the rest."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> None:
        self._optimizer, self._rank, self._ranks = optimizer, rank, ranks
        self._owner: dict[int, int] = {}  # of a parameter, by identity
        self._held = [0] * ranks  # values of each rank
        self._whole: list[list[torch.Tensor]] = []  # each group's parameters, while it has this rank's alone
        optimizer.register_step_post_hook(lambda *_: self._ends())
        optimizer.register_state_dict_post_hook(lambda _, state: self._gathered(state))
        optimizer.register_load_state_dict_post_hook(lambda _: self._drop())
        self._deal()
        self._drop()

    def starts(self, args: Any, kwargs: Any) -> None:
        """The step that begins sees this rank's parameters alone. `args`, `kwargs`: what it is called with."""
        if args[:1] not in ((), (None,)) or kwargs.get("closure") is not None:
            refuse(
                "an optimizer's step with a closure computes gradients inside, which ZeRO-1 has no place for",
                user_line(),
            )
        self._deal()
        groups = self._optimizer.param_groups
        self._whole = [list(group["params"]) for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if self._owner[id(p)] == self._rank]

    def _ends(self) -> None:
        if not self._whole:
            return
        for group, whole in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = whole
        moved = [p for whole in self._whole for p in whole if p.grad is not None]
        self._whole = []
        for owner in range(self._ranks):
            mine = [p for p in moved if self._owner[id(p)] == owner]
            for kind in sorted({p.dtype for p in mine}, key=str):
                _send([p for p in mine if p.dtype is kind], owner)

    def _deal(self) -> None:
        """Each parameter that nobody has goes to the rank with the fewest values: the same in all ranks."""
        new = [p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in self._owner]
        for parameter in sorted(new, key=lambda p: -p.numel()):
            owner = min(range(self._ranks), key=self._held.__getitem__)
            self._owner[id(parameter)] = owner
            self._held[owner] += parameter.numel()

    def _drop(self) -> None:
        """State of others' parameters, which a checkpoint brings."""
        for parameter in list(self._optimizer.state):
            if self._owner.get(id(parameter), self._rank) != self._rank:
                del self._optimizer.state[parameter]

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """All ranks' state, as the plain script's optimizer has it; what other ranks keep comes in host memory."""
        own = {index: _on_host(values) for index, values in state["state"].items()}
        found: list[Any] = [None] * self._ranks
        distributed.all_gather_object(found, own)
        others = {i: v for rank, part in enumerate(found) if rank != self._rank for i, v in part.items()}
        whole = {**others, **state["state"]}
        return {**state, "state": dict(sorted(whole.items()))}


def _send(parameters: list[torch.Tensor], owner: int) -> None:
    """These are on every rank what they are on their owner. One message, as large as they are together."""
    with torch.no_grad():
        values = torch.cat([p.detach().reshape(-1) for p in parameters])
        distributed.broadcast(values, owner)
        if distributed.get_rank() != owner:
            parts = values.split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))


def _on_host(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu()
    return {name: _on_host(value) for name, value in values.items()} if isinstance(values, dict) else values
