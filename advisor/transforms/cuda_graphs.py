"""CUDA graphs around each root's forward and backward: two launches a step in place of hundreds.

Wins when the host cannot launch as fast as the device runs (small images, small batches); at large batches it gains a few
per cent. Loss, optimizer and everything else stay eager. Forward and backward are captured once for each input
signature; any call that the graph does not fit (evaluation, no gradients, another shape, a second forward before the
backward of the first) runs eagerly.

What is guarded, because published implementations go wrong there: gradients that alias the graph's static buffers are
cloned before they would be accumulated into (pytorch#181723), and no forward writes to them; outputs and gradients of
inputs are cloned, so a kept one never changes later;
parameters and buffers that moved in memory, layers that were thawed or put to evaluation, and attributes that are others by now (a
dropout's rate, a norm's momentum, the name of a phase, a mask) invalidate the capture; modules with hooks are refused, since replays run
no Python. What the forward reads elsewhere (globals, the inside of an object) is not seen.
Gradients of parameters go past autograd's accumulation, which would cost the host more than all the rest (direct_gradients.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch.utils import _pytree as pytree

from advisor.core.errors import first_line
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.profiling.training import Training
from advisor.transforms import direct_gradients, tf32
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.beside import WeightGradientsBeside
from advisor.transforms.direct_gradients import ParameterGradients
from advisor.transforms.forward import GRAPH, ForwardStack, KeptLayers, hooks_of
from advisor.transforms.patch import all_or_nothing
from advisor.transforms.targets import data_parallel, targets

# Eager calls of a signature before it is captured: libraries create their handles and workspaces and cuDNN tunes in them.
_WARM_CALLS = 3
# A loop with more input signatures than this gains nothing from graphs and would fill the memory with their pools.
_MAX_SIGNATURES = 4
# A graph that an attribute of its module's outdates (a script that counts its steps there) within so many replays was not worth its capture;
# after so many such ones no other is made.
_WORTH_REPLAYS, _MOST_OUTDATED = 20, 3


class _InFlight:
    """Alive from a replayed forward until its backward has run, for the last time, or its autograd graph is dropped."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


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


def _leave_capture(device: torch.device) -> None:
    """After a capture that failed: the random generator still believes in it. An empty capture that succeeds tells it."""
    with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(1, device=device).zero_()
    torch.cuda.synchronize(device)


@contextmanager
def _tensors_stay(module: torch.nn.Module) -> Iterator[None]:
    """Around a capture, in which nothing is computed: what a forward has put into buffers' places, or other tensors' that modules have as
    attributes, is taken out again.

    Raises:
        RuntimeError: at the end, when there was such. Replays would go on from what was there at the capture, and what a forward leaves on
            its modules for the script would have no autograd graph behind it.
    """
    before = [(d, dict(d)) for m in module.modules() for d in (m._buffers, vars(m))]
    try:
        yield
    finally:
        replaced = [put for d, held in before if (put := _put_back(d, held))]
    if replaced:
        raise RuntimeError(
            f"the forward replaces tensors that its modules keep: {', '.join(sorted(set().union(*replaced)))}"
        )


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> set[str]:
    """Make tensors of `now` those of `before`; the names of those that were others."""
    gone = object()
    names = {n for n in (*now, *before) if now.get(n, gone) is not before.get(n, gone)}
    names = {n for n in names if isinstance(now.get(n), torch.Tensor) or isinstance(before.get(n), torch.Tensor)}
    for name in names:
        if name in before:
            now[name] = before[name]
        else:
            del now[name]
    return names


