"""A training at a step boundary, with all that the numeric gate wants of it, and changes switched on and off there."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.loop.training import RootModule, Training
from advisor.loop.values import output_tensors
from advisor.trials.numerics.gate import Gate
from numerics.nets import Kind

Switch = Callable[[], Callable[[], None]]  # switches something on, and gives what switches it off


@dataclass(frozen=True)
class Change:
    """What is put on together, and what it promises."""

    name: str
    parts: tuple[Switch, ...]
    semantics: Semantics = Semantics.REASSOCIATED
    precision: str = "half"


class Loop:
    """A training that has come so far. `seed` draws weights and batches."""

    def __init__(self, kind: Kind, steps: int, seed: int = 0, device: str = "cpu") -> None:
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(seed)
        self.kind, self.device = kind, torch.device(device)
        with self.device:
            self.script = kind.make()
        roots = [RootModule(module=model, name=type(model).__name__) for model in self.script.models]
        self.training = Training(device=self.device, optimizers=list(self.script.optimizers), roots=roots)
        self.advance(steps)
        with self._recorded():  # some changes look at what goes in before they match
            self.advance(1)

    def advance(self, steps: int) -> None:
        """Train on."""
        with self.device:
            for _ in range(steps):
                self.script.step()

    def judge(self, change: Change) -> Check:
        """The gate's check of it, on the next step; it is off again afterwards."""
        gate = Gate(self.training)
        gate.arm()
        with self._recorded():
            self.advance(1)
        assert gate.captured()
        undo: list[Callable[[], None]] = []

        def off() -> None:
            while undo:
                undo.pop()()

        def on() -> None:
            off()
            undo.extend(part() for part in change.parts)

        try:
            return gate.judge(
                on, off, change.semantics, change.precision, "half" if self.kind.autocast else "fp64"
            ).check
        finally:
            off()
            gate.release()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Notes what goes into the models, what comes out, and its gradients."""

        def note(root: RootModule) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
                root.args, root.kwargs, root.output = args, kwargs, output
                for tensor in output_tensors(output):
                    if tensor.requires_grad and not tensor.is_leaf:
                        tensor.retain_grad()

            return hook

        roots = self.training.roots
        hooks = [root.module.register_forward_hook(note(root), with_kwargs=True) for root in roots]
        yield
        for hook in hooks:
            hook.remove()
        for root in roots:
            root.output_grads = tuple(None if t.grad is None else t.grad.clone() for t in output_tensors(root.output))
            # The batch as the script gave it: a generator's output goes into the discriminator with its graph.
            root.args = pytree.tree_map(
                lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, root.args
            )


def named(modules: Sequence[nn.Module], *kinds: type[nn.Module]) -> list[nn.Module]:
    """All modules of these kinds, in order."""
    return [module for root in modules for module in root.modules() if isinstance(module, kinds)]
