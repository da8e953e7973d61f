"""What a step has left in gradients and buffers, small enough to be compared between processes that never meet.

Of each tensor: its norm, and its products with a few vectors of signs, the same in every process. The difference of two tensors has a
squared norm of what the squared differences of these products are in the mean (Johnson and Lindenstrauss; Achlioptas 2003 for signs).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from advisor.loop.training import Training
from advisor.transforms import tf32
from advisor.transforms.base import Undo

PRODUCTS = 8


class WholeProducts:
    """No TF32 from the first module's call, by when the script has set what it wants, until `end`.

    With it the gradients of a deep net at its start are rounding for a good part: a ResNet-50's first ones were 36 % apart on an H200 for
    the same batch in another order, which would have hidden gradients that nobody had reduced.
    """

    def __init__(self) -> None:
        self._undo = Undo()
        self._hook = register_module_forward_pre_hook(self._begins)

    def _begins(self, *_: Any) -> None:
        self._hook.remove()
        self._undo = tf32.forbid()

    def end(self) -> None:
        """The script's own settings are back."""
        self._hook.remove()
        self._undo.run()


def of(training: Training, step: int) -> dict[str, tuple[float, ...]]:
    """By "step kind root.path": the norm, then the products. To be called behind the step, before gradients are zeroed."""
    return {f"{step} {kind} {name}": _print(name, tensor) for kind, name, tensor in _tensors(training)}


def _tensors(training: Training) -> Iterator[tuple[str, str, torch.Tensor]]:
    for root in training.roots:
        for name, parameter in root.module.named_parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                yield "gradient", f"{root.name}.{name}", parameter.grad
        for name, buffer in root.module.named_buffers():
            if buffer.is_floating_point() and buffer.numel():
                yield "buffer", f"{root.name}.{name}", buffer


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of FSDP2's shares what all ranks have together, which they ask for together."""
    gather = getattr(tensor, "full_tensor", None)
    return gather() if gather is not None else tensor


def _print(name: str, tensor: torch.Tensor) -> tuple[float, ...]:
    values = _whole(tensor.detach()).flatten().double()
    signs = torch.empty_like(values, dtype=torch.float32)
    drawn = torch.Generator(device=values.device).manual_seed(zlib.crc32(name.encode()))
    found = [values.norm()]
    for _ in range(PRODUCTS):
        signs.bernoulli_(0.5, generator=drawn)
        found.append(2 * torch.dot(values, signs.double()) - values.sum())
    return tuple(torch.stack(found).tolist())
