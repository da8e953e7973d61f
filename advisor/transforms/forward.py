"""Layers around a root module's forward that can be switched one by one between two steps.

Each layer has a rank; a higher rank is further out, and the module's own forward is innermost. What is composed is
remembered, so a layer that is switched off and on again finds the same callables: nothing compiles or captures twice.

The composition is installed as the instance attribute `forward`, so hooks, `state_dict`, parameters and the class stay as
they are. Copies and pickles of the module are those of the plain module: a second instance attribute, `__reduce_ex__`, leaves
these attributes out of the copied state; and so is what torch.jit.script sees, through a third, `__prepare_scriptable__`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch


def hooks_of(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """What a call of the module runs besides its forward, and its backward: hooks by the numbers of their handles."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


Layer = Callable[[Callable[..., Any], torch.nn.Module], Callable[..., Any]]
"""`wrap(inner, module)` returns the callable that stands for `inner`; called once for each different `inner`."""

SUBMODULE = 0  # around the forward of a layer inside a root
INPUT_LAYOUT = 10
AUTOCAST = 20
CAPTURED = 25  # what those at CAPTURE share
CAPTURE = 30
GRAPH = 40
WRAPPER = 50  # around a root that only calls the module in it
REPLICATED = 60  # where `--gpus N` puts DistributedDataParallel

_Key = tuple[tuple[int, Layer], ...]


