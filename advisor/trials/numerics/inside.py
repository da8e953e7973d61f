"""A change judged inside of the model, where noise hides from end to end what is wrong, or makes what is right look wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Set
from typing import NamedTuple

import torch

from advisor.core.errors import first_line
from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.trials.numerics import layers, operations
from advisor.trials.numerics.bounds import worst_ratio
from advisor.trials.numerics.compared import TURNS, compare
from advisor.trials.numerics.plain import PlainStep, observe
from advisor.trials.numerics.rerun import BUFFER, PARAMETER
from advisor.trials.numerics.seen import Seen, bare, blocks, captured, leaves, observed

# The gradient that reaches the last layers may be off by this much: what stands behind them has no depth.
ARRIVES = 0.1
# How a detail goes on where layers were not judged: it is kept when the whole model is compared again.
UNCHECKED = "; its layers"


def speaks(found: Check, *, random: bool) -> bool:
    """Whether layers may change this: not where something is missing or no number, nor where an output is too far off, which has no depth
    that would excuse it. Nor where nothing differs by a bit, unless that is because a draw has dropped it.
    """
    if found.passed:
        return random or found.numbers.get("error") != 0.0
    return math.isfinite(found.numbers.get("of_bound", 0.0)) and "output" not in found.detail.split(" off by")[0]


def by_layers(plain: PlainStep, found: Check, on: Callable[[], None], off: Callable[[], None]) -> Check:
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
        return found
    if not all(id(p) in judged.told for p in trained):
        return dataclasses.replace(found, detail=f"{found.detail}{UNCHECKED} could not all be checked{judged.alone}")
    if not _outputs_within(plain, judged.right):
        return found
    if captured(plain) and not _as_uncaptured(plain).passed:
        return found
    detail = f"{found.detail} in the whole model, and each of {len(judged.right)} layers right by itself"
    return Check(passed=True, detail=detail, numbers={**found.numbers, "of_bound": 1.0})


def _outputs_within(plain: PlainStep, right: Set[str]) -> bool:
    """Whether outputs are within their bounds, and updates of the buffers that no module of these owns."""

    def counts(group: str) -> bool:
        return group.startswith("output") or (group.startswith("buffer") and group.rpartition(" of ")[2] not in right)

    for turn in range(TURNS):
        rolled = turn % 2 == 1
        apart = plain.moved(rolled=rolled, lift=plain.lift)
        apart.cosine = apart.scale = 1.0
        apart.l2 = {group: value for group, value in apart.l2.items() if counts(group)}
        apart.worst = {group: value for group, value in apart.worst.items() if counts(group)}
        if apart.broken or worst_ratio(apart, plain.repeats + plain.noise, plain.target_class)[0] > 1.0:
            return False
    return True


def _as_uncaptured(plain: PlainStep) -> Check:
    """The check of the captured step against the same change layer by layer, which is known to be right by now.

    What would round anew is no excuse: in a net that carries roundings on that would hide any fault of the graph's.
    """
    with bare(plain):
        step = observe(plain.call, plain.saved, Semantics.REASSOCIATED, plain.target_class, plain.target_class)
    step.noise = []
    return compare(step, Semantics.REASSOCIATED)[0]


class _Layers(NamedTuple):
    """What is wrong with a layer, if any is; modules that are right by themselves; identities of the parameters whose gradients are judged
    with these; a layer that could not be called by itself, and why.
    """

    wrong: str
    right: Set[str] = frozenset()
    told: Set[int] = frozenset()
    alone: str = ""


def _layers(plain: PlainStep, on: Callable[[], None], off: Callable[[], None]) -> _Layers:
    """What is told of all layers; leaves the change on."""
    root = plain.call.root.module
    if captured(plain):
        ratio, what = operations.wrong(plain, operations.observed(plain))
        if ratio > 1.0:
            return _Layers(f"{what} by itself {ratio:.1f} times as far off as its roundings allow")
    modules = leaves(root) | blocks(root)
    found, seen, far, lost = _looked_at(plain, modules, on, off)
    if lost:
        return _Layers(f"no gradient reaches {lost[0]} any more")
    if far > ARRIVES:
        return _Layers(f"the gradient of the last layers is off by {far:.1e}")
    wrong = {name for name, told in found.items() if told.wrong()}
    right = found.keys() - wrong
    inmost = [name for name in wrong if not any(other.startswith(f"{name}.") for other in wrong)]

    def answered(name: str, what: str) -> bool:
        """Whether a module that holds this one is right, and can tell: of what one layer leaves to another (a bias to the norm behind it),
        so that two are wrong, and of buffers, which are its own as well. Gradients of parameters are told of the layer alone.
        """
        around = [n for n in right if name.startswith(f"{n}.")]
        around = [n for n in around if (found[n].back if what.startswith("gradient") else found[n].forward)]
        several = any(sum(other.startswith(f"{n}.") for other in inmost) > 1 for n in around)
        alone = what.startswith(BUFFER) or what in found[name].shifted  # a norm without statistics leaves no second one
        return not what.startswith(PARAMETER) and (several or (alone and bool(around)))

    left = [(r, f"{what} of {n}") for n in wrong for what, r in found[n].wrong().items() if not answered(n, what)]
    if left:
        ratio, what = max(left)
        return _Layers(f"{what} by itself {ratio:.1f} times as far off as its roundings allow")
    alone = next((f" ({n}: {why})" for n, why in seen.uncalled.items() if n in leaves(root)), "")
    return _Layers("", right - seen.altered, {id(p) for told in found.values() for p in told.own}, alone)


def _looked_at(
    plain: PlainStep, modules: dict[str, torch.nn.Module], on: Callable[[], None], off: Callable[[], None]
) -> tuple[dict[str, layers.Told], Seen, float, list[str]]:
    """What is told of each of these, what was seen of them, and what `layers.arrived` says; leaves the change on."""
    with bare(plain):
        seen = observed(plain, modules, plain.lift)
    off()
    plain.saved.restore()
    with bare(plain):
        found = layers.judge(plain, modules, seen)
        far, lost = layers.arrived(plain, modules, seen)
    plain.saved.restore()
    on()
    return found, seen, far, lost
