"""One step of the roots kept for whoever asks: what they were given, what they returned, and its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from advisor.loop.training import RootModule, Training
from advisor.loop.values import output_tensors


class RecordedStep:
    """Gradients of what the roots have returned in this step, by root."""

    def __init__(self) -> None:
        self._grads: dict[int, list[torch.Tensor | None]] = {}

    def let_go(self) -> None:
        """Hold nothing of the script's any more."""
        self._grads = {}

    def hand_over(self, roots: Iterable[RootModule]) -> None:
        """The step is over: `output_grads` of the roots are its gradients."""
        for root in roots:
            root.output_grads = tuple(self._grads.pop(id(root), ()))
        self._grads.clear()

    def note(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A root was called."""
        root.args, root.kwargs, root.output = args, kwargs, output
        tensors = output_tensors(output)
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        self._grads[id(root)] = grads
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                # A copy: autograd may go on adding into the buffer it hands to the hook.
                def keep(grad: torch.Tensor, position: int = position, into: list[Any] = grads) -> None:
                    held = into[position]
                    into[position] = grad.detach().clone() if held is None else held + grad.detach()

                tensor.register_hook(keep)


def capture_next_step(training: Training) -> None:
    """Record the coming step: call from an `on_step` listener.

    At the next boundary each root that was called has `args`, `kwargs`, `output` and `output_grads` of its latest
    training call in that step, and `training.keep_gradients` is False again. The gradients are copies; arguments and
    output are references. Set the roots' `output` and `output_grads` to None and () when done: they hold memory.
    """
    training.keep_gradients = True
