"""A change judged inside of the model, where noise hides from end to end what is wrong, or makes what is right look wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Set
from typing import NamedTuple

import torch

from advisor.core.errors import first_line
from advisor.core.findings import Semantics
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.transforms.forward import GRAPH, ForwardStack
from advisor.transforms.replay import untuned
from advisor.trials.numerics import arrival, layers, operations
from advisor.trials.numerics.appeal import more_noise
from advisor.trials.numerics.bounds import worst_ratio
from advisor.trials.numerics.compared import TURNS, compare
from advisor.trials.numerics.layout import many_taps_in_nchw
from advisor.trials.numerics.plain import PlainStep, observe
from advisor.trials.numerics.rerun import BUFFER, PARAMETER
from advisor.trials.numerics.room import fewer, free_bytes
from advisor.trials.numerics.seen import Seen, bare, blocks, captured, inside, leaves, observed

# Copies of what operations are given and give may take this share of the free memory at a time.
_OPERATIONS_ROOM = 0.4
# How a detail goes on where layers were not judged: it is kept when the whole model is compared again.
UNCHECKED = "; its layers"


def speaks(found: Check, *, random: bool) -> bool:
    """Whether layers may change this: not where something is missing or no number, nor where an output is too far off, which has no depth
    that would excuse it. Nor where nothing differs by a bit, unless that is because a draw has dropped it.
    """
    if found.passed:
        return random or found.numbers.get("error") != 0.0
    return math.isfinite(found.numbers.get("of_bound", 0.0)) and "output" not in found.detail.split(" off by")[0]


def by_layers(
    plain: PlainStep, found: Check, semantics: Semantics, on: Callable[[], None], off: Callable[[], None]
) -> Check:
    """`found`, unless each layer by itself says otherwise; leaves the change on.

    A layer that is wrong of itself is a fault, whatever the noise is end to end. And where all that is trained is in layers
    that are right, gradients that are far from the plain step's are what its roundings lead to, if outputs are within their bounds.
    """
    name = plain.call.root.name
    try:
        judged = _layers(plain, on, off)
    except Exception as error:  # no room for it, or a module of the script's that is not to be called by itself
        off()
        plain.saved.restore()
        on()
        return dataclasses.replace(
            found, detail=f"{found.detail}{UNCHECKED} could not be checked ({first_line(error)})"
        )
    if judged.wrong:
        return Check(passed=False, detail=f"{name}: {judged.wrong}", numbers={**found.numbers, "of_bound": math.inf})
    trained = (p for p in plain.call.root.module.parameters() if p.requires_grad)
    if found.passed:
        partly = f"{UNCHECKED} could not all be checked{judged.alone}" if judged.unjudged else ""
        return dataclasses.replace(found, detail=f"{found.detail}{partly}")
    if not all(id(p) in judged.told for p in trained):
        return dataclasses.replace(found, detail=f"{found.detail}{UNCHECKED} could not all be checked{judged.alone}")
    against = outputs_off(plain, judged.right)
    if against and more_noise(plain, semantics, on, off):
        against = outputs_off(plain, judged.right)
    against = against or _captured_off(plain)
    if against:
        return dataclasses.replace(found, detail=f"{found.detail}{UNCHECKED} are right by themselves, but {against}")
    detail = f"{found.detail} in the whole model, and each of {len(judged.right)} layers right by itself"
    return Check(passed=True, detail=detail, numbers={**found.numbers, "of_bound": 1.0})


def outputs_off(plain: PlainStep, right: Set[str]) -> str:
    """Which output is out of its bounds, or which update of a buffer that no module of these owns; "" for none."""

    def counts(group: str) -> bool:
        return group.startswith("output") or (group.startswith("buffer") and group.rpartition(" of ")[2] not in right)

    for turn in range(TURNS):
        rolled = turn % 2 == 1
        apart = plain.moved(rolled=rolled, lift=plain.lift)
        if apart.broken:
            return apart.broken
        apart.cosine = apart.scale = 1.0
        apart.l2 = {group: value for group, value in apart.l2.items() if counts(group)}
        apart.worst = {group: value for group, value in apart.worst.items() if counts(group)}
        ratio, group, error = worst_ratio(apart, plain.repeats + plain.noise, plain.target_class)
        if ratio > 1.0:
            return f"{group} off by {error:.1e}, {ratio:.1f} times the bound"
    return ""


def _captured_off(plain: PlainStep) -> str:
    """What speaks against the captured step, if anything does, where layer by layer the same change is known to be right; "" for nothing.

    It is held against that. In a net that carries roundings on, kernels that round elsewhere make it another step, of which no size of
    an error tells anything. Each operation has been judged by itself by then; what is left is how they are joined, and that a replayed
    graph does what was captured. Neither rounds anew: with PyTorch's operations the captured step is the uncaptured one, and
    a replay is what it replays.
    """
    if not captured(plain) or _same(plain, bare(plain)).passed:
        return ""
    modules = list(plain.call.root.module.modules())
    with operations.by_pytorch(plain):
        check = _same(plain, bare(plain))
    if check.passed and any(ForwardStack.of(m).get(GRAPH) is not None for m in modules):
        check = _same(plain, ForwardStack.without(modules, GRAPH))
    return "" if check.passed else f"captured it is another step: {check.detail}"


def _same(plain: PlainStep, otherwise: contextlib.AbstractContextManager[None]) -> Check:
    """The check of the step as it is against what it is inside `otherwise`, where nothing rounds anew."""
    with otherwise:
        step = observe(plain.call, plain.saved, Semantics.REASSOCIATED, plain.target_class, plain.target_class)
    step.noise = []
    return compare(step, Semantics.REASSOCIATED)[0]


class _Layers(NamedTuple):
    """What is wrong with a layer, if any is; modules that are right by themselves; identities of the parameters whose gradients are judged
    with these; a layer that could not be called by itself, and why, or how many there was no time for.
    """

    wrong: str
    right: Set[str] = frozenset()
    told: Set[int] = frozenset()
    alone: str = ""
    unjudged: int = 0


def _layers(plain: PlainStep, on: Callable[[], None], off: Callable[[], None]) -> _Layers:
    """What is told of all layers; leaves the change on."""
    root = plain.call.root.module
    if captured(plain):
        for calls in operations.observed(plain, _OPERATIONS_ROOM * free_bytes(plain.saved.device)):
            with untuned():
                ratio, what = operations.wrong(plain, calls)
            if ratio > 1.0:
                return _Layers(f"{what} by itself {ratio:.1f} times as far off as its roundings allow")
    modules = leaves(root) | blocks(root)
    found, seen, far, lost = _with_room(plain, modules, on, off)
    if lost:
        return _Layers(f"no gradient reaches {lost[0]} any more")
    if far:
        return _Layers(f"the gradient of the last layers is off by {far:.1e}")
    wrong = {name for name, told in found.items() if told.wrong()}
    right = found.keys() - wrong
    parts = inside(root, found)
    inmost = {name for name in wrong if not parts[name] & wrong}

    def answered(name: str, what: str) -> bool:
        """Whether a module that holds this one is right, and can tell: of what one layer leaves to another (a bias to the norm behind it),
        so that two are wrong, and of buffers, which are its own as well. Gradients of parameters are told of the layer alone.
        """
        around = [n for n in right if name in parts[n]]
        around = [n for n in around if (found[n].back if what.startswith("gradient") else found[n].forward)]
        several = any(len(parts[n] & inmost) > 1 for n in around)
        if seen.unjudged:  # who holds it was not asked
            several, around = several or len(inmost) > 1, around or [name]
        alone = what.startswith(BUFFER) or what in found[name].shifted  # a norm without statistics leaves no second one
        return not what.startswith(PARAMETER) and (several or (alone and bool(around)))

    left = [(r, f"{what} of {n}") for n in wrong for what, r in found[n].wrong().items() if not answered(n, what)]
    if left:
        ratio, what = max(left)
        return _Layers(f"{what} by itself {ratio:.1f} times as far off as its roundings allow")
    alone = next((f" ({n}: {why})" for n, why in seen.uncalled.items() if n in leaves(root)), "")
    if seen.unjudged:
        alone = f" (no time for {counted(seen.unjudged, 'layer')} of {len(found) + seen.unjudged})"
    told_of = {id(p) for told in found.values() for p in told.own}
    return _Layers("", right - seen.altered, told_of, alone, seen.unjudged)


def _with_room(
    plain: PlainStep, modules: dict[str, torch.nn.Module], on: Callable[[], None], off: Callable[[], None]
) -> tuple[dict[str, layers.Told], Seen, float, list[str]]:
    """As `_looked_at`, of as many samples as there is memory for."""
    full: torch.OutOfMemoryError | None = None
    for part in fewer(plain):
        try:
            return _looked_at(part, modules, on, off)
        except torch.OutOfMemoryError as error:
            full = error.with_traceback(None)  # its frames hold the copies
        off()
        plain.saved.restore()
        if plain.saved.device.type == "cuda":
            torch.cuda.empty_cache()
        on()
    assert full is not None  # there is at least one part
    raise full


def _looked_at(
    plain: PlainStep, modules: dict[str, torch.nn.Module], on: Callable[[], None], off: Callable[[], None]
) -> tuple[dict[str, layers.Told], Seen, float, list[str]]:
    """What is told of each of these, what was seen of them, and what `arrival.arrived` says; leaves the change on."""
    with bare(plain), untuned(), many_taps_in_nchw(plain.call.root.module):
        seen = observed(plain, modules, plain.lift)
    off()
    plain.saved.restore()
    with bare(plain), untuned():
        found = layers.judge(plain, modules, seen)
        far, lost = arrival.arrived(plain, modules, seen)
    plain.saved.restore()
    on()
    return found, seen, far, lost
