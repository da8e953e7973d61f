"""Outputs of norms, and of the activations behind them, computed again in the backward: half of a CNN's activations for little time.

A convolution, its norm and a ReLU keep three tensors: the convolution's input, the norm's input, and the ReLU's output, which is the next
convolution's input. The last follows from the second by two passes over memory. So autograd is given, in its place, how to make it
(Bulò, Porzi, Kontschieder, "In-Place Activated BatchNorm", 2018, who go the other way, from the output). The norm runs by its own kernel on
the same input, so its bits are the same; its running statistics are not touched. Parameter `modules`: norms by comma ("Net.layer1.0.bn1").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import distributed, nn
from torch.nn import functional as F

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.checkpoint import wanted_modules
from advisor.transforms.forward import REPLICATED, SUBMODULE, ForwardStack
from advisor.transforms.patch import all_or_nothing

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)
ACTIVATIONS = (nn.ReLU, nn.SiLU, nn.GELU)
BELOW = REPLICATED - 1  # around a root, and in what several ranks call


class NormOutputs(Transform):
    """Make these norms' outputs anew when the backward asks for them."""

    id = "recompute_norms"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        wanted = wanted_modules(parameters)
        found = _norms(training, wanted)
        unmatched = tuple(f"{name}: no such norm" for name in wanted if name not in found)
        if distributed.is_available() and distributed.is_initialized():
            return Match(applies=False, reason="norms over several ranks would exchange their sums once more")
        if not found:
            return Match(applies=False, reason="no norm is named, or none is there", unmatched=unmatched)
        return Match(applies=True, sites=tuple(found), unmatched=unmatched)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        norms = _norms(training, wanted_modules(parameters))
        with all_or_nothing() as undo:
            for root in training.roots:
                made = _Made()
                layers: list[tuple[nn.Module, int, Any]] = [(root.module, BELOW, made.root)]
                for module in root.module.modules():
                    if any(module is norm for norm in norms.values()):
                        layers.append((module, SUBMODULE, made.norm))
                    elif type(module) in ACTIVATIONS and module is not root.module:
                        layers.append((module, SUBMODULE, made.activation))
                for module, rank, layer in layers:
                    stack = ForwardStack.of(module)
                    undo.push(lambda stack=stack, layer=layer: stack.forget(layer))
                    stack.set(rank, layer)
                    undo.push(lambda stack=stack, rank=rank: stack.clear(rank))
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        layers: list[Any] = [ForwardStack.of(root.module).get(BELOW) for root in training.roots]
        again = sum(layer.__self__.again for layer in layers if layer is not None)
        return Check(passed=again > 0, detail=f"{again} outputs were made again", numbers={"again": float(again)})


class _Recipe:
    """How to make a norm's output, and behind it an activation's."""

    def __init__(self, norm: nn.Module, x: torch.Tensor, then: nn.Module | None = None) -> None:
        self.norm, self.x, self.then = norm, x, then
        self._versions = self._now()
        self.uses = 0
        self._made: torch.Tensor | None = None

    def _now(self) -> tuple[int, ...]:
        return (self.x._version, *(p._version for p in self.norm.parameters(recurse=False)))

    def make(self) -> torch.Tensor:
        """The output; it is held until all who asked to keep it have it.

        Raises:
            RuntimeError: as autograd's, where what it is made of has been changed in place since.
        """
        if self._now() != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                "the input or the weights of a norm whose output is computed again"
            )
        made = self._made
        if made is None:
            with torch.no_grad():
                made = _normed(self.norm, self.x)
                made = self.then.forward(made) if self.then is not None else made
        self.uses -= 1
        self._made = made if self.uses > 0 else None
        return made


def _normed(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    own: Any = norm
    return F.batch_norm(x, None, None, own.weight, own.bias, True, 0.0, own.eps)


class _Made:
    """Of one root: what has been made in the forward that runs, and hooks on what autograd keeps."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, _Recipe]] = {}  # by address: the tensor while it lives, its version
        self._within: tuple[_Recipe, nn.Module] | None = None  # a ReLU that runs, on what a norm has made
        self._active = False
        self.again = 0

    def root(self, inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Around the root's forward."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._active or not (module.training and torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            keep, give = self._hooks()
            self._active = True
            try:
                with torch.autograd.graph.saved_tensors_hooks(keep, give):
                    return inner(*args, **kwargs)
            finally:
                self._active = False
                self._known.clear()

        return forward

    def norm(self, inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Around a norm that normalises by what it sees."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = inner(x)
            if self._active and module.training and torch.is_grad_enabled() and y.dtype == x.dtype:
                self._note(y, _Recipe(module, x))
            return y

        return forward

    def activation(self, inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Around an activation, which may be in place."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            recipe = self._recipe(x) if self._active else None
            if recipe is None or recipe.then is not None:
                return inner(x)  # type: ignore[no-any-return]  # of the module's own forward
            if not isinstance(module, nn.ReLU):
                if getattr(module, "inplace", False):
                    return inner(x)  # type: ignore[no-any-return]  # it keeps a copy, which nobody could tell
                y: torch.Tensor = inner(x)
                self._note(y, _Recipe(recipe.norm, recipe.x, module))
                return y
            behind = _Recipe(recipe.norm, recipe.x, module)
            self._within = (behind, module)
            try:
                y = inner(x)
            finally:
                self._within = None
            self._note(y, behind)
            return y

        return forward

    def _note(self, y: torch.Tensor, recipe: _Recipe) -> None:
        self._known[y.data_ptr()] = (ref(y), y._version, recipe)

    def _recipe(self, tensor: torch.Tensor) -> _Recipe | None:
        """How this very tensor is made; None for one that is not known, or was changed since."""
        known = self._known.get(tensor.data_ptr())
        if known is None:
            return None
        whole, version, recipe = known[0](), known[1], known[2]
        same = (
            whole is not None
            and version == tensor._version
            and tensor.shape == whole.shape
            and tensor.stride() == whole.stride()
        )
        return recipe if same and tensor.dtype == whole.dtype else None

    def _hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # a close look's, or the script's
        keep_plain, give_plain = outer if outer is not None else (lambda tensor: tensor, lambda kept: kept)

        def keep(tensor: torch.Tensor) -> Any:
            recipe = self._within[0] if self._within is not None else self._recipe(tensor)
            if recipe is None:
                return None, keep_plain(tensor)
            recipe.uses += 1
            return recipe, tensor.stride()

        def give(kept: Any) -> torch.Tensor:
            recipe, plain = kept
            if recipe is None:
                return give_plain(plain)  # type: ignore[no-any-return]  # a tensor, as the hooks around give it
            self.again += 1
            made: torch.Tensor = recipe.make()
            return made if made.stride() == plain else made.clone().as_strided(made.shape, plain).copy_(made)

        return keep, give


def _norms(training: Training, wanted: list[str]) -> dict[str, nn.Module]:
    named = {
        f"{root.name}.{path}": module
        for root in training.roots
        for path, module in root.module.named_modules()
        if type(module) in NORMS
    }
    return {name: named[name] for name in wanted if name in named}