class InstalledForward:
    """What stands in `module.forward` while a stack has layers: calls the current composition.

    With no layers left it calls the module's own forward, so a reference that someone kept stays right. Exported and traced is
    the module's own forward too, as in copies and pickles: a graph of what the user wrote, in which no layer's capture could stand.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.composed = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Not by `is_exporting()`: before torch 2.12 Dynamo takes that for true in whatever it traces, and layers inside a capture were lost.
        if torch.compiler._is_exporting_flag or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]  # torch's own, private or without types
            return self.original(*args, **kwargs)
        return self.composed(*args, **kwargs)

    @property
    def __code__(self) -> Any:  # torch.export reads the names of arguments there
        return self.original.__code__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # Reached only when the module's class copies its own __dict__; the copy is in `memo` by then if it is made rightly.
        owner = getattr(self.original, "__self__", None)
        function = getattr(self.original, "__func__", None)
        if owner is None or function is None or id(owner) not in memo:
            return self.original
        return function.__get__(memo[id(owner)])

    def __reduce__(self) -> tuple[Any, ...]:
        # Reached only when the module's class pickles its own __dict__: stands for the plain forward, in builtins only.
        return operator.itemgetter(0), ((self.original,),)


class _PlainReduce:
    """`module.__reduce_ex__` while layers are installed: the state without them."""

    def __init__(self, stack: ForwardStack) -> None:
        self.stack = stack

    def __call__(self, protocol: Any) -> Any:
        module = self.stack.module
        reduced = type(module).__reduce_ex__(module, protocol)
        if isinstance(reduced, str) or len(reduced) < 3:
            return reduced
        state = reduced[2]
        if isinstance(state, dict):
            state = self.stack.plain_state(state)
        elif isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], dict):
            state = (self.stack.plain_state(state[0]), state[1])
        return (*reduced[:2], state, *reduced[3:])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo.get(id(self.stack.module), self.stack.module)
        return type(twin).__reduce_ex__.__get__(twin)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.stack.module, "__reduce_ex__")


class _PlainTwin:
    """`module.__prepare_scriptable__` while layers are installed: the module without them, over the same parameters."""

    def __init__(self, stack: ForwardStack) -> None:
        self.stack = stack

    def __call__(self) -> torch.nn.Module:
        module = self.stack.module
        twin = type(module).__new__(type(module))
        twin.__dict__ = self.stack.plain_state(module.__dict__)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return functools.partial(copy.copy, memo.get(id(self.stack.module), self.stack.module))

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (copy.copy, self.stack.module)


_ATTRIBUTES = {"__reduce_ex__": _PlainReduce, "__prepare_scriptable__": _PlainTwin}


def is_installed(value: object) -> bool:
    """Whether an attribute of a module is one that its stack has put there. They are other objects each time that its layers come back."""
    return isinstance(value, (InstalledForward, *_ATTRIBUTES.values()))


class ForwardStack:
    """The layers around one root module's forward. There is one stack for a module, as long as the module lives.

    What a stack has composed holds its module. So the module's own attributes are all that keeps it while it has layers, and both can go
    together; one that is left without layers, but may get them back, waits in `_resting` until `let_go`.
    """

    _stacks: ClassVar[WeakKeyDictionary[torch.nn.Module, ref[ForwardStack]]] = WeakKeyDictionary()
    _resting: ClassVar[set[ForwardStack]] = set()
    installed: ClassVar[WeakSet[torch.nn.Module]] = WeakSet()
    _finalized: ClassVar[WeakSet[torch.nn.Module]] = WeakSet()

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = ref(module)
        self._layers: dict[int, Layer] = {}
        self._composed: dict[_Key, Callable[..., Any]] = {}
        self._forward: InstalledForward | None = None
        self._own: Callable[..., Any] | None = None  # a forward that the user had set on the instance

    @classmethod
    def of(cls, module: torch.nn.Module) -> ForwardStack:
        """The stack of this module, made at the first call."""
        stack = cls._known(module)
        if stack is None:
            stack = cls(module)
            cls._stacks[module] = ref(stack)
        return stack

    @classmethod
    def _known(cls, module: torch.nn.Module) -> ForwardStack | None:
        found = cls._stacks.get(module)
        return found() if found is not None else None

    @classmethod
    def let_go(cls, modules: Iterable[torch.nn.Module]) -> None:
        """Forget what stands ready for these modules where they have no layers, and for those below them."""
        for module in modules:
            for child in module.modules():
                stack = cls._known(child)
                if stack is not None:
                    cls._resting.discard(stack)

    @property
    def module(self) -> torch.nn.Module:
        """The module that this stack belongs to.

        Raises:
            ReferenceError: when the module is gone.
        """
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward stack no longer exists")
        return module

    def get(self, rank: int) -> Layer | None:
        """The layer at this rank, or None."""
        return self._layers.get(rank)

    def set(self, rank: int, layer: Layer) -> None:
        """Put `layer` at `rank` in place of what was there. On an exception from the layer nothing has changed."""
        layers = {**self._layers, rank: layer}
        composed = self._compose(tuple(sorted(layers.items(), key=lambda item: item[0])))
        self._layers = layers
        self._install(composed)

    def clear(self, rank: int) -> None:
        """Take the layer at `rank` away; no error when there is none. With no layers left the module is as it was."""
        layers = {other: layer for other, layer in self._layers.items() if other != rank}
        composed = self._compose(tuple(sorted(layers.items(), key=lambda item: item[0])))
        self._layers = layers
        if layers:
            self._install(composed)
        else:
            self._remove()

    def composed_below(self, rank: int) -> Callable[..., Any]:
        """The callable that a layer at `rank` wraps: the module's own forward inside all layers of a lower rank."""
        return self._compose(
            tuple(sorted(((r, layer) for r, layer in self._layers.items() if r < rank), key=lambda item: item[0]))
        )

    @classmethod
    @contextlib.contextmanager
    def without(cls, modules: Iterable[torch.nn.Module], rank: int) -> Iterator[None]:
        """Inside, calls of these modules pass by their layers at `rank` and above."""
        stacks = [stack for module in modules if (stack := cls._known(module)) is not None]
        installed = [(stack, forward) for stack in stacks if (forward := stack._forward) is not None]
        before = [forward.composed for _, forward in installed]
        try:
            for stack, forward in installed:
                forward.composed = stack.composed_below(rank)
            yield
        finally:
            for (_, forward), composed in zip(installed, before, strict=True):
                forward.composed = composed

    def forget(self, layer: Layer) -> None:
        """Drop every remembered composition with `layer`, so that what it compiled or captured can be freed."""
        self._composed = {
            key: value for key, value in self._composed.items() if all(member != layer for _, member in key)
        }
        if not self._composed:
            self._resting.discard(self)

    def plain_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """`state`, an instance dictionary of the module, as it would be without layers."""
        plain = {name: value for name, value in state.items() if not is_installed(value)}
        if self._own is not None and "forward" in state and "forward" not in plain:
            plain["forward"] = self._own
        return plain

    def _original(self) -> Callable[..., Any]:
        if self._forward is not None:
            return self._forward.original
        module = self.module
        own = module.__dict__.get("forward")
        if own is not None:
            return own  # type: ignore[no-any-return]  # what the user has put there
        return type(module).forward.__get__(module)  # type: ignore[no-any-return]  # a method, bound

    def _compose(self, key: _Key) -> Callable[..., Any]:
        if not key:
            return self._original()
        if key not in self._composed:
            self._composed[key] = key[-1][1](self._compose(key[:-1]), self.module)
        return self._composed[key]

    def _install(self, composed: Callable[..., Any]) -> None:
        module = self.module
        if self._forward is None:
            self._own = module.__dict__.get("forward")
            self._forward = InstalledForward(self._original())
            module.__dict__["forward"] = self._forward
            module.__dict__.update((name, kind(self)) for name, kind in _ATTRIBUTES.items())
            self.installed.add(module)
            if module not in self._finalized:
                self._finalized.add(module)
                finalize(module, _watch_replicas, self.installed).atexit = False  # it may go with its layers on
            self._resting.discard(self)
            _watch_replicas(self.installed)
        self._forward.composed = composed

    def _remove(self) -> None:
        module, forward = self.module, self._forward
        if forward is None:
            return
        forward.composed = forward.original
        attributes = module.__dict__
        if attributes.get("forward") is forward:  # else the script has set its own since: leave that alone
            if self._own is not None:
                attributes["forward"] = self._own
            else:
                del attributes["forward"]
        for name, kind in _ATTRIBUTES.items():
            if isinstance(attributes.get(name), kind):
                del attributes[name]
        self._forward = self._own = None
        if self._composed:
            self._resting.add(self)
        self.installed.discard(module)
        _watch_replicas(self.installed)


