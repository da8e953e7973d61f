"""What a replay may move, saved and put back: parameters, buffers, gradients, random states, plain attributes.

Plain attributes are numbers, None, generators of random numbers, and tensors that are no buffers: a mean that a forward goes on with,
features that it leaves for the loss. What is in lists and the like counts too, also in those that the script's hooks fill.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import NoneType
from typing import Any

import torch

from advisor.loop.training import Training
from advisor.transforms.patch import write
from advisor.transforms.replay import note, put_back, reached_by_hooks

# Of tensors in attributes, those with at most so many values: a mean, no batch of features. In place only such are written.
_FEW = 1 << 16
_PLAIN = (bool, int, float, NoneType, torch.Tensor)
# What torch keeps in each module's dictionary: tensors and modules, which are saved by themselves, and hooks, which a change may bring.
_TORCHS = frozenset(vars(torch.nn.Module()))


class SavedState:
    """Parameters, buffers, gradients, random states and plain attributes of some modules; put back on leaving."""

    def __init__(self, modules: list[torch.nn.Module], training: Training) -> None:
        self.modules, self.device = modules, training.device
        self.parameters = {id(p): (p, p.detach().clone()) for m in modules for p in m.parameters()}
        self.buffers = {id(b): (b, b.detach().clone()) for m in modules for b in m.buffers()}
        self.grads = [(p, p.grad) for p, _ in self.parameters.values()]
        children = list({id(child): child for module in modules for child in module.modules()}.values())
        # A forward may put another tensor in a buffer's place.
        self.places = [(child._buffers, dict(child._buffers)) for child in children if child._buffers]
        own = [v for child in children for k, v in vars(child).items() if k not in _TORCHS]
        self.plain = [
            (
                vars(child),
                {k: v for k, v in vars(child).items() if type(v) in _PLAIN and k not in _TORCHS - {"training"}},
            )
            for child in children
        ]
        self.containers: dict[int, tuple[Any, Any]] = {}
        for value in (*own, *chain.from_iterable(map(reached_by_hooks, children))):
            note(value, self.containers)
        self.generators = list(_generators(own))
        contents = [values for _, values in self.plain] + [found for _, found in self.containers.values()]
        held = {id(v): v for values in contents for v in _values(values) if isinstance(v, torch.Tensor)}
        few = (t for t in held.values() if t.numel() <= _FEW and not (t.requires_grad or t.is_inference()))
        self.held = [(t, t.detach().clone()) for t in few]
        self.random = torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.python_random = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy_random = numpy.random.get_state() if numpy is not None else None
        self.numpy_bytes = pickle.dumps(self.numpy_random)  # its arrays compare one by one
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
            for buffers, placed in self.places:
                buffers.update(placed)
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
        for container, contents in self.containers.values():
            put_back(container, contents)
        for put_generator_back in self.generators:
            put_generator_back()
        torch.set_rng_state(self.random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random, self.device)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)

    def leave_to_change(self) -> None:
        """What is not as it was, behind a switch of the change alone, is the change's own: it is not put back any more."""
        for attributes, values in self.plain:
            for name in [name for name, value in values.items() if attributes.get(name) is not value]:
                del values[name]
        self.containers = {
            key: (container, contents)
            for key, (container, contents) in self.containers.items()
            if len(container) == len(contents) and all(map(operator.is_, _items(container), _items(contents)))
        }

    def drew(self) -> bool:
        """Whether what has run since all was put back has drawn random numbers."""
        if not torch.equal(torch.get_rng_state(), self.random) or random.getstate() != self.python_random:
            return True
        if self.numpy_random is not None and pickle.dumps(sys.modules["numpy"].random.get_state()) != self.numpy_bytes:
            return True
        return self.cuda_random is not None and not torch.equal(torch.cuda.get_rng_state(self.device), self.cuda_random)

    def states(self) -> list[torch.Tensor]:
        """Where torch's random numbers are now, to `start_from` again."""
        on_cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_cuda]

    def start_from(self, states: list[torch.Tensor]) -> None:
        """Torch's random numbers go on from there."""
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self.device)

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


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _items(container: Any) -> Iterator[Any]:
    return chain(container, _values(container)) if isinstance(container, dict) else iter(container)


def _generators(found: list[Any]) -> Iterator[Callable[[], Any]]:
    """For each generator of random numbers, what puts it back to where it is now."""
    numpy = sys.modules.get("numpy.random")
    for generator in {id(value): value for value in found}.values():
        if isinstance(generator, torch.Generator):
            yield partial(generator.set_state, generator.get_state())
        elif isinstance(generator, random.Random):
            yield partial(generator.setstate, generator.getstate())
        elif numpy is not None and isinstance(generator, numpy.RandomState):
            yield partial(generator.set_state, generator.get_state())
        elif numpy is not None and isinstance(generator, numpy.Generator):
            yield partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