class _Layout:
    """What a module and those below it hold that a graph of its forward has frozen in, to be compared at each step: which tensors, where
    in memory; which parameters do not learn, for a script may thaw them later; hooks of those below; and attributes: numbers of a schedule
    (a dropout's or a norm's), or because a norm goes to evaluation, a phase's name, masks, lists.

    28 µs for 66 modules and 123 tensors on a core of an EPYC, where walking through `module.parameters()` and the like takes 138. By `is`,
    not by `id()`: that raises an audit event, and a library's hook on those (filelock has one, which torch imports) took 140 µs a step.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        held: list[Mapping[Any, Any]] = [d for m in modules for d in (m._modules, m._parameters, m._buffers)]
        held += [hooks for m in modules[1:] for hooks in hooks_of(m)]
        self._views = [d.values() for d in held]  # which follow what becomes of the dictionaries
        self._held = list(chain.from_iterable(self._views))
        self._attributes = list(map(vars, modules))
        own = [{n: v for n, v in d.items() if n not in _OF_EVERY_MODULE} for d in self._attributes]
        self._loose = [
            (d, n, v)
            for d, of in zip(self._attributes, own, strict=True)
            for n, v in of.items()
            if isinstance(v, torch.Tensor)
        ]
        self._tensors = [t for t in (*self._held, *(t for *_, t in self._loose)) if isinstance(t, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        others = [[n for n, v in of.items() if not isinstance(v, torch.Tensor)] for of in own]
        self._values = [(operator.itemgetter(*n), d) for n, d in zip(others, self._attributes, strict=True) if n]
        self._known = [_copied(read(d)) for read, d in self._values]
        self._counts = list(map(len, self._attributes))
        self._not_learning = [p for p in module.parameters() if not p.requires_grad]

    def changed(self) -> bool:
        """Whether something was put in, taken out, moved or thawed since, or an attribute is another."""
        now = list(chain.from_iterable(self._views))
        same = len(now) == len(self._held) and all(map(operator.is_, now, self._held))
        return (
            not same
            or list(map(torch.Tensor.data_ptr, self._tensors)) != self._addresses
            or not self.same_attributes()
            or any(p.requires_grad for p in self._not_learning)
        )

    def same_attributes(self) -> bool:
        """Whether modules keep the attributes that they had."""
        try:
            return (
                list(map(len, self._attributes)) == self._counts
                and all(d[name] is tensor for d, name, tensor in self._loose)
                and [read(d) for read, d in self._values] == self._known
            )
        except Exception:  # one is gone, or a tensor by now, or of a class that cannot be compared
            return False


# What `torch.nn.Module` itself keeps, but for whether it trains.
_OF_EVERY_MODULE = vars(torch.nn.Module()).keys() - {"training"}


def _copied(values: Any) -> Any:
    """Attributes as they are now: of lists, dictionaries and sets what they hold."""
    if isinstance(values, tuple):
        return tuple(copy.copy(v) if type(v) in (list, dict, set) else v for v in values)
    return copy.copy(values) if type(values) in (list, dict, set) else values


def _free_bytes(segments: Iterable[Mapping[str, Any]], pools: Collection[tuple[int, int]]) -> int:
    """What the allocator has in these pools and counts as free, of `torch.cuda.memory_snapshot()`."""
    own = (segment for segment in segments if tuple(segment["segment_pool_id"]) in pools)
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


class _Captured:
    """One captured forward and backward, with the static tensors that they read and write."""

    def __init__(
        self, inner: Callable[..., Any], module: torch.nn.Module, args: tuple[Any, ...], *, beside: bool
    ) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.inputs = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)
        self.in_flight: ReferenceType[_InFlight] | None = None
        self.replays = self.replays_before = 0
        device = self.inputs[0].device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # A cast cached before the capture would be frozen into the graph, and one cached in it lies in the graph's memory. The
        # cache is emptied, not switched off: that flag is a guard of Dynamo's, and the forward would be traced once more.
        torch.clear_autocast_cache()
        try:
            torch.cuda.synchronize(device)
            with _tensors_stay(module), _aliased_parameters(module) as leaves:
                # thread_local: a loader's pinning thread may allocate while we capture
                with torch.cuda.graph(self.forward, stream=stream, capture_error_mode="thread_local"):
                    output = inner(*self.inputs)
                flat, self.structure = pytree.tree_flatten(output)
                if not all(isinstance(o, torch.Tensor) for o in flat):
                    raise TypeError("the module returns values that are no tensors")
                self.differentiable = [o.requires_grad for o in flat]
                wanted = [o for o in flat if o.requires_grad]
                self.output_grads = [torch.empty_like(o) for o in wanted]
                sources = [*(a for a in self.inputs if a.requires_grad), *(leaves[id(p)] for p in self.parameters)]
                # A memory pool of its own: in the forward's, gradients would take the place of activations that backward
                # is done with, and the next forward would write over a `.grad` that is still being accumulated.
                with torch.cuda.graph(self.backward, stream=stream, capture_error_mode="thread_local"):
                    side = WeightGradientsBeside(device) if beside else None
                    with side or contextlib.nullcontext():
                        gradients = torch.autograd.grad(
                            wanted, sources, self.output_grads, only_inputs=True, allow_unused=True
                        )
                    self.moved = side.moved if side is not None else 0
                    arrived = iter(gradients)
                    self.input_grads = [next(arrived) if a.requires_grad else None for a in self.inputs]
                    others = (*self.inputs, *self.output_grads, *self.input_grads)
                    parameter_grads = direct_gradients.own_memory(arrived, self.parameters, others)
        except BaseException:
            _leave_capture(device)
            raise
        finally:
            torch.clear_autocast_cache()
        self.outputs = [o.detach() for o in flat]  # the autograd graph itself may go: the replay is the backward now
        self.gradients = ParameterGradients(self.parameters, parameter_grads)
        self.by_id = {id(p): p for p in self.parameters}
        self.layout = _Layout(module)  # behind the capture, in which a forward may have counted its calls
        del flat, output, wanted, sources, gradients, arrived, leaves  # the replays have what these took
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        self.hidden_bytes = _free_bytes(segments, {self.forward.pool(), self.backward.pool()})
        _all.add(self)

    def busy(self) -> bool:
        """True while an earlier forward waits for its backward: its activations must not be overwritten."""
        token = self.in_flight() if self.in_flight is not None else None
        return token is not None and not token.done

    def replay_backward(self, arrived: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The backward with these gradients of the outputs, where None is zero; gives those of the parameters."""
        for static, real in zip(self.output_grads, arrived, strict=True):
            if real is None:
                static.zero_()
            else:
                static.copy_(real)
        return self.gradients.replay(self.backward.replay)


