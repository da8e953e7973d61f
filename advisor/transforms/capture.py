"""One Dynamo capture a root module, shared by the transforms that want one: kernel families, torch.compile, or both.

Capturing is what takes long (2 to 5 s for an EfficientNet, of which its rewrites are a tenth), and every set of families starts from the same
graph. So what lies below is captured once, and that graph is rewritten for each set when it is first asked for. Only Inductor, which must see
the rewritten graph, has a capture of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import distributed, fx

from advisor.loop.attach import Attached
from advisor.loop.training import Training
from advisor.ops import dynamo, match
from advisor.transforms import numpy_flags
from advisor.transforms.ahead.recording import Recording
from advisor.transforms.base import Undo
from advisor.transforms.forward import CAPTURE, CAPTURED, ForwardStack, KeptLayers, hooks_of
from advisor.transforms.graphs import host_values
from advisor.transforms.patch import all_or_nothing, target_of

# Dynamo keeps at most this many versions of one code object before it silently runs eagerly. Trials switch layers below
# the capture, each combination a version of the same code, and torch's default of 8 is soon used up.
_RECOMPILE_LIMIT = 128


@dataclass(eq=False)
class CaptureLayer:
    """A layer for ForwardStack: captured in training, the inner forward as it is in evaluation."""

    families: frozenset[str]  # kernel families whose operations are put in, and weight_casts.ID
    mode: str | Recording | None  # torch.compile's mode, or its graphs are recorded; None for eager
    reports: dict[str, match.MatchReport] = field(init=False)  # by family
    _rewritten: WeakKeyDictionary[fx.GraphModule, Callable[..., Any]] = field(init=False)  # by the graph as captured

    def __post_init__(self) -> None:
        self.reports = {family: match.MatchReport() for family in sorted(self.families)}
        self._rewritten = WeakKeyDictionary()

    @property
    def graphs(self) -> int:
        """Graphs captured so far, as far as a rewrite has seen them; 1 where none looks."""
        return max((report.graphs for report in self.reports.values()), default=1)

    def rewritten(self, graph: fx.GraphModule) -> Callable[..., Any]:
        """What runs in the place of a captured graph, which stays as it is."""
        run = self._rewritten.get(graph)
        if run is None:
            run = self._rewritten[graph] = dynamo.backend(self.reports, mode=None)(dynamo.twin(graph), ())
        return run

    @contextlib.contextmanager
    def running(self, how: Callable[[fx.GraphModule], Callable[..., Any]]) -> Iterator[None]:
        """Inside, graphs that are rewritten by now run as `how` makes them run, in place of their own forward."""
        before = dict(self._rewritten)
        self._rewritten.update({graph: how(cast(Any, run).__self__) for graph, run in before.items()})
        try:
            yield
        finally:
            self._rewritten.update(before)

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        shared = cast(_Captured, inner)  # `_install` puts it there
        plain = shared.inner
        captured: Callable[..., Any] = functools.partial(shared.run, self)
        if self.mode is not None:
            captured = _ByHooks(plain, module, self._compiling)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return plain(*args, **kwargs)
            with _unobserved():
                return captured(*args, **kwargs)

        return forward

    def _compiling(self) -> _Backend:
        if isinstance(self.mode, Recording):
            return dynamo.backend(self.reports, mode=self.mode.mode, instead=self.mode.keep)
        return dynamo.backend(self.reports, mode=self.mode)


_Backend = Callable[[fx.GraphModule, Any], Callable[..., Any]]


class _ByHooks:
    """A forward captured with the hooks that the modules below its own have then.

    Dynamo traces hooks in as they are, and by default does not look for them again: one registered later would never run. Its own guards
    on them take 1 µs a module and call. Here the numbers of all handles are compared with those at the capture: 4 µs a call for a
    ResNet-50 (151 modules) without hooks, 10 with one on each convolution, on a core of an EPYC.

    Where hooks have only gone (one that removes itself) the forward is captured anew. While there are new ones the plain forward runs, as
    long as they stay: a recorder every hundred steps is not worth two captures, and with one that fills a list Dynamo would capture each
    call. Not seen are a hook put into a module's dictionary under another's number, and a dictionary in another's place.
    """

    def __init__(self, inner: Callable[..., Any], module: torch.nn.Module, backend: Callable[[], _Backend]) -> None:
        self._inner, self._module, self._backend = inner, module, backend
        self._forward = inner
        self._hooks: tuple[int, ...] | None = None  # numbers of the handles of those that are captured
        self._dictionaries: list[dict[int, Any]] = [*_OF_EVERY_MODULE]
        self._look()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = tuple(chain.from_iterable(filter(None, self._dictionaries)))
        if hooks != self._hooks:
            if self._hooks is not None and not set(hooks) <= set(self._hooks):
                return self._inner(*args, **kwargs)
            self._hooks, self._forward = hooks, self._capture()
        return self._forward(*args, **kwargs)

    def _capture(self) -> Callable[..., Any]:
        """Dynamo finds what it has kept of a code by the backend: with another it captures anew."""
        return torch.compile(self._inner, backend=_telling(self._backend(), WeakMethod(self._look)), dynamic=False)

    def _look(self) -> None:
        """Find the dictionaries; those of new modules, which Dynamo's own guards see, at each graph, and what is in them is captured."""
        known = set(map(id, self._dictionaries))
        below = list(self._module.modules())[1:]
        came = [hooks for module in below for hooks in hooks_of(module) if id(hooks) not in known]
        self._dictionaries += came
        if self._hooks is not None:
            self._hooks += tuple(chain.from_iterable(came))


