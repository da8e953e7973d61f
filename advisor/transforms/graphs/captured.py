"""One captured forward and backward, with the static tensors that they read and write."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, WeakSet

import torch
from torch.utils import _pytree as pytree

from advisor.transforms import direct_gradients
from advisor.transforms.beside import WeightGradientsBeside
from advisor.transforms.direct_gradients import ParameterGradients
from advisor.transforms.graphs import hooks
from advisor.transforms.graphs.arguments import Arguments
from advisor.transforms.graphs.host_values import HostValues
from advisor.transforms.graphs.layout import Layout, Place
from advisor.transforms.graphs.sending import Sending, SentBuckets

_CONSTANT = (type(None), bool, int, float, str)  # what an output may hold beside tensors


class InFlight:
    """Alive from a replayed forward until its backward has run, for the last time, or its autograd graph is dropped."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


def _constants(outputs: list[Any]) -> dict[int, Any]:
    """By position, what a forward returns beside tensors.

    Raises:
        TypeError: for what has to be made anew.
    """
    found = {i: o for i, o in enumerate(outputs) if not isinstance(o, torch.Tensor)}
    for constant in found.values():
        if not isinstance(constant, _CONSTANT):
            raise TypeError(f"it returns a {type(constant).__name__}, which no replay would make")
    return found