class _Replay(torch.autograd.Function):
    """`direct`: in the parameters' place stands one leaf, and their gradients go past autograd."""

    @staticmethod
    def forward(ctx: Any, captured: _Captured, direct: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for static, real in zip(captured.inputs, tensors, strict=False):
            static.data.copy_(real)
        captured.forward.replay()
        captured.replays += 1
        token = _InFlight()
        captured.in_flight = ref(token)
        ctx.captured, ctx.token, ctx.direct = captured, token, direct
        ctx.parameters, ctx.outputs = captured.by_id, len(captured.outputs)
        outputs = tuple(o.clone() for o in captured.outputs)
        ctx.mark_non_differentiable(
            *(o for o, wanted in zip(outputs, captured.differentiable, strict=True) if not wanted)
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        captured: _Captured = ctx.captured
        found = _replay_backward(ctx, gradients, torch._C._autograd._get_current_graph_task_keep_graph())
        inputs = (None if g is None else g.clone() for g in captured.input_grads)  # the script may keep them
        if not ctx.direct:
            return (None, None, *inputs, *(None if g is None else g.detach() for g in found))
        if direct_gradients.is_whole_backward(ctx):
            captured.gradients.accumulate(found)
        return (None, None, *inputs, None)


def _replay_backward(ctx: Any, gradients: Sequence[torch.Tensor | None], retain: bool) -> list[torch.Tensor | None]:
    """The parameters' gradients. `retain`: whether the script may run it once more, so that what it reads must stay."""
    captured: _Captured = ctx.captured
    arrived = [g for g, wanted in zip(gradients, captured.differentiable, strict=True) if wanted]
    found = captured.replay_backward(arrived)
    ctx.token.done = not retain
    return found


class GraphedForward:
    """What stands for one inner forward: replays where a captured graph fits, else the inner forward itself.

    Args:
        beside: weight gradients are captured on a stream of their own.
    """

    def __init__(self, inner: Callable[..., Any], module: torch.nn.Module, *, beside: bool) -> None:
        self.inner = inner
        self.beside = beside
        self.module = ref(module)
        self.captured: dict[Any, _Captured] = {}
        self.failed: dict[Any, str] = {}
        self.calls: dict[Any, int] = {}
        self.outdated: Counter[Any] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        if (
            _paused
            or module is None
            or kwargs
            or not module.training
            or not torch.is_grad_enabled()
            or not args
            or not all(isinstance(a, torch.Tensor) and a.is_cuda for a in args)
            or torch.cuda.is_current_stream_capturing()
        ):
            return self.inner(*args, **kwargs)
        key = _signature(args)
        captured = self.captured.get(key)
        if captured is not None and captured.layout.changed():
            self._drop(key)
            captured = None
        if captured is None:
            calls = self.calls[key] = self.calls.get(key, 0) + 1
            if key in self.failed or calls <= _WARM_CALLS or len(self.captured) >= _MAX_SIGNATURES:
                return self.inner(*args)
            if reason := _unfit(module):  # hooks that came later
                self.failed[key] = reason
                return self.inner(*args)
            try:
                captured = self.captured[key] = _Captured(self.inner, module, args, beside=self.beside)
            except Exception as error:
                self.failed[key] = first_line(error)
                return self.inner(*args)
        if captured.busy():
            return self.inner(*args)
        direct = self._direct(captured, args[0].device)
        leaves = [captured.gradients.anchor] if direct else captured.parameters
        outputs = _Replay.apply(captured, direct, *args, *leaves)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(outputs), captured.structure)

    def _drop(self, key: Any) -> None:
        """The captured graph is of a module that is another by now. What is new in it is warmed up like the first."""
        captured = self.captured.pop(key)
        self.calls[key] = 0
        if captured.replays < _WORTH_REPLAYS and not captured.layout.same_attributes():
            self.outdated[key] += 1
            if self.outdated[key] >= _MOST_OUTDATED:
                self.failed[key] = "an attribute of its modules changes every few steps"

    def _direct(self, captured: _Captured, device: torch.device) -> bool:
        """Whether gradients may go past autograd.

        On another stream than that of the parameters their edges are what makes the one wait for the other.
        """
        return (
            _serving > 0
            and torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
            and any(p.requires_grad for p in captured.parameters)
            and captured.gradients.direct()
        )

    def free(self) -> None:
        """Give the graphs' memory back. A gradient that lies in a graph's pool is moved out first."""
        for captured in self.captured.values():
            captured.gradients.keep()
        self.captured.clear()


def _signature(args: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """What a captured graph has frozen in: inputs, and the flags by which libraries choose their kernels."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        tf32.settings(),
        *((a.shape, a.dtype, a.stride(), a.requires_grad) for a in args),
    )


class GraphLayer:
    """A layer for ForwardStack: one GraphedForward for each different forward below it. `beside`: as there."""

    def __init__(self, beside: bool) -> None:
        self.beside = beside
        self.forwards: WeakSet[GraphedForward] = WeakSet()  # alive as long as the stack remembers the composition

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        forward = GraphedForward(inner, module, beside=self.beside)
        self.forwards.add(forward)
        return forward

    @property
    def replays(self) -> int:
        """Forward replays so far."""
        return sum(captured.replays for forward in self.forwards for captured in forward.captured.values())

    @property
    def moved(self) -> int:
        """Weight gradients on a stream of their own, in all captures."""
        return sum(captured.moved for forward in self.forwards for captured in forward.captured.values())

    @property
    def failures(self) -> list[str]:
        """Why captures failed."""
        return [reason for forward in self.forwards for reason in forward.failed.values()]

    def free(self) -> None:
        """Give the memory of all graphs back."""
        for forward in self.forwards:
            forward.free()


_serving = 0  # how many applications want `autograd.grad` and its like to find what has no edges
_served = Undo()


def _serve(undo: Undo) -> None:
    global _serving
    if not _serving:
        direct_gradients.serve_partial_backwards(_served, _Replay._backward_cls, _replay_backward)
    _serving += 1

    def end() -> None:
        global _serving
        _serving -= 1
        if not _serving:
            _served.run()

    undo.push(end)


_paused = False


@contextmanager
def paused() -> Iterator[None]:
    """Forwards run eagerly meanwhile, captured or not: a trace then shows the operators, which a replay hides."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


_all: WeakSet[_Captured] = WeakSet()


def reset_peak_memory() -> None:
    """Begin to note which graphs are replayed, as `torch.cuda.reset_peak_memory_stats` begins to note what is allocated."""
    for captured in _all:
        captured.replays_before = captured.replays


def hidden_bytes() -> int:
    """What graphs that were replayed since keep to themselves beside all that `torch.cuda.max_memory_allocated` counts.

    Activations and workspaces of a replay lie in memory that the allocator took for free when the capture had ended.
    """
    return sum(captured.hidden_bytes for captured in _all if captured.replays > captured.replays_before)


_layers = KeptLayers(GRAPH, GraphLayer, GraphLayer.free)
current, release = _layers.current, _layers.release


def put_beside(modules: Iterable[torch.nn.Module]) -> Undo:
    """Capture the weight gradients of these modules, which are graphed, on a stream of their own."""

    def back(module: torch.nn.Module) -> None:
        if current(module) is not None:
            ForwardStack.of(module).set(GRAPH, _layers.of(module, False))

    with all_or_nothing() as undo:
        for module in modules:
            ForwardStack.of(module).set(GRAPH, _layers.of(module, True))
            undo.push(functools.partial(back, module))
    return undo


class CudaGraphs(Transform):
    """Graphed forward and backward of every root."""

    id = "cuda_graphs"
    traced = False  # replays are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="CUDA graphs need a CUDA GPU")
        if not training.fixed_shapes:
            return Match(applies=False, reason="input shapes change from step to step")
        fits, unfit = [], []
        for module in targets(training):
            reason = _unfit(module)
            (unfit.append(f"{type(module).__name__}: {reason}") if reason else fits.append(type(module).__name__))
        if not fits:
            return Match(applies=False, reason="; ".join(unfit) or "no module was seen", unmatched=tuple(unfit))
        return Match(applies=True, sites=tuple(fits), unmatched=tuple(unfit))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            if direct_gradients.available():
                _serve(undo)
            for module in targets(training):
                if _unfit(module):
                    continue
                stack = ForwardStack.of(module)
                stack.set(GRAPH, _layers.of(module, False))
                undo.push(lambda stack=stack: stack.clear(GRAPH))
        return undo

    def release(self, training: Training) -> None:
        release(targets(training))

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        replays, failed = 0, []
        for module in targets(training):
            layer = current(module)
            if layer is not None:
                replays += layer.replays
                failed += layer.failures
        if replays:
            return Check(passed=True, detail=f"graphs replayed {replays} times", numbers={"replays": replays})
        return Check(passed=False, detail="no graph was replayed" + (f" ({failed[0]})" if failed else ""))


def _unfit(module: torch.nn.Module) -> str:
    """Why this module cannot be graphed; empty when it can."""
    if isinstance(module, torch.nn.DataParallel):
        return "DataParallel does work of its own around the forward"
    if data_parallel(module):  # which hears neither of a replay nor of its gradients, and sends none
        return "DistributedDataParallel does work of its own around the forward"
    for path, child in module.named_modules():
        if path and any(hooks_of(child)):
            return f"{path} has hooks, which a replay would not run"
    if not any(p.requires_grad for p in module.parameters()):
        return "no parameter needs a gradient"
    return ""
