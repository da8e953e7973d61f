"""A step against a reference step, by the numeric gate that `advisor apply` holds its changes to.

The gate replays the reference's forward and backward from saved state. The change is that each of its modules runs the
forward of the step's module in its place, with the reference's own parameters and buffers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from advisor.core.errors import AdvisorError
from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.loop.discover import LOOK_STEPS
from advisor.loop.session import Session
from advisor.loop.training import RootModule, Training
from advisor.testing.device_lock import alone
from advisor.testing.hooked import found_in
from advisor.testing.live import LiveStep
from advisor.trials.numerics.gate import Gate

_WRAPPERS = ("_orig_mod.", "module.")
PRECISIONS = ("half", "tf32")


@dataclass(slots=True)
class _Circumstances:
    """How a module is called: under which autocast, with inputs in which memory format."""

    autocast: tuple[bool, torch.dtype]
    channels_last: tuple[bool, ...] = ()
    outputs: tuple[torch.dtype | None, ...] = ()  # of the leaves of what it returns; None for what is no tensor


def check(live: LiveStep, reference: Callable[[], Any], *, semantics: str, precision: str) -> Check:
    """The gate's check. The reference is called five times and trains on; the measured step is called once.

    Raises:
        AdvisorError: for an unknown class or precision, or modules whose parameters have other names.
    """
    try:
        promised = Semantics(semantics)
    except ValueError:
        known = ", ".join(s.value for s in Semantics if s is not Semantics.TRAINING)
        raise AdvisorError(f"semantics {semantics!r}", expected=f"one of {known}") from None
    if precision not in PRECISIONS:
        raise AdvisorError(f"precision {precision!r}", expected=" or ".join(PRECISIONS))
    device = live.training.device
    with alone():
        circumstances = _observed(live.call, live.training)
        session = Session(mode="search", run_dir=os.devnull, script="reference")
        with found_in(device, session, keep_inputs=True) as (training, watcher, _):
            for _ in range(LOOK_STEPS):
                reference()
                watcher.mark()
            gate = Gate(training, watcher)
            pairs = _paired(training.roots, live.training.roots)
            swaps = [
                _Swap(theirs.module, ours.module, circumstances.get(id(ours.module)), device.type)
                for theirs, ours in pairs
            ]

            def on() -> None:
                for swap in swaps:
                    swap.on()

            def off() -> None:
                for swap in swaps:
                    swap.off()

            try:
                gate.arm()
                seen = _observed(reference, training)
                for swap, (theirs, _) in zip(swaps, pairs, strict=True):
                    swap.returns = seen[id(theirs.module)].outputs if id(theirs.module) in seen else ()
                watcher.mark()
                if not gate.captured():
                    return Check(passed=None, detail="no module call with a backward pass was seen in the reference")
                return gate.judge(on, off, promised, precision).check
            finally:
                off()
                gate.release()


class _Swap:
    """The reference's module computes with the forward of another one, and back."""

    def __init__(
        self, module: torch.nn.Module, other: torch.nn.Module, called: _Circumstances | None, device: str
    ) -> None:
        self._module, self._other, self._called, self._device = module, other, called, device
        self._plain = module.forward
        self._own = module.__dict__.get("forward")
        self._names = {_stripped(name): name for name, _ in (*other.named_parameters(), *other.named_buffers())}
        self._standing = False
        self.returns: tuple[torch.dtype | None, ...] = ()  # what the reference's outputs are: autocast may leave others

    def on(self) -> None:
        if not self._standing:
            self._standing = True
            self._module.forward = self._forward

    def off(self) -> None:
        if self._standing:
            self._standing = False
            del self._module.forward
            if self._own is not None:
                self._module.forward = self._own

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        called = self._called
        if called is None:
            return self._run(args, kwargs)
        enabled, dtype = called.autocast
        shaped = tuple(
            value.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
            if isinstance(value, torch.Tensor) and value.dim() == 4
            else value
            for value, last in zip(args, (*called.channels_last, *[False] * len(args)), strict=False)
        )
        with torch.autocast(self._device, dtype=dtype, enabled=enabled):
            leaves, structure = pytree.tree_flatten(self._run(shaped, kwargs))
        kinds = (*self.returns, *[None] * len(leaves))
        cast = [leaf if kind is None else leaf.to(kind) for leaf, kind in zip(leaves, kinds, strict=False)]
        return pytree.tree_unflatten(cast, structure)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._other is self._module:
            return self._plain(*args, **kwargs)
        held = (*self._module.named_parameters(), *self._module.named_buffers())
        tensors = {self._names[_stripped(name)]: tensor for name, tensor in held}
        return functional_call(self._other, tensors, args, kwargs)


def _observed(step: Callable[[], Any], training: Training) -> dict[int, _Circumstances]:
    """Run a step once and note how its modules are called and what they return."""
    kind = training.device.type
    found: dict[int, _Circumstances] = {}

    def note(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        last = tuple(
            isinstance(value, torch.Tensor)
            and value.dim() == 4
            and value.is_contiguous(memory_format=torch.channels_last)
            and not value.is_contiguous()
            for value in args
        )
        found[id(module)] = _Circumstances(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            last,
            tuple(leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(output)),
        )

    hooks = [root.module.register_forward_hook(note, with_kwargs=True) for root in training.roots]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _paired(theirs: list[RootModule], ours: list[RootModule]) -> list[tuple[RootModule, RootModule]]:
    if len(theirs) != len(ours) or not ours:
        raise AdvisorError(
            f"the step trains {len(ours)} modules and the reference {len(theirs)}", expected="as many, one at least"
        )
    for a, b in zip(theirs, ours, strict=True):
        other, mine = ({_stripped(n): tuple(p.shape) for n, p in r.module.named_parameters()} for r in (a, b))
        if other != mine:
            odd = sorted({*other.items()} ^ {*mine.items()})[0]
            raise AdvisorError(
                f"{b.name} and the reference's {a.name} differ in parameter {odd[0]} {odd[1]}",
                expected="the same parameter names and shapes",
            )
    return list(zip(theirs, ours, strict=True))


def _stripped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper)
    return name