class Captured:
    """A graph of a module's forward, and one of its backward where something in it needs a gradient.

    Args:
        beside: weight gradients are captured on a stream of their own.
        host_values: what eager calls have brought from the host; `within`: into a forward that Dynamo captures.
        sending: how gradients go to the other ranks, inside the backward; None where they do not.

    Raises:
        Exception: what a capture cannot hold; nothing of it is left then.

    Attributes:
        parameters: those that learn; `leaves`: those of them to which a gradient comes.
        computed: attributes that hooks set in each forward. What they are set to follows the outputs in `outputs`.
        twice: whether the script has asked for a backward that can itself be differentiated, which no replay can.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        module: torch.nn.Module,
        arguments: Arguments,
        *,
        beside: bool,
        host_values: HostValues | None = None,
        within: bool = False,
        sending: Sending | None = None,
    ) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.inputs = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in arguments.tensors)
        self.in_flight: ReferenceType[InFlight] | None = None
        self.replays = self.replays_before = self.moved = 0
        self.twice = False
        device = self.inputs[0].device
        stream, script = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(script)
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # A cast cached before the capture would be frozen into the graph, and one cached in it lies in the graph's memory. The
        # cache is emptied, not switched off: that flag is a guard of Dynamo's, and the forward would be traced once more.
        torch.clear_autocast_cache()
        try:
            torch.cuda.synchronize(device)
            with tensors_stay(module) as stay, _aliased_parameters(module) as leaves:
                with (
                    no_host_chance(),
                    (host_values or HostValues()).standing(within=within),
                    # thread_local: a loader's pinning thread may allocate while we capture
                    torch.cuda.graph(self.forward, stream=stream, capture_error_mode="thread_local"),
                ):
                    args, kwargs = arguments.filled(self.inputs)
                    output = inner(*args, **kwargs)
                self.computed, made = stay.computed()
                flat, self.structure = pytree.tree_flatten(output)
                self.constants = _constants(flat)
                flat = [*(o for o in flat if isinstance(o, torch.Tensor)), *made]
                self.differentiable = [o.requires_grad for o in flat]
                wanted = [o for o in flat if o.requires_grad]
                self.output_grads = [torch.zeros_like(o) for o in wanted]
                self._zeros = [True] * len(wanted)
                sources = [*(a for a in self.inputs if a.requires_grad), *(leaves[id(p)] for p in self.parameters)]
                self.input_grads: list[torch.Tensor | None] = [None] * len(self.inputs)
                gradients: list[torch.Tensor | None] = [None] * len(self.parameters)
                if wanted:
                    gradients = self._capture_backward(stream, wanted, sources, beside, sending, leaves)
        except BaseException:
            _leave_capture(device, script)
            raise
        finally:
            torch.clear_autocast_cache()
        self.outputs = [o.detach() for o in flat]  # the autograd graph itself may go: the replay is the backward now
        self._finish(module, gradients)
        pools = {graph.pool() for graph, made_of in ((self.forward, flat), (self.backward, wanted)) if made_of}
        del flat, output, made, wanted, sources, leaves, stay  # the replays have what these took
        segments = torch.cuda.memory_snapshot()
        self.hidden_bytes = free_bytes(segments, pools)
        alive.add(self)

    def _finish(self, module: torch.nn.Module, gradients: list[torch.Tensor | None]) -> None:
        """What is known once all is captured."""
        self.places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        self.leaves = [self.parameters[i] for i in self.places]
        self.gradients = ParameterGradients(self.parameters, gradients)
        self.by_id = {id(p): p for p in self.parameters}
        self.layout = Layout(module, self.computed)  # behind the capture, in which a forward may have counted its calls

    def _capture_backward(
        self,
        stream: Any,
        wanted: list[torch.Tensor],
        sources: list[torch.Tensor],
        beside: bool,
        sending: Sending | None,
        leaves: Mapping[int, torch.nn.Parameter],
    ) -> list[torch.Tensor | None]:
        """The backward, which gives the parameters' gradients; those of inputs are `input_grads`."""
        # A memory pool of its own: in the forward's, gradients would take the place of activations that backward
        # is done with, and the next forward would write over a `.grad` that is still being accumulated.
        with torch.cuda.graph(self.backward, stream=stream, capture_error_mode="thread_local"):
            # What is sent is sent from this stream, as soon as it is there.
            side = WeightGradientsBeside(self.inputs[0].device) if beside and sending is None else None
            sums = SentBuckets(sending, leaves) if sending is not None else None
            with side or contextlib.nullcontext(), sums.listening() if sums is not None else contextlib.nullcontext():
                found = torch.autograd.grad(wanted, sources, self.output_grads, only_inputs=True, allow_unused=True)
            self.moved = side.moved if side is not None else 0
            arrived: Iterator[torch.Tensor | None] = iter(found)
            self.input_grads = [next(arrived) if a.requires_grad else None for a in self.inputs]
            if sums is not None:
                arrived = iter(sums.end(self.parameters))
            others = (*self.inputs, *self.output_grads, *self.input_grads)
            # Inside the capture: a gradient of other strides than its parameter's is copied in each replay.
            # Nobody else has what this list holds: by its references it is told later what the script keeps.
            return direct_gradients.own_memory(arrived, self.parameters, others)

    def fits_once_more(self) -> bool:
        """Whether the device has memory for another graph like this one, and as much again."""
        device = self.inputs[0].device
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept > 2 * self.hidden_bytes

    def busy(self) -> bool:
        """True while an earlier forward waits for its backward: its activations must not be overwritten."""
        token = self.in_flight() if self.in_flight is not None else None
        return token is not None and not token.done

    def output(self, tensors: Iterable[torch.Tensor]) -> Any:
        """What the forward returns, of the tensors of one replay; and what its hooks set is set."""
        found = list(tensors)
        for (attributes, name), value in zip(self.computed, found[len(found) - len(self.computed) :], strict=True):
            attributes[name] = value
        if not self.constants:
            return pytree.tree_unflatten(found[: len(found) - len(self.computed)], self.structure)
        given = iter(found)
        leaves = [self.constants[i] if i in self.constants else next(given) for i in range(self.structure.num_leaves)]
        return pytree.tree_unflatten(leaves, self.structure)

    def replay_backward(self, arrived: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The backward with these gradients of the outputs, where None is zero; gives those of the parameters."""
        for i, (static, real) in enumerate(zip(self.output_grads, arrived, strict=True)):
            if real is not None:
                static.copy_(real)
            elif not self._zeros[i]:
                static.zero_()
            self._zeros[i] = real is None
        return self.gradients.replay(self.backward.replay)


alive: WeakSet[Captured] = WeakSet()
"""All captured graphs."""


@contextmanager
def _aliased_parameters(module: torch.nn.Module) -> Iterator[dict[int, torch.nn.Parameter]]:
    """The module's parameters replaced, for a while, by new leaves on the same memory; yields id(original) → leaf.

    The autograd engine joins a leaf's own stream at the end of a backward. That stream is the script's as long as an earlier
    loss is alive, and joining it would break the capture. New leaves belong to the capturing stream.
    """
    leaves: dict[int, torch.nn.Parameter] = {}
    slots: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.requires_grad:
                leaves.setdefault(id(parameter), torch.nn.Parameter(parameter.detach()))
                slots.append((child._parameters, name, parameter))
    try:
        for owner, name, parameter in slots:
            owner[name] = leaves[id(parameter)]
        yield leaves
    finally:
        for owner, name, parameter in slots:
            owner[name] = parameter


def _leave_capture(device: torch.device, script: torch.cuda.Stream) -> None:
    """After a capture that failed: the random generator still believes in it. An empty capture that succeeds tells it.

    `torch.cuda.graph` leaves its stream current where the end of a capture raises too: the script's is put back.
    """
    torch.cuda.set_stream(script)
    with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(1, device=device).zero_()
    torch.cuda.set_stream(script)
    torch.cuda.synchronize(device)


@contextmanager
def no_host_chance() -> Iterator[None]:
    """Around a capture, which would hold one draw for good.

    Raises:
        RuntimeError: at the end, when random numbers were drawn on the host.
    """
    numpy = sys.modules.get("numpy")

    def states() -> tuple[Any, ...]:
        drawn = numpy.random.get_state()[1:3] if numpy is not None else (b"", 0)
        return random.getstate(), bytes(drawn[0]), drawn[1], bytes(torch.get_rng_state().numpy())

    before = states()
    yield
    if states() != before:
        raise RuntimeError("the forward draws random numbers on the host, and a replay would repeat them")


class _Kept:
    """The tensors that modules have as attributes and buffers, before a capture."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._before = [(d, dict(d)) for m in module.modules() for d in (m._buffers, vars(m))]
        self._hooked = [vars(m) for m in hooks.computing(module)]

    def computed(self) -> tuple[list[Place], list[torch.Tensor]]:
        """What hooks have set since, with the values; before these are put back."""
        places = [
            (d, name)
            for d, held in self._before
            if any(d is hooked for hooked in self._hooked)
            for name in sorted(_others(d, held))
            if isinstance(d.get(name), torch.Tensor)
        ]
        self._places = places
        return places, [value for d, name in places if isinstance(value := d[name], torch.Tensor)]

    def put_back(self) -> set[str]:
        """Make all tensors those that they were; the names of others than `computed` ones that were replaced."""
        computed = {(id(d), name) for d, name in getattr(self, "_places", ())}
        replaced: set[str] = set()
        for d, held in self._before:
            replaced |= {name for name in _put_back(d, held) if (id(d), name) not in computed}
        return replaced


@contextmanager
def tensors_stay(module: torch.nn.Module) -> Iterator[_Kept]:
    """Around a capture, in which nothing is computed: what a forward has put into buffers' places, or other tensors' that modules have as
    attributes, is taken out again.

    Raises:
        RuntimeError: at the end, when there was such, but for what hooks compute. Replays would go on from what was there at the capture,
            and what a forward leaves on its modules for the script would have no autograd graph behind it.
    """
    kept = _Kept(module)
    try:
        yield kept
    finally:
        replaced = kept.put_back()
    if replaced:
        raise RuntimeError(f"the forward replaces tensors that its modules keep: {', '.join(sorted(replaced))}")


def _others(now: dict[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Names under which `now` has another tensor."""
    gone = object()
    names = {n for n in (*now, *before) if now.get(n, gone) is not before.get(n, gone)}
    return {n for n in names if isinstance(now.get(n), torch.Tensor) or isinstance(before.get(n), torch.Tensor)}


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Make tensors of `now` those of `before`; the names of those that were others."""
    names = _others(now, before)
    for name in names:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return names


def free_bytes(segments: Iterable[Mapping[str, Any]], pools: Collection[tuple[int, int]]) -> int:
    """What the allocator has in these pools and counts as free, of `torch.cuda.memory_snapshot()`."""
    own = (segment for segment in segments if tuple(segment["segment_pool_id"]) in pools)
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def reset_peak_memory() -> None:
    """Begin to note which graphs are replayed, as `torch.cuda.reset_peak_memory_stats` begins to note what is allocated."""
    for captured in alive:
        captured.replays_before = captured.replays


def hidden_bytes() -> int:
    """What graphs that were replayed since keep to themselves beside all that `torch.cuda.max_memory_allocated` counts.

    Activations and workspaces of a replay lie in memory that the allocator took for free when the capture had ended.
    """
    return sum(captured.hidden_bytes for captured in alive if captured.replays > captured.replays_before)
