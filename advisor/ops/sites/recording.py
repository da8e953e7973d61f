"""Watches Python do an operation's call once: what it allocates and launches, in order, is what calls.cpp replays.

A call can be replayed when it is one `Function` of those that say so (`Function.replays`) and runs on the one stream. To launches it may
pass addresses of its tensors, and of the counters and exchanges that a stream has for good (ops/nvrtc.py). All else stays in Python.
"""

from __future__ import annotations

import contextlib
import copy
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.core.errors import first_line
from advisor.ops import cuda_driver, dispatch, nvrtc, sources, tensor_map
from advisor.ops.sites import native

NONE = -1  # in place of a slot
_MOST_TRIES = 3  # to record a backward
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}  # whose kernels fill the memory, so that a plain allocation will do


def state() -> int:
    """What decides how a call runs beside its arguments: a recording is for one of these alone. Asked at each call of a site."""
    return dispatch.forced() + 2 * nvrtc.alone()


class Tape(TorchDispatchMode):
    """Allocations, launches and operators of this thread while it is entered, as calls.cpp takes them.

    Attributes:
        slots: the tensors that there are: those given, None for one that is not there, then what is made.
        steps: what makes them, and what is launched on them.
        refused: why that cannot be replayed; empty where it can.
    """

    def __init__(self, slots: Sequence[torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without types
        self.slots = list(slots)
        self.steps: list[tuple[Any, ...]] = []
        self.refused = ""
        self._base: dict[int, int] = {}  # of a slot that is a view, the one with the memory
        self._views: list[tuple[torch.Tensor, Any, Any, Any]] = []  # that nobody has asked for yet, and what made them
        device = next(t.device for t in self.slots if t is not None)
        self._device, self._stream = device, nvrtc.stream(device.index or 0) or 0
        self._thread = threading.get_ident()

    def __enter__(self) -> Tape:
        cuda_driver.watchers.append(self._launched)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own, without types
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)  # type: ignore[no-untyped-call]  # torch's own, without types
        cuda_driver.watchers.remove(self._launched)

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason

    def slot(self, tensor: torch.Tensor | None) -> int:
        """A tensor's. One that has none gets one, and is refused."""
        if tensor is None:
            return NONE
        found = self._find(tensor)
        if found is not None:
            return found
        # Autograd may hand on another object than it got from below.
        alike = [number for number, view in enumerate(self._views) if _told(view[0]) == _told(tensor)]
        same = [number for number in alike if self._views[number][0] is tensor]
        if alike:
            _, operation, arguments, keywords = self._views.pop((same or alike)[-1])
            base = self.slot(arguments[0])
            self._called(operation, arguments, keywords, (tensor,))
            self._base[len(self.slots) - 1] = self._base.get(base, base)
            return len(self.slots) - 1
        self.refuse("a tensor is none of those given or made")
        return self._add(tensor)

    def _find(self, tensor: torch.Tensor) -> int | None:
        return next((slot for slot, found in enumerate(self.slots) if found is tensor), None)

    def _add(self, tensor: torch.Tensor) -> int:
        self.slots.append(tensor)
        return len(self.slots) - 1

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = operation(*args, **kwargs)
        if (nvrtc.stream(self._device.index or 0) or 0) != self._stream:
            self.refuse("it runs on another stream")
        if self.refused:
            return found
        if operation in _ALLOCATIONS:
            if found.device != self._device:
                self.refuse(f"it allocates on {found.device}")
            layout = (list(found.shape), list(found.stride()), found.dtype, found.device)
            self.steps.append(("allocate", self._add(found), *layout))
        elif (
            operation is _aten.detach.default
            and args[0] is self.slots[-1]
            and self.steps[-1:]
            and self.steps[-1][0] == "allocate"
        ):
            self.slots[-1] = found  # so torch.empty_like ends where it is watched
        elif (
            not operation._schema.is_mutable
            and isinstance(found, torch.Tensor)
            and self._holding(_begin(found)) is not None
        ):
            self._views.append((found, operation, args, kwargs))
        else:
            self._called(operation, args, kwargs, found if isinstance(found, (tuple, list)) else (found,))
        return found

    def _called(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], found: Sequence[Any]) -> None:
        values: list[Any] = []
        filled: list[tuple[int, int]] = []
        for number, parameter in enumerate(operation._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(parameter.name, parameter.default_value)
            if isinstance(value, torch.Tensor):
                filled.append((number, self.slot(value)))
                value = None
            elif isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
                self.refuse(f"it calls {operation} with a list of tensors")
            values.append(value)
        if not all(result.type.kind() in ("TensorType", "OptionalType") for result in operation._schema.returns):
            self.refuse(f"it calls {operation}, which gives no tensors")  # or a list of them
            return
        made: list[int] = []
        for one in found:
            known = NONE if one is None else self._find(one)  # of an operator that writes into what it returns
            made.append(self._add(one) if known is None else known)
        name, _, overload = operation.name().partition(".")
        self.steps.append(("call", name, overload, tuple(values), filled, made))

    def _holding(self, address: int) -> int | None:
        """The slot in whose memory an address lies, of a tensor that is no view of another's."""
        found = [
            slot
            for slot, tensor in enumerate(self.slots)
            if tensor is not None
            and slot not in self._base
            and _begin(tensor) <= address < _begin(tensor) + tensor.untyped_storage().nbytes()
        ]
        if len(found) > 1:
            self.refuse("two of its tensors lie in the same memory")
        return found[0] if found else None

    def _launched(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Any],
        shared: int,
        stream: int | None,
        cooperative: bool,
    ) -> None:
        if threading.get_ident() != self._thread:
            return
        if (stream or 0) != self._stream:
            self.refuse("it launches on another stream")
        placed = [self._argument(value, letter) for value, letter in zip(arguments, kernel.types, strict=True)]
        address = kernel.addresses(cooperative)
        self.steps.append(
            ("launch", kernel, *address, tuple(grid), tuple(block), tuple(placed), shared, stream or 0, cooperative)
        )

    def _argument(self, value: Any, letter: str) -> tuple[Any, Any]:
        if type(value) is int and letter == sources.ADDRESS:
            slot = self._holding(value) if value else None
            if slot is not None:
                tensor = self.slots[slot]
                assert tensor is not None
                return slot, value - torch.Tensor.data_ptr(tensor)
            if value and not nvrtc.keeps(value):
                self.refuse("it passes an address of no tensor that it was given or allocated")
            return struct.pack("@P", value), value
        if isinstance(value, tensor_map.Boxes):
            slot = self._holding(value.address)
            tensor = None if slot is None else self.slots[slot]
            if tensor is None:
                self.refuse("it passes maps of no tensor that it was given or allocated")
                return b"", value
            begin = value.address - torch.Tensor.data_ptr(tensor)
            return slot, [(begin + offset, *rest) for offset, *rest in value.made_of]
        if isinstance(value, (np.void, np.ndarray)):
            self.refuse("it passes a struct")  # in which there may be addresses
            return b"", value
        return struct.pack(f"@{letter}", value), value


