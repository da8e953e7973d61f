"""Gradients of an operation through PyTorch's own operations, for second derivatives and where kernels do not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def gradients(
    function: Callable[..., torch.Tensor], dy: torch.Tensor, inputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """One gradient an input of `function(*inputs)`, given `dy` from above; None for an input that is None.

    With gradients enabled (create_graph=True) they are part of the graph that `inputs` belong to.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [
            None if t is None else (t if again and t.requires_grad else t.detach().requires_grad_()) for t in inputs
        ]
        there = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(function(*leaves), there, dy, create_graph=again))
    return tuple(None if t is None else next(found) for t in leaves)