replicate = torch.nn.Module._replicate_for_data_parallel


def _plain_replica(module: torch.nn.Module) -> torch.nn.Module:
    """A DataParallel replica copies the instance dictionary; a layered forward in it would use the original's parameters."""
    replica: torch.nn.Module = replicate(module)  # type: ignore[no-untyped-call]  # torch's own, without types
    if isinstance(module.__dict__.get("forward"), InstalledForward):
        replica.__dict__ = ForwardStack.of(module).plain_state(replica.__dict__)
    return replica


def _watch_replicas(installed: WeakSet[torch.nn.Module]) -> None:
    current = torch.nn.Module._replicate_for_data_parallel
    any_left = any(True for _ in installed)  # not by its length, which a module that is just going counts for
    if any_left and current is replicate:
        torch.nn.Module._replicate_for_data_parallel = _plain_replica  # type: ignore[method-assign]  # put back
    elif not any_left and current is _plain_replica:
        torch.nn.Module._replicate_for_data_parallel = replicate  # type: ignore[method-assign]  # replaced while a root has layers


_L = TypeVar("_L")  # a class of layers


class KeptLayers(Generic[_L]):
    """The layers of one rank, by module and settings: what one has compiled or captured is found again after switching off and on.

    Args:
        kind: made with the settings as arguments.
        free: called with each layer that is dropped.
    """

    def __init__(self, rank: int, kind: type[_L], free: Callable[[_L], None] = lambda layer: None) -> None:
        self._rank, self._kind, self._free = rank, kind, free
        self._known: WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    def of(self, module: torch.nn.Module, *settings: Any) -> _L:
        """The module's layer with these settings, made at the first call."""
        known: dict[tuple[Any, ...], _L] = self._known.setdefault(module, {})
        if settings not in known:
            known[settings] = self._kind(*settings)
        return known[settings]

    def current(self, module: torch.nn.Module) -> _L | None:
        """The layer in force on this module."""
        layer = ForwardStack.of(module).get(self._rank)
        return layer if isinstance(layer, self._kind) else None

    def release(self, modules: Iterable[torch.nn.Module]) -> None:
        """Drop these modules' layers that are not in force, so that what they hold can be freed."""
        for module in modules:
            stack, known, keep = ForwardStack.of(module), self._known.get(module, {}), self.current(module)
            for settings, layer in list(known.items()):
                if layer is not keep:
                    stack.forget(layer)
                    del known[settings]
                    self._free(layer)
