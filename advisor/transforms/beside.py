"""Weight gradients of a captured backward on a second stream, beside what the rest of the backward waits for.

A convolution's backward makes two results: the gradient of its input, on which every earlier layer waits, and that of its weight,
which nobody reads before the optimizer does. On one stream the second holds the first up. On a stream of its own it runs where
the chain of the others leaves multiprocessors idle: while a kernel starts, and while its last blocks end. The kernels and what
they read are the same, so the results are bit-equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# Launches on the second stream that may be under way when the backward goes on to the next convolution: what they read stays in
# memory until then. On one H200 two, four and all of them were no faster than one, and took up to twice the memory.
_UNDER_WAY = 1
_WEIGHT, _MASK = 2, 10  # arguments of convolution_backward


class WeightGradientsBeside(TorchDispatchMode):
    """Inside, convolutions' weight gradients, and what is made of them, are launched on a stream of their own.

    At the end the current stream waits for it. Enter it around a backward while the current stream is captured into a CUDA graph:
    there the second stream costs the host nothing. Gradients of weights that are computed (parametrizations) stay where they are:
    what such a gradient runs through may launch kernels past PyTorch's dispatcher, which is what tells here who reads it.

    Attributes:
        moved: weight gradients that were launched on the second stream.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without types
        self.moved = 0
        self._device = device
        self._side: Any = torch.cuda.Stream(device)
        self._made: set[int] = set()  # memory allocated on the second stream, which is given to nothing of the first
        self._running: deque[tuple[Any, list[torch.Tensor]]] = deque()  # the event behind a launch, and what it touches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.convolution_backward.default and _for_a_parameter(args):
            self.moved += 1
            self._catch_up()
            ready = self._main.record_event()
            input_wanted, *others = args[_MASK]
            dx = func(*args[:_MASK], [True, False, False], **kwargs)[0] if input_wanted else None
            _, dweight, dbias = self._launch(ready, func, (*args[:_MASK], [False, *others]), kwargs)
            return dx, dweight, dbias
        touched = set(map(memory_of, _tensors((args, kwargs))))
        writes = func._schema.is_mutable
        if not self._made.isdisjoint(touched):
            if not writes or touched <= self._made:
                return self._launch(self._main.record_event(), func, args, kwargs)
            self._join()  # memory of the first stream is written there alone
        elif writes:
            self.wait_for_readers(touched)
        return func(*args, **kwargs)

    @property
    def _main(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def _launch(self, ready: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `func` on the second stream, as soon as the first has reached the event `ready`."""
        self._side.wait_event(ready)
        with torch.cuda.stream(self._side):
            found = func(*args, **kwargs)
        self._made.update(map(memory_of, _tensors(found)))
        self._running.append((self._side.record_event(), list(_tensors((args, kwargs)))))
        return found

    def wait_for_readers(self, memory: set[int]) -> None:
        """Wait for the launches that read what is about to be written in place (by a hand-written backward)."""
        for done, read in self._running:
            if not memory.isdisjoint(map(memory_of, read)):
                self._main.wait_event(done)

    def _catch_up(self) -> None:
        """Wait for all launches but the latest, and let go of what they read: its memory may be written again."""
        while len(self._running) > _UNDER_WAY:
            done, _ = self._running.popleft()
            self._main.wait_event(done)

    def _join(self) -> None:
        self._main.wait_stream(self._side)
        self._running.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)  # type: ignore[no-untyped-call]  # torch's own, without types
        self._join()


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.numel())


_CASTS = ("ToCopyBackward0", "_CastBackward")


def _for_a_parameter(args: Any) -> bool:
    """Whether a weight's gradient is asked for that only a cast stands before: of a leaf, or a copy of one in another dtype."""
    weight: torch.Tensor = args[_WEIGHT]
    if not args[_MASK][1]:
        return False
    if weight.grad_fn is None:
        return weight.requires_grad
    cast: Any = weight.grad_fn
    return cast.name() in _CASTS and all(
        below is None or below.name() == "torch::autograd::AccumulateGrad" for below, _ in cast.next_functions
    )
