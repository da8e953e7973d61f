"""Each of advisor's own operations in a captured graph by itself: its kernels against PyTorch's operations, on the same values.

Captured code calls no hooks, and from end to end half precision hides in a deep net what a kernel does wrong.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.utils import _pytree as pytree

from advisor.ops import dispatch, match
from advisor.ops.sites.install import OPERATION
from advisor.transforms.capture import CaptureLayer
from advisor.transforms.forward import CAPTURE, GRAPH, ForwardStack
from advisor.trials.numerics.layers import apart, bound
from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.precision import EPSILON
from advisor.trials.numerics.rerun import moved
from advisor.trials.numerics.seen import SeenCopies, into

_DRAWS = 2
# Their gradients add up in one tensor that all of them know: none is told by itself.
_TOGETHER = "advisor.ops.batchnorm_concat."


@dataclass(slots=True, eq=False)
class JudgedOperation:
    """One call of an operation: what went in (in the order of its leaves) and what came out and back."""

    place: str
    function: Callable[..., Any]
    given: list[Any]
    shape: pytree.TreeSpec
    autocast: tuple[bool, torch.dtype]
    outputs: list[Any] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # of outputs
    back: dict[int, torch.Tensor] = field(default_factory=dict)  # of what went in


@dataclass(slots=True, eq=False)
class _Window:
    """Which calls of operations one run notes: from `first` on, as many as have room."""

    first: int
    room: float  # bytes
    number: int = 0  # of the next call
    calls: list[JudgedOperation] = field(default_factory=list)
    held: int = 0

    def opens(self) -> bool:
        """Whether the next call is noted."""
        number, self.number = self.number, self.number + 1
        return number >= self.first and (not self.calls or self.held < self.room)

    def hold(self, values: Sequence[Any]) -> None:
        """Count what is copied of these, and of their gradients."""
        self.held += 2 * sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def observed(plain: PlainStep, room: float = math.inf) -> Iterator[list[JudgedOperation]]:
    """Run the call with what is on now, and note what the operations in its captured graphs do: nothing where there are none.

    `room`: bytes that copies may take. Where they would take more, the call runs again for what is left.
    """
    first = 0
    while True:
        window = _Window(first, room)
        _run(plain, window)
        yield window.calls
        first += len(window.calls)
        if first >= window.number:
            return


def _run(plain: PlainStep, window: _Window) -> None:
    modules = list(plain.call.root.module.modules())
    kind, copies = plain.saved.device.type, SeenCopies()

    def noted(graph: fx.GraphModule) -> Callable[..., Any]:
        return _Noting(graph, window, copies, kind).run

    with contextlib.ExitStack() as inside:
        inside.enter_context(ForwardStack.without(modules, GRAPH))
        for layer in _captures(modules):
            inside.enter_context(layer.running(noted))
        plain.again(lift=plain.lift, rolled=True)


def wrong(plain: PlainStep, calls: Sequence[JudgedOperation]) -> tuple[float, str]:
    """(error over its bound, what and where) of the result that is farthest off."""
    worst = (0.0, "")
    for call in calls:
        for name, ratio in _judged(plain, call).items():
            worst = max(worst, (ratio, f"{name} of {call.function.__name__} at {call.place}"))
    return worst


@contextlib.contextmanager
def by_pytorch(plain: PlainStep) -> Iterator[None]:
    """Inside, captured graphs run with PyTorch's operations in the place of advisor's, and none is replayed."""
    modules = list(plain.call.root.module.modules())
    with contextlib.ExitStack() as inside:
        inside.enter_context(ForwardStack.without(modules, GRAPH))
        for layer in _captures(modules):
            inside.enter_context(layer.running(lambda graph: ByPyTorch(graph).run))
        inside.enter_context(dispatch.nothing())
        yield


def _captures(modules: Sequence[torch.nn.Module]) -> list[CaptureLayer]:
    return [layer for m in modules if isinstance(layer := ForwardStack.of(m).get(CAPTURE), CaptureLayer)]


class Interpreter(fx.Interpreter):
    """Runs a rewritten graph; no autocast that it enters outlasts it."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.entered: list[Any] = []
        try:
            return super().run(*args, **kwargs)
        except BaseException:
            for mode in reversed(self.entered):  # else it would stay in force for all that comes
                _exit_autocast(mode)
            raise

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.target is _enter_autocast:
            self.entered.append(result)
        elif node.target is _exit_autocast:
            self.entered.pop()
        return result


