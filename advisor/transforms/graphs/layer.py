"""The layer that puts CUDA graphs in a module's forward's place.

Where a forward as a whole cannot be captured (it chooses boxes, or has a loss with masks in it) its larger parts are, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.nn.parallel import DistributedDataParallel

from advisor.transforms.forward import CAPTURED, GRAPH, ForwardStack, KeptLayers
from advisor.transforms.graphs.calls import GraphedForward, unfit
from advisor.transforms.graphs.sending import Sending
from advisor.transforms.targets import passed_by

# Modules with parameters in a part that is graphed by itself: with fewer, what a replay costs the host is as much as it saves.
_LARGE = 4


def _parts(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules below that are large enough to be graphed by themselves, as high up as they are called."""
    for child in module.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _parts(child)
        elif sum(1 for m in child.modules() if m._parameters) >= _LARGE and not unfit(child):
            yield child


class GraphLayer:
    """A layer for ForwardStack: one GraphedForward for each different forward below it.

    Args:
        beside: weight gradients are captured on a stream of their own.

    Attributes:
        reducers: wrappers of one process around the module, which count its gradients where they are not passed by.
        parts: modules below that are graphed by themselves.
        sends: graphs may send gradients to other ranks.
        sending: what the call that runs now sends to other ranks; None where it does not, as beside `--gpus N`.
    """

    def __init__(self, beside: bool) -> None:
        self.beside = beside
        self.forwards: WeakSet[GraphedForward] = WeakSet()  # alive as long as the stack remembers the composition
        self.reducers: list[ref[DistributedDataParallel]] = []
        self.parts: list[ref[torch.nn.Module]] = []
        self.sends = False
        self.sending: Sending | None = None

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        forward = GraphedForward(inner, module, self)
        self.forwards.add(forward)
        return forward

    def reducers_rest(self) -> bool:
        """Whether no wrapper counts gradients."""
        return all(wrapper is None or passed_by(wrapper) for wrapper in (known() for known in self.reducers))

    def descend(self, module: torch.nn.Module) -> None:
        """Graph the larger parts of a module whose forward cannot be captured. Not where Dynamo captures it: it would trace into them."""
        if self.parts or ForwardStack.of(module).get(CAPTURED) is not None:
            return
        self.parts = [ref(part) for part in _parts(module)]
        self.put_on()

    def put_on(self) -> None:
        """Switch the parts on."""
        for part in filter(None, (known() for known in self.parts)):
            layer = layers.of(part, self.beside)
            layer.reducers = self.reducers
            ForwardStack.of(part).set(GRAPH, layer)
            layer.put_on()

    def take_off(self) -> None:
        """Switch the parts off; what they have captured is found again by `put_on`."""
        for part in filter(None, (known() for known in self.parts)):
            layers.of(part, self.beside).take_off()
            ForwardStack.of(part).clear(GRAPH)

    def _of_parts(self) -> list[GraphLayer]:
        return [layers.of(part, self.beside) for part in filter(None, (known() for known in self.parts))]

    @property
    def replays(self) -> int:
        """Forward replays so far, those of parts too."""
        own = sum(captured.replays for forward in self.forwards for captured in forward.all())
        return own + sum(layer.replays for layer in self._of_parts())

    @property
    def warming(self) -> bool:
        """Whether the latest calls are of a kind that is captured after some more of them; so of parts."""
        return any(f.warming for f in self.forwards) or any(layer.warming for layer in self._of_parts())

    @property
    def moved(self) -> int:
        """Weight gradients on a stream of their own, in all captures."""
        return sum(captured.moved for forward in self.forwards for captured in forward.all())

    @property
    def failures(self) -> list[str]:
        """Why calls stay eager: captures that failed first."""
        return [reason for forward in self.forwards for reason in forward.reasons()]

    def free(self) -> None:
        """Give the memory of all graphs back."""
        for forward in self.forwards:
            forward.free()
        layers.release(part for part in (known() for known in self.parts) if part is not None)


layers = KeptLayers(GRAPH, GraphLayer, GraphLayer.free)
"""Every module's layers, kept for switching on again."""