def _begin(tensor: torch.Tensor) -> int:
    return torch.UntypedStorage.data_ptr(tensor.untyped_storage())


def _told(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _begin(tensor), tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class Context:
    """In place of an autograd.Function's context: what its forward leaves, and its backward whenever that has to run in Python."""

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self._function, self._tries = function, 0
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self.dirty: tuple[torch.Tensor, ...] = ()
        self.constant: tuple[torch.Tensor, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materializes = value

    def maybe_clear_saved_tensors(self) -> None:
        """Whoever calls `backward` has emptied their list of them."""
        self.saved_tensors = ()

    def stay(self) -> None:
        """Have every backward run in Python, and none recorded."""
        self._tries = _MOST_TRIES

    def backward(
        self, recorded: Any, saved: list[torch.Tensor | None], above: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...]:
        """The Function's own, and at first recorded. One gradient an argument of its forward.

        Where it is not recorded `saved` is emptied: nobody but the Function has them then.
        """
        own = copy.copy(self)  # other calls share this one
        own.saved_tensors = tuple(saved)
        # A batch of gradients has no memory that a tape could tell apart.
        batched = any(dy is not None and is_legacy_batchedtensor(dy) for dy in above)
        if torch.is_grad_enabled() or nvrtc.transformed() or batched or self._tries >= _MOST_TRIES:
            saved.clear()
            return _tuple(self._function.backward(own, *above))
        self._tries += 1
        before = _counts()
        with Tape((*saved, *above)) as tape:
            found = _tuple(self._function.backward(own, *above))
            gradients = [tape.slot(gradient) for gradient in found]
        if not tape.refused:
            self.stay()
            with contextlib.suppress(RuntimeError, TypeError):  # a kind of argument that is not foreseen
                recorded.set_backward([*saved, *above], tape.steps, gradients, len(tape.slots), more(before))
        return found


def _tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


class SiteRecording:
    """One call of a site.

    Attributes:
        refused: why it cannot be replayed; empty where it can.
        recorded: as calls.cpp has it.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.tensors = [tensor for a in arguments for tensor in _tensors(a)]
        self.refused = ""
        self.recorded: Any = None
        self._before = _counts()
        self._returned: Any = None
        self._thread = threading.get_ident()
        if not self.tensors:
            self.refused = "no argument is a tensor"
        elif len({id(t) for t in self.tensors}) < len(self.tensors):
            self.refused = "a tensor is given twice"
        elif not all(_is_plain(t) for t in self.tensors):
            self.refused = "a tensor has no memory of its own, or begins between two vectors"

    def takes(self, function: Any) -> bool:
        """Whether `apply` of this Function is to be recorded."""
        if threading.get_ident() != self._thread:
            return False
        if self.recorded is not None:
            self.refused = "it is more than one Function"
        elif not function.replays:
            self.refused = f"{function.__name__} is not replayed"
        return not self.refused

    def apply(self, function: Any, args: tuple[Any, ...]) -> Any:
        """As `function.apply(*args)`."""
        grad = torch.is_grad_enabled()
        context = Context(function, tuple(grad and isinstance(a, torch.Tensor) and a.requires_grad for a in args))
        tape = Tape(self.tensors)
        positions = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        seen = [tape.slot(args[i]) for i in positions]  # what the site was not given is refused
        with torch.no_grad(), tape:
            found = function.forward(context, *args)
            results = _tuple(found)
            outputs = [tape.slot(y) for y in results]
            saved = [tape.slot(t) for t in context.saved_tensors]
            dirty = [tape.slot(t) for t in context.dirty]
        context.saved_tensors = ()
        if any(_tensors(left) for name, left in vars(context).items() if name not in ("dirty", "constant")):
            tape.refuse("it leaves a tensor on ctx that is not saved")
        self.refused = tape.refused
        released = [slot for slot in saved if function.releases and slot != NONE and slot in outputs]
        constant = [
            slot for y, slot in zip(results, outputs, strict=True) if any(y is marked for marked in context.constant)
        ]
        context.dirty = context.constant = ()
        kept = saved, released, dirty, constant
        outcome = (outputs, seen, positions, *kept, not isinstance(found, tuple), context.materializes)
        made = list(self.arguments), self.tensors, tape.slots
        behind = context, state()
        try:
            self.recorded = native.module().Recorded(*made, [] if self.refused else tape.steps, *outcome, *behind)
        except (RuntimeError, TypeError) as error:  # a kind of argument that is not foreseen
            self.refused = first_line(error)
            self.recorded = native.module().Recorded(*made, [], *outcome, *behind)
        if self.refused:
            context.stay()
        self._returned = self.recorded.attach(tape.slots)
        return self._returned

    def finished(self, result: Any) -> bool:
        """Whether a call that gave this can be replayed as recorded."""
        parts = self._returned if isinstance(self._returned, tuple) else ()
        picked = [i for i, part in enumerate(parts) if part is result]
        if self.recorded is None:
            self.refused = self.refused or "it calls no Function"
        elif result is self._returned or picked:
            self.recorded.set_result(picked[0] if picked else NONE, more(self._before))
        else:
            self.refused = self.refused or "its result is not the Function's own"
        return not self.refused


Counts = dict[int, tuple[Counter[str], Counter[str]]]


def _counts() -> Counts:
    """Dispatch's counters, and each as it is now."""
    counters = (*dispatch.engaged.values(), *dispatch.fell_back.values())
    return {id(counter): (counter, Counter(counter)) for counter in counters}


def more(before: Counts) -> list[tuple[Counter[str], str]]:
    """Counters and what has been counted in them since."""
    # A copy of each: other threads count meanwhile.
    return [(counter, key) for counter, old in before.values() for key, n in tuple(counter.items()) if n > old[key]]


def _tensors(argument: Any) -> tuple[torch.Tensor, ...]:
    """A tensor, or all of a list or tuple of them."""
    if isinstance(argument, torch.Tensor):
        return (argument,)
    if isinstance(argument, (list, tuple)) and all(isinstance(one, torch.Tensor) for one in argument):
        return tuple(argument)
    return ()


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or nvrtc.outlived(tensor):
        return False
    return torch.Tensor.data_ptr(tensor) % 16 == 0


# The one that goes on, in whichever thread: a launch or a Function asks whether it is its own.
active: SiteRecording | None = None


@contextlib.contextmanager
def recording(arguments: tuple[Any, ...]) -> Iterator[SiteRecording]:
    """Inside, the call of a site with these arguments is recorded, unless another one is just now."""
    global active
    made = SiteRecording(arguments)
    if active is not None:
        made.refused = "another call is being recorded"
    if made.refused:
        yield made
        return
    active = made
    try:
        yield made
    finally:
        active = None
