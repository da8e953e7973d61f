"""Where the watcher of steps hears of the script's training: hooks of optimizers, backward passes, GradScalers and replayed graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from advisor.loop import updates
from advisor.loop.patches import Patches
from advisor.loop.session import Session
from advisor.loop.steps import StepWatcher
from advisor.loop.threads import inside_backward
from advisor.loop.training import Training

CREATE_GRAPH = {"backward": 3, "grad": 4}  # where torch.autograd's functions take `create_graph` without its name


class _Hooks:
    """Hooks of all optimizers, behind one of torch's, which is there while there are any.

    Torch calls hooks as it walks through the dictionary that holds them, and one put in or taken out meanwhile ends that walk in an
    error, in the user's step. Ours come and go inside a step: they are in a list of their own, and torch's hook stays until a
    moment at which it can go.
    """

    def __init__(self, register: Callable[[Any], RemovableHandle]) -> None:
        self._register = register
        self._hooks: list[tuple[Callable[..., Any], Patches]] = []
        self._handle: RemovableHandle | None = None
        self._walking = 0

    def add(self, hook: Callable[..., Any], patches: Patches) -> None:
        """Call `hook` with what torch gives its own, until `patches` are undone. What it returns is passed on to torch."""
        ours = hook, patches
        self._hooks.append(ours)
        if self._handle is None:
            # Dynamo stays out: of a script that compiles its optimizer's step it would trace all of a boundary, and tell of what it does
            # not know there.
            self._handle = self._register(_disable_dynamo(lambda *given: self._called(*given)))

        def remove() -> None:
            self._hooks.remove(ours)
            self._leave()

        patches.undo(remove)

    def _called(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        given = None
        self._walking += 1
        try:
            for hook, patches in tuple(self._hooks):
                if patches.active:
                    given = hook(optimizer, args, kwargs) or given
        finally:
            self._walking -= 1
        return given

    def _leave(self) -> None:
        if self._hooks or self._handle is None:
            return
        hooks = self._handle.hooks_dict_ref()
        if not (self._walking and hooks and next(reversed(hooks)) != self._handle.id):
            self._handle.remove()
            self._handle = None


_before_steps, _after_steps = _Hooks(register_optimizer_step_pre_hook), _Hooks(register_optimizer_step_post_hook)


def after_optimizer_steps(listener: Callable[[Any], None], patches: Patches) -> None:
    """Call `listener` with each optimizer that has made a step, until `patches` are undone or it raises."""
    listen = patches.guard(listener)
    _after_steps.add(lambda optimizer, args, kwargs: listen(optimizer), patches)


def attach(training: Training, session: Session, patches: Patches | None = None) -> StepWatcher:
    """Hook optimizers, backward passes, GradScalers and graph replays; boundaries are reported from now on.

    Taken back by `StepWatcher.detach()`. The hooks change no random state and no result, and no argument but a closure's, which
    an open traced window annotates.
    """
    watcher = StepWatcher(training, session, patches or Patches())
    optimizer_called = watcher.patches.guard(watcher.optimizer_called)
    _hook_updates(watcher, optimizer_called)
    # Tensor.backward and everything else ends up in these two.
    for name in ("backward", "grad"):
        _wrap_engine(watcher, name)
    _wrap_scaler(watcher, optimizer_called)
    _wrap_replay(watcher)
    return watcher


def _hook_updates(watcher: StepWatcher, optimizer_called: Callable[..., None]) -> None:
    guard = watcher.patches.guard
    update_begins, closure_ended = guard(watcher.update_begins), guard(watcher.closure_ended)

    def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if watcher.elsewhere():
            return None
        updates.optimizer_begins(optimizer)
        update_begins()
        return updates.annotated_closure(args, kwargs)

    def after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if watcher.elsewhere():
            return
        updates.optimizer_ends()  # before the boundary, at which the window may end
        if updates.closure_of(args, kwargs) is not None:
            closure_ended()
        optimizer_called(optimizer)

    _before_steps.add(before_step, watcher.patches)
    _after_steps.add(after_step, watcher.patches)


def _wrap_scaler(watcher: StepWatcher, optimizer_called: Callable[..., None]) -> None:
    patches, scalers = watcher.patches, watcher.training.scalers
    scaler = torch.amp.grad_scaler.GradScaler
    plain_step, plain_scale = scaler.step, scaler.scale
    loss_scaled = patches.guard(watcher.loss_scaled)
    seen_scaler = patches.guard(lambda found: _append_new(scalers, found))

    @wraps(plain_step)
    def scaler_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not patches.active or not self._enabled or watcher.elsewhere():
            return plain_step(self, optimizer, *args, **kwargs)
        seen_scaler(self)
        calls = watcher.optimizer_calls
        result = plain_step(self, optimizer, *args, **kwargs)
        if watcher.optimizer_calls == calls:
            optimizer_called(optimizer, True)
        return result

    @wraps(plain_scale)
    def scaler_scale(self: Any, outputs: Any) -> Any:
        result = plain_scale(self, outputs)
        if not watcher.elsewhere():
            loss_scaled(outputs, result)
        return result

    patches.replace(scaler, "step", scaler_step)
    patches.replace(scaler, "scale", scaler_scale)


def _wrap_replay(watcher: StepWatcher) -> None:
    graph = torch.cuda.CUDAGraph
    plain_replay = graph.replay
    graph_replayed = watcher.patches.guard(watcher.graph_replayed)

    @wraps(plain_replay)
    def replay(self: Any) -> Any:
        result = plain_replay(self)
        if not watcher.elsewhere():
            graph_replayed(self)
        return result

    watcher.patches.replace(graph, "replay", replay)


def _wrap_engine(watcher: StepWatcher, name: str) -> None:
    plain = getattr(torch.autograd, name)
    starts, done = watcher.patches.guard(watcher.backward_starts), watcher.patches.guard(watcher.backward_done)
    graph_starts, graph_done = watcher.patches.guard(watcher.graph_starts), watcher.patches.guard(watcher.graph_done)

    @wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Inside another one (a replayed graph's gradients, a checkpoint) it is no pass of its own.
        if not watcher.patches.active or watcher.elsewhere() or inside_backward():
            return plain(*args, **kwargs)
        if kwargs.get("create_graph", len(args) > CREATE_GRAPH[name] and args[CREATE_GRAPH[name]]):
            # A gradient penalty, part of a loss that comes later.
            if name != "backward":
                return plain(*args, **kwargs)
            graph_starts()
            try:
                result = plain(*args, **kwargs)
            finally:
                watcher.in_backward = False
            graph_done()
            return result
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        starts(tensors)
        try:
            result = plain(*args, **kwargs)
        finally:
            watcher.in_backward = False
        done(tensors)
        return result

    watcher.patches.replace(torch.autograd, name, run)


def _append_new(found: list[Any], value: Any) -> None:
    if not any(value is other for other in found):
        found.append(value)
