"""What a replay may move, saved and put back: parameters, buffers, gradients, random states, plain attributes.

Plain attributes are numbers, and tensors that are no buffers: a mean that a forward goes on with, features that it leaves for the loss.
"""

from __future__ import annotations

import random
import sys

import torch

from advisor.profiling.training import Training
from advisor.transforms.patch import write

# Of tensors in attributes, those with at most so many values: a mean, no batch of features. In place only such are written.
_FEW = 1 << 16


class SavedState:
    """Parameters, buffers, gradients, random states and plain attributes of some modules; put back on leaving."""

    def __init__(self, modules: list[torch.nn.Module], training: Training) -> None:
        self.modules, self.device = modules, training.device
        self.parameters = {id(p): (p, p.detach().clone()) for m in modules for p in m.parameters()}
        self.buffers = {id(b): (b, b.detach().clone()) for m in modules for b in m.buffers()}
        self.grads = [(p, p.grad) for p, _ in self.parameters.values()]
        self.plain = [
            (child.__dict__, {k: v for k, v in child.__dict__.items() if type(v) in (bool, int, float, torch.Tensor)})
            for module in modules
            for child in module.modules()
        ]
        held = {id(v): v for _, values in self.plain for v in values.values() if isinstance(v, torch.Tensor)}
        few = (t for t in held.values() if t.numel() <= _FEW and not (t.requires_grad or t.is_inference()))
        self.held = [(t, t.detach().clone()) for t in few]
        self.random = torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.python_random = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy_random = numpy.random.get_state() if numpy is not None else None
        self._bits = self._fingerprint()
        self._after: list[int] = []

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.give_gradients()
        self._after = self._fingerprint()

    def restore(self, *, buffers_only: bool = False) -> None:
        """Back to the saved state, gradients cleared."""
        with torch.no_grad():
            if not buffers_only:
                for parameter, value in self.parameters.values():
                    write(parameter, value)
            for buffer, value in self.buffers.values():
                write(buffer, value)
            for tensor, value in self.held:
                write(tensor, value)
        for parameter, _ in self.parameters.values():
            parameter.grad = None
        for attributes, values in self.plain:
            for name, value in values.items():
                if attributes.get(name) is not value:
                    attributes[name] = value
        torch.set_rng_state(self.random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random, self.device)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)

    def give_gradients(self) -> None:
        """The user's own gradient tensors are in their places again; replays made their own and dropped them."""
        for parameter, grad in self.grads:
            parameter.grad = grad

    def difference(self) -> str:
        """What is not as it was, after leaving; "" when the bits agree."""
        now = {id(t) for m in self.modules for t in (*m.parameters(), *m.buffers())}
        if now != set(self.parameters) | set(self.buffers):
            return "parameters or buffers"
        return "" if self._after == self._bits else "the model's state"

    def _fingerprint(self) -> list[int]:
        # A sparse one (a mesh's matrix) has no memory that could be seen as integers, and no forward writes to it.
        held = (t.detach() for t, _ in (*self.parameters.values(), *self.buffers.values()))
        tensors = [t for t in held if t.layout is torch.strided and t.numel()]
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [t.view(whole[t.element_size()]).sum(dtype=torch.int64) for t in tensors if t.element_size() in whole]
        return [int(value) for value in torch.stack([s.cpu() for s in sums])] if sums else []
