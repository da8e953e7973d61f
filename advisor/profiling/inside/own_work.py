"""What a rank of several does by itself in a step: from the boundary to where its backward pass begins.

From there on ranks wait for each other, in the reductions of gradients, and all take the same time. Before it each takes its own: the
loader, the copy, the forward. (With synchronised batch norms they wait in the forward too; then it shows less.)
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from advisor.loop.patches import Patches
from advisor.loop.timing import clocks
from advisor.loop.training import StepEvent


class OwnWork:
    """From its making on; `boundary` is called at each, `times_us` at the end."""

    def __init__(self, device: torch.device, patches: Patches, begun: StepEvent) -> None:
        self._device, self._patches, self._last = device, patches, begun
        self._mark: tuple[torch.cuda.Event | None, int] | None = None
        self._spans: list[tuple[StepEvent, tuple[torch.cuda.Event | None, int]]] = []
        self._patch = patches.replace(torch.autograd, "backward", self._marks(torch.autograd.backward))

    def boundary(self, step: StepEvent) -> None:
        """A step has ended. Of what is no clean step nothing is kept."""
        if self._mark is not None and step.clean:
            self._spans.append((self._last, self._mark))
        self._last, self._mark = step, None

    def times_us(self) -> list[float]:
        """Of each clean step, by the device's clock where it has one. Waits for the device."""
        self._patches.restore(self._patch)
        found = []
        for begun, (event, host_ns) in self._spans:
            if event is not None and begun.event is not None:
                event.synchronize()
                found.append(float(begun.event.elapsed_time(event)) * 1e3)
            else:
                found.append((host_ns - begun.host_ns) / 1e3)
        return found

    def _marks(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._mark is None:
                self._mark = clocks(self._device)
            return plain(*args, **kwargs)

        return backward
