"""Parameters' gradients from a replayed backward straight into `.grad`, past autograd's own accumulation.

An autograd.Function with an edge to every parameter costs the host 6 to 10 µs a parameter and step: autograd runs one
AccumulateGrad for each, if only to put a pointer down. Where a CUDA graph computes the whole backward, that is most of what the host
does in a step. Here the function keeps one edge, to a leaf of our own, so that a backward reaches it, and writes `.grad` itself as
AccumulateGrad would: the graph's own memory where there was none, else added to it. Before the next replay writes there, gradients that
the script still has, in `.grad` or in a list of its own, are moved out; where it has another tensor over that memory (`p.grad.detach()`),
what is there is put back after the replay, and the new gradient is a copy. One under which it puts memory of its own
(`p.grad.data = …`) is its own from then on.

What else an edge is good for still works: hooks of a tensor and of its AccumulateGrad run (through autograd then), and
`autograd.grad` or `backward(inputs=…)` for parameters get theirs from the graph (`serve_partial_backwards`).
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from advisor.transforms.base import Undo
from advisor.transforms.patch import replace_attribute

_ENGINE = "_engine_run_backward"  # what both autograd.grad and autograd.backward call
_MARK = "advisor: seen"
# Forwards between two looks at who holds a parameter's AccumulateGrad, and those after which it counts as watched.
ASKED_EVERY, PATIENCE = 8, 256


def available() -> bool:
    """Whether this torch has what `serve_partial_backwards` replaces."""
    return callable(getattr(torch.autograd, _ENGINE, None))


class ParameterGradients:
    """The parameters of one captured backward and the static tensors that each replay writes their gradients to.

    Args:
        parameters: in the order of `static`, whose entries are None for a parameter without a gradient; each has its
            parameter's shape, dtype and strides, and memory of its own. The list is taken over: nobody else has these tensors.

    Attributes:
        anchor: the leaf that stands for all parameters in a forward without edges to them.
        watched: whether somebody else holds a parameter's AccumulateGrad, and may have hooks on it; None until it is known.
            Such a node lives only as long as someone refers to it: whoever has hooks on it (Horovod), or the graph of a loss
            that is kept. The graph of the last loss before this is known is one, so one forward without edges comes first; and a script
            that adds up losses for its next report lets go of them there, so it is asked for again for some hundred steps.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], static: list[torch.Tensor | None]) -> None:
        self._parameters, self._static = list(parameters), static
        self._places = [i for i, gradient in enumerate(static) if gradient is not None]
        self._pairs = self._paired()
        # What the graph writes to, held by a tensor that no script gets: it may put its own under the static ones (`p.grad.data = …`).
        self._memory = [gradient.detach() for _, gradient in self._pairs]
        self._addresses = self._lie_at()
        # References to each static tensor while nobody else has it: the same for one that takes its place.
        self._references = self._referred()
        # How many tensors lie on each one's memory, which stays where it is; and how many when they were fewest: then none was the script's.
        self._storages = [memory.untyped_storage()._cdata for memory in self._memory]
        self._fewest = self._lying()
        device = next((p.device for p in parameters), None)
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.watched: bool | None = None
        self._tried = 0  # forwards

    def _paired(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        return [(p, g) for p, g in zip(self._parameters, self._static, strict=True) if g is not None]

    def _lie_at(self) -> list[int]:
        return [static.data_ptr() for _, static in self._pairs]

    def _referred(self) -> list[int]:
        return [sys.getrefcount(static) for _, static in self._pairs]

    def _lying(self) -> list[int]:
        return list(map(torch._C._storage_Use_Count, self._storages))

    def replay(self, backward: Callable[[], None]) -> list[torch.Tensor | None]:
        """Run the captured backward. Gives each parameter's gradient: the static tensor, or a copy where others lie on its memory."""
        before = self.keep()
        backward()
        found = list(self._static)
        for place, value in before.items():
            static = self._static[place]
            assert static is not None
            found[place] = static.clone()
            static.copy_(value)
        return found

    @torch.no_grad()
    def keep(self) -> dict[int, torch.Tensor]:
        """Move every gradient of an earlier replay out of the static memory, which is about to be overwritten, if somebody has it still.

        In `.grad` it is to be added to; or the script keeps it, past `zero_grad`. That is told by references to the tensor itself.

        Returns:
            Copies, by place, of what cannot be moved: it is seen through other tensors too.
        """
        addresses = self._lie_at()
        if addresses != self._addresses:
            self._renew(i for i, address in enumerate(addresses) if address != self._addresses[i])
        referred, lying = self._referred(), self._lying()
        grads = [parameter.grad for parameter, _ in self._pairs]
        if referred == self._references and lying == self._fewest and grads.count(None) == len(grads):
            return {}  # as in most steps, which this is to cost 30 µs (161 parameters)
        kept = list(map(operator.gt, referred, self._references))
        over = []  # pairs whose `.grad` is a tensor of its own over that memory: autograd has put it there
        for i, ((_, static), grad) in enumerate(zip(self._pairs, grads, strict=True)):
            if grad is static:
                kept[i] = True
            elif grad is not None and grad.data_ptr() == static.data_ptr():
                over.append((i, grad))
        if over:
            more = Counter(self._storages[i] for i, _ in over)
            lying = [count - more[storage] for count, storage in zip(lying, self._storages, strict=True)]
        self._fewest = list(map(min, lying, self._fewest))
        shared = list(map(operator.gt, lying, self._fewest))
        _move([grad for i, grad in over if not shared[i]])
        if not any(kept) and not any(shared):
            return {}
        moving = [i for i, (moves, stays) in enumerate(zip(kept, shared, strict=True)) if moves and not stays]
        _move([self._pairs[i][1] for i in moving])
        self._renew(moving)
        return {i: g.clone() for i, (_, g), stays in zip(self._places, self._pairs, shared, strict=True) if stays}

    def _renew(self, indices: Iterable[int]) -> None:
        """Of these pairs, the static tensors have other memory and are the script's now: new ones take their places."""
        for i in indices:
            self._static[self._places[i]] = self._memory[i].detach()
        self._pairs = self._paired()

    def direct(self) -> bool:
        """Before a forward: whether it goes without edges to the parameters."""
        if self.watched is None and self._tried and (self._tried - 1) % ASKED_EVERY == 0:
            if not any(_accumulator_is_held(parameter) for parameter, _ in self._pairs):
                self.watched = False
            elif self._tried > PATIENCE:
                self.watched = True
        self._tried += 1
        return not self.watched and not self._hooked()

    def _hooked(self) -> bool:
        return any(p._backward_hooks or p._post_accumulate_grad_hooks for p, _ in self._pairs)

    def accumulate(self, found: Sequence[torch.Tensor | None]) -> None:
        """After a replay, inside a backward: what AccumulateGrad does with every gradient that was found."""
        given = [(p, g) for p, g in zip(self._parameters, found, strict=True) if g is not None and p.requires_grad]
        if self.watched is None or self._hooked():  # hooks that have come since the forward
            torch.autograd.backward([p for p, _ in given], [g.clone() for _, g in given])
            return
        present, added = [], []
        for parameter, gradient in given:
            grad = parameter.grad
            if grad is None:
                parameter.grad = gradient
            else:
                present.append(grad)
                added.append(gradient)
        if present:
            with torch.no_grad():
                torch._foreach_add_(present, added)


def _move(tensors: list[torch.Tensor]) -> None:
    """Give these tensors memory of their own, with what they hold: a script that zeroes its gradients in place has all of them moved in
    each step, and a copy for each would be as many launches."""
    if tensors:
        own = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(own, tensors)
        for tensor, memory in zip(tensors, own, strict=True):
            tensor.data = memory


def _accumulator_is_held(parameter: torch.Tensor) -> bool:
    """Whether a reference to the parameter's AccumulateGrad exists: only then a mark on it is there at a second look."""
    first: Any = get_gradient_edge(parameter).node
    first.metadata[_MARK] = True
    del first
    second: Any = get_gradient_edge(parameter).node
    return _MARK in second.metadata


def is_whole_backward(ctx: Any) -> bool:
    """Inside a function's backward: whether the running backward accumulates into every leaf, as into the last input, the anchor.

    Not where only some gradients were asked for (`autograd.grad`, `inputs=`).
    """
    return bool(torch._C._will_engine_execute_node(ctx.next_functions[-1][0]))


def own_memory(
    gradients: Iterable[torch.Tensor | None], parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients, each with its parameter's strides and dtype, and none in the memory of another or of `others`: copied where
    it is not so. Several may lie beside each other in one allocation, as a norm's weight's and bias's do."""
    taken = [_extent(t) for t in others if t is not None]
    found: list[torch.Tensor | None] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is None:
            found.append(None)
            continue
        own = gradient.detach()
        first, end = _extent(own)
        alike = own.stride() == parameter.stride() and own.dtype == parameter.dtype
        if not alike or any(first < other_end and other < end for other, other_end in taken):
            own = torch.empty_like(parameter).copy_(own)
        taken.append(_extent(own))
        found.append(own)
    return found


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor lies between."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (elements * tensor.element_size() if tensor.numel() else 0)


def serve_partial_backwards(
    undo: Undo, node_type: type, replay: Callable[[Any, Sequence[Any], bool], Sequence[torch.Tensor | None]]
) -> None:
    """`autograd.grad` and `backward(inputs=…)` find gradients of parameters to which there is no edge.

    Args:
        node_type: of the autograd nodes that stand for a replay, while they have no edges to their parameters an attribute
            `direct` that is true, and `parameters` with all of these by id.
        replay: `replay(node, gradients, retain)`: run the node's backward with these gradients of its outputs (None: zero); gives those of its
            parameters, in the order of `parameters`.
    """
    original = getattr(torch.autograd, _ENGINE)

    def run(
        outputs: Any, gradients: Any, retain: bool, create: bool, inputs: tuple[Any, ...], *rest: Any, **named: Any
    ) -> Any:
        if not inputs:
            return original(outputs, gradients, retain, create, inputs, *rest, **named)
        asked = {id(tensor) for tensor in inputs}
        nodes = [n for n in _nodes(outputs, node_type) if not asked.isdisjoint(n.parameters)]
        if not nodes:
            return original(outputs, gradients, retain, create, inputs, *rest, **named)
        if create:
            raise RuntimeError("parameters of a CUDA graph have no second derivatives: leave out cuda_graphs")
        edges = [GradientEdge(node, i) for node in nodes for i in range(node.outputs)]
        found = original(outputs, gradients, True, False, (*inputs, *edges), True, accumulate_grad=False)
        result, rest_of = list(found[: len(inputs)]), iter(found[len(inputs) :])
        for node in nodes:
            of = replay(node, [next(rest_of) for _ in range(node.outputs)], retain)
            for parameter, gradient in zip(node.parameters.values(), of, strict=True):
                for i, tensor in enumerate(inputs):
                    if tensor is parameter and gradient is not None:
                        result[i] = gradient.clone() if result[i] is None else result[i] + gradient
        if named.get("accumulate_grad"):
            for tensor, gradient in zip(inputs, result, strict=True):
                if gradient is not None:
                    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
            return None
        unreachable = rest[0] if rest else named.get("allow_unreachable", False)
        if not unreachable and any(gradient is None for gradient in result):
            return original(outputs, gradients, retain, create, inputs, *rest, **named)  # which says so
        return tuple(result)

    replace_attribute(undo, torch.autograd, _ENGINE, run)


def _nodes(outputs: Sequence[Any], node_type: type) -> Iterator[Any]:
    """The nodes of this type below these outputs, as far as they have no edges to their parameters."""
    waiting: list[Any] = [o.node if isinstance(o, GradientEdge) else o.grad_fn for o in outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found: Any = node
        if isinstance(node, node_type) and found.direct:
            yield found
        waiting += [below for below, _ in node.next_functions]
