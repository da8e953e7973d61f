"""What goes into each module of a step and comes out of it, forward and backward, noted in one replay."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from advisor.transforms.conv_bias import moved_bias
from advisor.transforms.forward import CAPTURE, GRAPH, ForwardStack
from advisor.trials.numerics.plain import PlainStep

Layer = torch.nn.Module
DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
_TOLD = 1e-6  # as likely two draws of a dropout may be alike by chance, where that is to tell something


@dataclass(slots=True, eq=False)
class SeenCall:
    """One call of a layer with the change on."""

    inputs: list[Any]
    keywords: dict[str, Any]
    buffers: list[torch.Tensor]
    random: list[torch.Tensor]  # states of the random numbers that it starts from
    learns: set[int]  # places of inputs that a gradient is to reach
    hidden: set[int] = field(
        default_factory=set
    )  # of inputs that it has written to: the gradient of what they were is not seen
    given: dict[int, tuple[torch.Tensor, int]] = field(
        default_factory=dict
    )  # while it runs: inputs, and their versions before
    output: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    left: list[torch.Tensor] = field(default_factory=list)  # of the buffers, after the call
    back: dict[int, torch.Tensor] = field(default_factory=dict)  # gradients of inputs, by place


@dataclass(slots=True, eq=False)
class Seen:
    """Calls of each module, and all parameters' gradients, by identity."""

    calls: dict[str, list[SeenCall]]
    gradients: dict[int, torch.Tensor | None]
    altered: set[str] = field(default_factory=set)  # modules whose buffers something else has moved after their calls
    uncalled: dict[str, str] = field(default_factory=dict)  # modules that could not be run by themselves, and why
    unjudged: int = 0  # modules for which there was no time
    scale: float = 1.0  # of gradients inside, against those that the backward pass left
    # Of convolutions that leave it to the norm behind them, and of those norms: the bias, which is not in what lies between the two.
    biases: dict[str, torch.Tensor] = field(default_factory=dict)


def bare(plain: PlainStep) -> contextlib.AbstractContextManager[None]:
    """Inside, the model runs layer by layer: code that was compiled or captured calls no hooks."""
    return ForwardStack.without(list(plain.call.root.module.modules()), CAPTURE)


def leaves(root: Layer) -> dict[str, Layer]:
    """Modules without others below them, and those with parameters of their own; the root is judged from end to end."""
    return {
        name: module
        for name, module in root.named_modules()
        if name
        and ".parametrizations" not in f".{name}"
        and (all(child == "parametrizations" for child, _ in module.named_children()) or module._parameters)
    }


def blocks(root: Layer) -> dict[str, Layer]:
    """All other modules, but for the root and for those that only hold others."""
    known, kinds = leaves(root), (torch.nn.ModuleList, torch.nn.ModuleDict)
    found = ((name, module) for name, module in root.named_modules() if name and name not in known)
    return {
        name: m
        for name, m in found
        if not isinstance(m, kinds) and "parametrizations" not in name and any(m.children())
    }


def inside(root: Layer, names: Iterable[str]) -> dict[str, frozenset[str]]:
    """By each of these modules the others of them that lie inside of it, under whatever name: one module may have several (RAFT's last
    norm of a block is also the end of its downsampling).
    """
    modules = {name: root.get_submodule(name) for name in names}
    known = {id(module): name for name, module in modules.items()}
    parts = {name: {known.get(id(part), name) for part in module.modules()} for name, module in modules.items()}
    return {name: frozenset(found - {name}) for name, found in parts.items()}