class ByPyTorch(Interpreter):
    """Runs a rewritten graph with the functions that its operations stand for."""

    def run_node(self, node: fx.Node) -> Any:
        function, names = node.meta.get(OPERATION, (None, ()))
        if function is None:
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        plainly = dict(zip(names, args[len(args) - len(names) :], strict=True))
        return function(*args[: len(args) - len(names)], **kwargs, **plainly)


class _Noting(Interpreter):
    """Runs a rewritten graph, and notes what its own operations are given and give."""

    def __init__(self, graph: fx.GraphModule, window: _Window, copies: SeenCopies, kind: str) -> None:
        super().__init__(graph)
        self.window, self.copies, self.kind = window, copies, kind

    def run_node(self, node: fx.Node) -> Any:
        function, names = node.meta.get(OPERATION, (None, ()))
        if function is None or function.__module__.startswith(_TOGETHER) or not self.window.opens():
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        plainly = dict(zip(names, args[len(args) - len(names) :], strict=True))
        leaves, shape = pytree.tree_flatten((args[: len(args) - len(names)], {**kwargs, **plainly}))
        autocast = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)
        call = JudgedOperation(match.path(node), function, [self.copies.of(leaf) for leaf in leaves], shape, autocast)
        self.window.calls.append(call)
        self.window.hold(leaves)
        leaves = [self._aliased(leaf, call.back, place) for place, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, shape)
        result = node.target(*args, *(kwargs.pop(name) for name in names), **kwargs)  # type: ignore[operator]  # a function, for a node that calls one
        outputs = listed(result)
        self.window.hold(outputs)
        twice = {
            id(output) for place, output in enumerate(outputs) if any(output is other for other in outputs[:place])
        }
        for place, output in enumerate(outputs):
            call.outputs.append(self.copies.of(output))
            if isinstance(output, torch.Tensor) and output.requires_grad:
                if id(output) in twice:  # each has a gradient of its own
                    outputs[place] = output.view_as(output)
                outputs[place].register_hook(into(call.gradients, place))
        return tuple(outputs) if twice else result

    def _aliased(self, value: Any, back: dict[int, torch.Tensor], place: int) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        alias = value.view_as(value)  # its gradient is this operation's alone
        alias.register_hook(into(back, place))
        return alias


def _judged(plain: PlainStep, call: JudgedOperation) -> dict[str, float]:
    """By result its error over the bound."""
    base = _by_pytorch(plain, call, 0)
    found = {f"output {place}": value for place, value in enumerate(call.outputs)}
    found |= {f"gradient of its input {place}": value for place, value in call.back.items()}
    # What only kernels leave to others (moments) is told by those.
    base = {n: value for n, value in base.items() if n in found and found[n].shape == value.shape}
    found = {name: found[name] for name in base}
    noise = [apart(_by_pytorch(plain, call, seed), base) for seed in range(1, _DRAWS + 1)]
    ratios = {}
    for name, one in apart(found, base).items():
        noisy = max(draw[name].error for draw in noise)
        ratios[name] = one.error / bound(name, plain.target_class, noisy, base[name].numel())
    return ratios


def _by_pytorch(plain: PlainStep, call: JudgedOperation, seed: int) -> dict[str, torch.Tensor]:
    """What PyTorch's operations give for the same; with a seed, from values that are moved by one rounding each."""
    kind, (enabled, dtype) = plain.saved.device.type, call.autocast
    leaves = list(_leaves(plain, call, seed))
    args, kwargs = pytree.tree_unflatten(leaves, call.shape)
    with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled), dispatch.nothing():
        outputs = list(enumerate(listed(call.function(*args, **kwargs))))
    tensors = [(place, output) for place, output in outputs if isinstance(output, torch.Tensor)]
    wanted = [(o, call.gradients[p].to(o.dtype)) for p, o in tensors if o.requires_grad and p in call.gradients]
    if wanted:
        torch.autograd.backward([output for output, _ in wanted], [gradient for _, gradient in wanted])
    results = {f"output {place}": output.detach() for place, output in tensors}
    for place in call.back:
        gradient = leaves[place].grad
        results[f"gradient of its input {place}"] = torch.zeros_like(leaves[place]) if gradient is None else gradient
    return results


def _leaves(plain: PlainStep, call: JudgedOperation, seed: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    for place, value in enumerate(call.given):
        if not isinstance(value, torch.Tensor):
            yield value
            continue
        there = moved(plain.laid_out(value), EPSILON[plain.target_class] if seed else 0.0, generator)
        yield there.detach().clone().requires_grad_(place in call.back)


def listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