_OF_EVERY_MODULE = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_backward_hooks,
    torch.nn.modules.module._global_backward_pre_hooks,
)


def _telling(backend: _Backend, look: WeakMethod[Callable[[], None]]) -> _Backend:
    """`backend`, and `look` is called at each graph. Dynamo keeps the backend: it must not hold the module."""

    def compile_graph(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if (found := look()) is not None:
            found()
        return backend(graph_module, inputs)

    return compile_graph


@dataclass(slots=True, eq=False)
class _InForce:
    """Whose rewrite of the graphs runs. The code that Dynamo keeps holds this, and through it no module."""

    layer: CaptureLayer | None = None


class _Captured:
    """One capture of what lies below, `inner`, for all layers above; called itself, it is `inner`."""

    def __init__(self, inner: Callable[..., Any], module: torch.nn.Module) -> None:
        self.inner = inner
        in_force = self._in_force = _InForce()
        self._forward = _ByHooks(inner, module, lambda: _dispatching(in_force))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def run(self, layer: CaptureLayer, /, *args: Any, **kwargs: Any) -> Any:
        """The captured forward, its graphs as `layer` rewrites them."""
        outer, self._in_force.layer = self._in_force.layer, layer
        before = autocasts_around()
        try:
            with _in_one_piece() if _in_a_group() else contextlib.nullcontext():
                return self._forward(*args, **kwargs)
        except BaseException:
            _leave_autocasts(before)
            raise
        finally:
            self._in_force.layer = outer


def autocasts_around() -> int:
    """How many autocasts this thread is inside of."""
    count = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return count


def _leave_autocasts(before: int) -> None:
    """A captured graph that has failed does not leave the autocast that it has entered (a CUDA graph that could not be captured, memory that
    ran out). Weights' copies in half precision would be kept from then on, and no update of theirs be seen.
    """
    left = autocasts_around() - before
    for _ in range(left):
        torch.autocast_decrement_nesting()
    if left and not before:
        torch.clear_autocast_cache()


def _dispatching(in_force: _InForce) -> _Backend:
    """A Dynamo backend whose graphs run as the layer in force at each call rewrites them."""

    def keep(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graph = dynamo.twin(graph_module)  # Dynamo takes its values out of the nodes when it is done

        def run(*args: Any) -> Any:
            assert in_force.layer is not None
            return host_values.inside(in_force.layer.rewritten(graph), *args)

        return run

    return keep


def _captured(inner: Callable[..., Any], module: torch.nn.Module) -> _Captured:
    """The layer for ForwardStack below all CaptureLayers."""
    return _Captured(inner, module)


def _unobserved() -> contextlib.AbstractContextManager[None]:
    """Nothing of a close look at the first steps is in place, for Dynamo traces what it finds."""
    discovery = Attached.discovery
    return discovery.out_of_sight() if discovery is not None and discovery.looking else contextlib.nullcontext()


@contextlib.contextmanager
def _in_one_piece() -> Iterator[None]:
    """Inside, Dynamo does not cut graphs where DistributedDataParallel's buckets end, patterns in two (and fails with buckets below 1 MiB).

    Cuts let Inductor's backward, else one node, give gradients away before its end. These graphs run by autograd's own nodes, which do so
    anyway.
    """
    config: Any = torch._dynamo.config
    own = config.optimize_ddp
    config.optimize_ddp = False  # not by `config.patch`, which takes ten times as long
    try:
        yield
    finally:
        config.optimize_ddp = own


def _in_a_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()


_layers = KeptLayers(CAPTURE, CaptureLayer)
current = _layers.current


def report(training: Training, family: str) -> match.MatchReport:
    """What this family's rewrites have said of all roots' graphs; a place begins with its root's name where there are several roots."""
    whole = match.MatchReport()
    for root in training.roots:
        layer = current(target_of(training, root))
        found = layer.reports.get(family) if layer is not None else None
        if found is not None:
            within = f"{root.name}." if len(training.roots) > 1 else ""
            whole.matched |= {within + place: what for place, what in found.matched.items()}
            whole.unmatched |= {within + place: why for place, why in found.unmatched.items()}
    return whole


def sites(training: Training, family: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The report's places as a transform tells them: taken, with what was put there, and left, with why."""
    found = report(training, family)
    return (
        tuple(f"{place}: {what}" for place, what in found.matched.items()),
        tuple(f"{place}: {why}" for place, why in found.unmatched.items()),
    )


def release(modules: Iterable[torch.nn.Module]) -> None:
    """Drop what is kept of these modules and not in force, so that it can be freed."""
    for module in modules:
        _layers.release([module])
        stack = ForwardStack.of(module)
        if stack.get(CAPTURED) is None:
            stack.forget(_captured)


def install(module: torch.nn.Module, families: frozenset[str], mode: str | Recording | None) -> None:
    stack = ForwardStack.of(module)
    if families or mode is not None:
        stack.set(CAPTURED, _captured)
        stack.set(CAPTURE, _layers.of(module, families, mode))
    else:
        stack.clear(CAPTURE)
        stack.clear(CAPTURED)


def set_family(modules: Iterable[torch.nn.Module], family: str) -> Undo:
    """Have this family's kernels put into these modules' graphs, whatever else captures them."""
    return _set(
        modules, lambda families, mode: (families | {family}, mode), lambda families, mode: (families - {family}, mode)
    )


def set_mode(modules: Iterable[torch.nn.Module], mode: str | Recording) -> Undo:
    """Have these modules compiled by Inductor in `mode`, or the graphs recorded that it would be given."""
    return _set(modules, lambda families, _: (families, mode), lambda families, _: (families, None))


_Settings = tuple[frozenset[str], "str | Recording | None"]
_Change = Callable[[frozenset[str], "str | Recording | None"], _Settings]


limits: list[int] = []  # the script's own recompile limit, once for each change that is on, in whatever order they go


def _raise_limit() -> None:
    import torch._dynamo

    own = torch._dynamo.config.recompile_limit
    limits.append(limits[0] if limits else own)
    torch._dynamo.config.recompile_limit = max(own, _RECOMPILE_LIMIT)


def _lower_limit() -> None:
    own = limits.pop()
    if not limits:
        torch._dynamo.config.recompile_limit = own


def _set(modules: Iterable[torch.nn.Module], on: _Change, off: _Change) -> Undo:
    def change(module: torch.nn.Module, how: _Change) -> None:
        layer = current(module)
        install(module, *how(*((layer.families, layer.mode) if layer else (frozenset(), None))))

    with all_or_nothing() as undo:
        _raise_limit()
        undo.push(_lower_limit)
        for module in modules:
            undo.push(functools.partial(numpy_flags.release, module))
            numpy_flags.hold(module)
            change(module, on)
            undo.push(lambda module=module: change(module, off))
    return undo