@contextlib.contextmanager
def dropped(plain: PlainStep) -> Iterator[dict[str, list[torch.Tensor]]]:
    """By dropout what it has dropped (0), kept (1) and been given as zero (-1) in each call inside, in order. Captured code is not seen:
    it would step aside for the hooks.
    """
    found: dict[str, list[torch.Tensor]] = {}
    hooks = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: Layer, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            kept = (output.detach() != 0).to(torch.int8)
            found.setdefault(name, []).append(torch.where(args[0].detach() == 0, -1, kept))

        return hook

    for name, module in () if captured(plain) else plain.call.root.module.named_modules():
        if isinstance(module, DROPOUTS) and module.training and 0.0 < module.p < 1.0 and not module.inplace:
            hooks.append(module.register_forward_hook(note(name)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def alike(module: Any, one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether all calls of it dropped the same in two draws, which hardly happens by chance."""
    chance, share = 0.0, module.p**2 + (1.0 - module.p) ** 2
    for a, b in zip(one, other, strict=False):
        both = (a >= 0) & (b >= 0) if a.shape == b.shape else torch.zeros(0, dtype=torch.bool)
        if a.shape != b.shape or bool((a[both] != b[both]).any()):
            return False
        # Of a channel or row that is dropped as a whole, its values are one draw.
        draws = int(both.sum()) if type(module) is torch.nn.Dropout else a.shape[0] * a.shape[1]
        chance += draws * math.log(share)
    return chance < math.log(_TOLD)


def captured(plain: PlainStep) -> bool:
    """Whether a captured graph runs in the layers' place."""
    stacks = map(ForwardStack.of, plain.call.root.module.modules())
    return any(stack.get(rank) is not None for stack in stacks for rank in (CAPTURE, GRAPH))


def observed(plain: PlainStep, modules: dict[str, Layer], lift: float) -> Seen:
    """Run the call once with what is on now, and note these modules' values and gradients (copies).

    With the rows in another order: a kernel that fits one batch only was made to fit the one it saw first.
    """
    seen = Seen({name: [] for name in modules}, {})
    seen.biases = {name: bias.clone() for name, m in modules.items() if (bias := moved_bias(m)) is not None}
    hooks: list[Any] = []
    copies = SeenCopies()
    for name, module in modules.items():
        before = _before(seen.calls[name], copies, plain.saved.states)
        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(_after(seen.calls[name], copies)))
    try:
        plain.again(lift=lift, rolled=True, gradients=seen.gradients)
    finally:
        for hook in hooks:
            hook.remove()
    for key, gradient in seen.gradients.items():
        if gradient is not None and gradient.layout is not torch.strided:
            seen.gradients[key] = gradient.to_dense()
    for name, module in modules.items():
        left = seen.calls[name][-1].left if seen.calls[name] else []
        if not all(map(torch.equal, left, module.buffers())):
            seen.altered.add(name)
    return seen


def noting(keep: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor | None], None]:
    """A hook that hands on a copy of each gradient that comes. None comes where a backward function leaves one of its outputs out."""

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            keep(gradient.detach().clone())

    return hook


def into(kept: dict[int, torch.Tensor], place: int) -> Callable[[torch.Tensor | None], None]:
    """A hook that keeps a copy of the gradient at this place."""
    return noting(lambda gradient: kept.__setitem__(place, gradient))


class SeenCopies:
    """One copy of each tensor as it stands: what one module gives out, the next is given."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def of(self, value: Any) -> Any:
        """A copy of a tensor; other things as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        version, copy = self._known.get(value, (-1, None))
        if version != value._version:
            copy = value.detach().clone()
            self._known[value] = value._version, copy
        return copy

    def same(self, alias: torch.Tensor, value: torch.Tensor) -> None:
        """`alias` holds what `value` does: a view of all of it, or a clone, which counts its versions from zero."""
        self._known[alias] = alias._version, self.of(value)


def _before(calls: list[SeenCall], copies: SeenCopies, states: Callable[[], list[torch.Tensor]]) -> Callable[..., Any]:
    def hook(module: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = SeenCall(
            list(pytree.tree_map(copies.of, args)),
            pytree.tree_map(copies.of, kwargs),
            [b.detach().clone() for b in module.buffers()],
            states(),
            {i for i, value in enumerate(args) if isinstance(value, torch.Tensor) and value.requires_grad},
        )
        calls.append(call)

        def aliased(place: int, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            # Its gradient is this layer's alone, whoever else reads the value. Of a view that is written to it would be lost.
            alias = value.clone() if getattr(module, "inplace", False) else value.view_as(value)
            alias.register_hook(into(call.back, place))
            copies.same(alias, value)
            call.given[place] = alias, alias._version
            return alias

        return tuple(aliased(place, value) for place, value in enumerate(args)), kwargs

    return hook


def _after(calls: list[SeenCall], copies: SeenCopies) -> Callable[..., None]:
    def hook(module: Layer, args: Any, output: Any) -> None:
        call = next(call for call in reversed(calls) if call.output is None)
        written = {place for place, (alias, version) in call.given.items() if alias._version != version}
        call.hidden |= written if not getattr(module, "inplace", False) else set()
        call.given.clear()
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            call.output = torch.empty(0)  # several, or none: not compared
            return
        call.output = copies.of(output)
        call.left = [b.detach().clone() for b in module.buffers()]
        if output.requires_grad:
            output.register_hook(noting(lambda gradient: setattr(call, "gradient", gradient)))

    return hook
