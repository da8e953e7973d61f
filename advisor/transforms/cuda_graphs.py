"""CUDA graphs around each root's forward and backward: two launches a step in place of hundreds.

Wins when the host cannot launch as fast as the device runs (small images, small batches); at large batches it gains a few
per cent. Loss, optimizer and everything else stay eager. Forward and backward are captured once for each kind of call, and once more for
each forward that waits for its backward while the next one comes; any call that no graph fits (evaluation, no gradients, arguments of
unknown kinds) runs eagerly, and the effect check says why.

What is guarded, because published implementations go wrong there: gradients that alias the graph's static buffers are
cloned before they would be accumulated into (pytorch#181723), and no forward writes to them; outputs and gradients of
inputs are cloned, so a kept one never changes later;
parameters and buffers that moved in memory, layers that were thawed or put to evaluation, and attributes that are others by now (a
dropout's rate, a norm's momentum, the name of a phase, a mask) invalidate the capture; hooks that do more than compute are refused, since
replays run no Python, and so are random numbers of the host and numbers that differ when they are brought from there. What the forward
reads elsewhere (globals, the inside of an object) is not seen.
Gradients of parameters go past autograd's accumulation, which would cost the host more than all the rest (direct_gradients.py).
The parts are in transforms/graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from weakref import ref

import torch

from advisor.core.gpus import SENDS
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms import direct_gradients, rewrapped
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import GRAPH, ForwardStack
from advisor.transforms.graphs.calls import unfit
from advisor.transforms.graphs.layer import layers
from advisor.transforms.graphs.replaying import serve
from advisor.transforms.patch import all_or_nothing
from advisor.transforms.targets import single_process, targets

current, release = layers.current, layers.release


def _sends(parameters: Mapping[str, str]) -> bool:
    return SENDS.items() <= parameters.items()


def put_beside(modules: Iterable[torch.nn.Module]) -> Undo:
    """Capture the weight gradients of these modules, which are graphed, on a stream of their own."""

    def back(module: torch.nn.Module) -> None:
        if current(module) is not None:
            ForwardStack.of(module).set(GRAPH, layers.of(module, False))

    with all_or_nothing() as undo:
        for module in modules:
            layer = layers.of(module, True)
            layer.reducers = layers.of(module, False).reducers
            ForwardStack.of(module).set(GRAPH, layer)
            undo.push(functools.partial(back, module))
    return undo


def warming(training: Training) -> bool:
    """Whether graphs that are on wait for more calls before they are captured."""
    found = [current(module) for module in targets(training)]
    return any(layer.warming for layer in found if layer is not None)


class CudaGraphs(Transform):
    """Graphed forward and backward of every root."""

    id = "cuda_graphs"
    traced = False  # replays are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="CUDA graphs need a CUDA GPU")
        if not training.fixed_shapes:
            return Match(applies=False, reason="input shapes change from step to step")
        rewrapped.layers(training)  # which tell what the backward of a model in a DistributedDataParallel sends
        fits, not_fit = [], []
        for module in targets(training):
            reason = unfit(module, sends=_sends(parameters))
            (not_fit.append(f"{type(module).__name__}: {reason}") if reason else fits.append(type(module).__name__))
        if not fits:
            return Match(applies=False, reason="; ".join(not_fit) or "no module was seen", unmatched=tuple(not_fit))
        return Match(applies=True, sites=tuple(fits), unmatched=tuple(not_fit))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        wrappers = single_process(training)
        with all_or_nothing() as undo:
            if direct_gradients.available():
                serve(undo)
            for module in targets(training):
                if unfit(module, sends=_sends(parameters)):
                    continue
                stack, layer = ForwardStack.of(module), layers.of(module, False)
                layer.sends = _sends(parameters)
                layer.reducers = [ref(wrapper) for wrapper in wrappers if wrapper.module is module]
                stack.set(GRAPH, layer)
                undo.push(functools.partial(stack.clear, GRAPH))
                layer.put_on()
                undo.push(layer.take_off)
        return undo

    def release(self, training: Training) -> None:
        release(targets(training))

    def sites(self, training: Training) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        found, left = [], []
        for module in targets(training):
            layer, name = current(module), type(module).__name__
            if layer is None:
                left.append(f"{name}: {unfit(module) or 'it is not switched on'}")
            elif layer.replays:
                found.append(name)
            else:
                left.append(f"{name}: {_why_not(layer.failures)}")
        return tuple(found), tuple(left)

    def warming(self, training: Training) -> bool:
        return warming(training)

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        replays, failed = 0, []
        for module in targets(training):
            layer = current(module)
            if layer is not None:
                replays += layer.replays
                if not layer.replays or layer.parts:
                    failed.append(f"{type(module).__name__}: {_why_not(layer.failures)}")
        eager = f"; {'; '.join(failed)}" if failed else ""
        if replays:
            return Check(
                passed=True, detail=f"graphs replayed {replays} times{eager}", numbers={"replays": float(replays)}
            )
        return Check(passed=False, detail=f"no graph was replayed ({'; '.join(failed) or 'no module is graphed'})")


def _why_not(reasons: list[str]) -> str:
    return reasons[0] if reasons else "it was not called in training since graphs are on"
