"""Which of the script's lines write weights outside any `Optimizer.step`: those that average them into a second copy, and those that
update them by hand. Found by what they do with the tensors, not by what anybody has named them.

A trained tensor is a parameter that is trained, or a buffer beside one. Another tensor of a trained one's shape is its average if it is
made from the trained one and from itself, and outlives the step: written in place (`mul_` and `add_`, `lerp_`, `copy_` of the new value), or
put in the old one's place. A trained tensor that is written from a gradient is updated. Whatever autograd records is none of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from advisor.loop.training import Training
from advisor.profiling.trace.hosttree import AVERAGE, OPTIMIZER

_ATTRIBUTES: Any = torch.Tensor  # descriptors: how a function mode is told of `tensor.grad` and `tensor.data = …`
_GRADIENT, _DATA = _ATTRIBUTES.grad.__get__, _ATTRIBUTES.data.__set__
_IN_PLACE = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__setitem__"})
# What these leave of the tensor they write into does not depend on what was in it.
_OVERWRITES = ("copy_", "fill_", "zero_", "__setitem__", "set_", "normal_", "uniform_")


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a tensor was made from, by addresses; and the lines that made it."""

    trained: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    gradient: bool = False
    lines: frozenset[str] = frozenset()

    def joined(self, other: _Origin) -> _Origin:
        return _Origin(
            self.trained | other.trained,
            self.others | other.others,
            self.gradient or other.gradient,
            self.lines | other.lines,
        )


class WeightLines:
    """`roles`: source line → the phase of its work, AVERAGE or OPTIMIZER, as far as `saw` was told of calls into torch."""

    def __init__(self, training: Training | None) -> None:
        self.roles: dict[str, str] = {}
        self._trained = {id(t): t for t in _trained(training) if t.data_ptr()} if training is not None else {}
        self._shapes = {t.data_ptr(): tuple(t.shape) for t in self._trained.values()}  # by address
        self._sizes = frozenset(self._shapes.values())
        self._made: dict[int, _Origin] = {}  # by address: tensors made or written since the last module ran
        self._gradients: set[int] = set()
        self._replaced: list[tuple[weakref.ref[torch.Tensor], frozenset[str]]] = []

    def forget(self) -> None:
        """A module or an optimizer runs: addresses of what has been made before may be others' from here on."""
        self._made.clear()
        self._gradients.clear()

    def saw(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any, line: str) -> None:
        """A call from `line` into torch has returned. Not to be told of calls inside modules, optimizers and backward."""
        if not self._shapes:
            return
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            self._attribute(func, args, result, line)
            return
        # `_foreach_` functions do to lists what others do to tensors, entry by entry.
        length = len(args[0]) if args and isinstance(args[0], (list, tuple)) else 0
        if not length:
            self._call(name, [*args, *(kwargs or {}).values()], result, line, (kwargs or {}).get("out"))
            return
        results = result if isinstance(result, (list, tuple)) and len(result) == length else [result] * length
        values = [*args, *(kwargs or {}).values()]
        for entry in range(length):
            own = [v[entry] if isinstance(v, (list, tuple)) and len(v) == length else v for v in values]
            self._call(name.removeprefix("_foreach_"), own, results[entry], line)

    def finish(self) -> dict[str, str]:
        """The roles, with the lines of averages that were put in the old ones' place and are still there."""
        for kept, lines in self._replaced:
            if kept() is not None:
                self._note(lines, AVERAGE)
        self._replaced.clear()
        return self.roles

    def _note(self, lines: Iterable[str], role: str) -> None:
        for line in lines:
            if line and role:
                self.roles.setdefault(line, role)

    def _attribute(self, func: Any, args: Sequence[Any], result: Any, line: str) -> None:
        if func == _GRADIENT and isinstance(result, torch.Tensor):
            self._gradients.add(result.data_ptr())
        elif func == _DATA and len(args) > 1 and isinstance(args[1], torch.Tensor):
            found, tensor = self._origin(args[1]), args[0]
            if id(tensor) in self._trained:  # by now at the other's address
                self._shapes[tensor.data_ptr()] = tuple(tensor.shape)
                self._note(found.lines | {line}, OPTIMIZER if found.gradient or found.others else "")
            elif self._averages(tensor, found):
                self._note(found.lines | {line}, AVERAGE)

    def _origin(self, tensor: torch.Tensor) -> _Origin:
        address = tensor.data_ptr()
        known = self._made.get(address)
        if address in self._gradients:
            return _Origin(gradient=True)
        if address in self._shapes:
            return _Origin(trained=frozenset((address,)))
        return known or _Origin(others=frozenset((address,)))

    def _call(self, name: str, values: Sequence[Any], result: Any, line: str, out: Any = None) -> None:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not any(tuple(tensor.shape) in self._sizes for tensor in tensors):
            return
        if isinstance(result, torch.Tensor) and result.requires_grad and torch.is_grad_enabled():
            return
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        written = tensors[0] if in_place else out if isinstance(out, torch.Tensor) else None
        read = tensors[1:] if written is not None and name.startswith(_OVERWRITES) else tensors
        found = _Origin(lines=frozenset((line,)))
        for tensor in read:
            found = found.joined(self._origin(tensor))
        if written is not None:
            self._written(written, found)
        elif isinstance(result, torch.Tensor) and result.data_ptr():
            self._returned(result, found, {tensor.data_ptr() for tensor in tensors})

    def _written(self, tensor: torch.Tensor, found: _Origin) -> None:
        address = tensor.data_ptr()
        if address in self._shapes:
            # Clamped it is made from itself alone; a copy that is put back is not read.
            changed = found.gradient or (found.others and address in found.trained)
            self._note(found.lines, OPTIMIZER if changed else "")
            return
        if address in self._gradients:
            return
        self._made[address] = found
        if self._averages(tensor, found) and address in found.others:
            self._note(found.lines, AVERAGE)

    def _returned(self, tensor: torch.Tensor, found: _Origin, given: set[int]) -> None:
        address = tensor.data_ptr()
        if address in given:  # a view, `detach`, `data`: the same values
            return
        self._shapes.pop(address, None)  # a trained tensor that was here has been given another's memory
        self._made[address] = found
        self._gradients.discard(address)
        if self._averages(tensor, found):
            self._replaced.append((weakref.ref(tensor), found.lines))

    def _averages(self, tensor: torch.Tensor, found: _Origin) -> bool:
        shape = tuple(tensor.shape)
        return not found.gradient and bool(found.others) and any(self._shapes[t] == shape for t in found.trained)


def _trained(training: Training) -> Iterable[torch.Tensor]:
    """What is trained: the optimizers' parameters, or where there is none those with gradients; and the buffers of models that own some."""
    updated = {id(p): p for o in training.optimizers for group in o.param_groups for p in group["params"]}
    for root in training.roots:
        owned = list(root.module.parameters())
        if not training.optimizers:
            updated.update({id(p): p for p in owned if p.requires_grad})
        if any(id(p) in updated for p in owned):
            updated.update({id(b): b for b in root.module.buffers() if b.is_floating_point()})
    return updated.values()
