"""Each layer by itself: what it makes, with a change on, of the very values that reach it there.

A deep net carries a rounding on: gradients of its first layers may be turned away by half precision alone, and nothing that is
compared from end to end tells that from a fault. A layer by itself does not: given what went into it and the gradient that came
back to it, the plain layer must give the same but for its own roundings, however far both are from the plain step's values.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from advisor.core.errors import first_line
from advisor.trials.numerics.distance import BATCH_ELEMENTS, rows
from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.precision import EPSILON
from advisor.trials.numerics.rerun import BUFFER, PARAMETER, Rerun
from advisor.trials.numerics.seen import Layer, Seen, inside, leaves

# A layer's own roundings: of its inputs, its weights, its output, and sums of them. Products of one layer are off by 0.8 to 1.5 of these.
_ROUNDINGS = 8.0
# Of gradients of parameters, sums over all pixels, which some of torch's own kernels add up in half precision (CPU, layer norm: 0.09).
_SUMMED = 50.0
# And so many times what the plain layer does when values and gradients that reach it are moved by one rounding each.
_NOISE_FACTOR = 3.0
# Of modules with others inside, whose activations may be at an edge: gradients off by so much, by what one value of them is when it weighs
# as much as this many, or by so many times their noise, are no fault.
_EDGES, _EDGE, _EDGES_FACTOR = 0.1, 4.0, 4.0
_LEAST = 1e-4  # where no layer rounds to half or TF32: another order of its sums
_ELEMENT_FACTOR = 6.0
_ELEMENT = 0.5  # of one element, in its neighbours' scale
_DRAWS = 2
# Where one rounding does more than the first, only what is missing or turned round is told; above the second the layer's result is
# rounding, and says nothing (a gradient that a norm cancels).
_LITTLE, _NOTHING = 0.3, 0.8
# Roundings, and activations at an edge, go in all directions: along the plain result little is left of them. What is larger or smaller as a
# whole shows there.
_SHARE, _SHARE_FACTOR = 0.15, 4.0
# Of a module with others inside, beyond its bound by less than this: an activation at an edge is rare, so more draws are looked at.
_NEARLY, _MORE_DRAWS = 3.0, 6
# And below this a module's word is taken on those inside of it. (Twice as much of an update of statistics, which are right or another
# batch's.)
_SHARP, _SHARP_BUFFER = 0.1, 0.2
_TURNED, _TURNED_FACTOR = 0.98, 2.5
# What a layer that draws random numbers gives along the mean of its plain draws may be this far from one, and this many times as far as they.
_RANDOM, _RANDOM_FACTOR, _RANDOM_DRAWS = 0.1, 3.0, 4
_SCALED_PARAMETERS = 5
_SCALED = 3  # powers of two from which on a difference is a loss scale
# All together take no longer than this, or than so many steps: of a net whose steps take seconds a part is judged (RepLKNet-31B in fp32,
# whose 31 x 31 layers without tuned algorithms kept a search of five minutes for two).
MOST_S, MOST_STEPS = 20.0, 8.0
_RANDOM_VALUES = 512  # of fewer nothing is said: chance leaves too much


class Apart(NamedTuple):
    """The relative L2 error, the worst element's in its neighbours' scale, and how far from one the share along the plain result is."""

    error: float = 0.0
    element: float = 0.0
    along: float = 0.0


class Told(NamedTuple):
    """Of a module: by result its error over the bound, whether noise leaves what it gives forward, and back, well to be told, and whose
    gradients these are.
    """

    ratios: dict[str, float]
    forward: bool
    back: bool
    own: list[torch.nn.Parameter]
    shifted: frozenset[str] = frozenset()  # outputs that are off by a constant a channel alone, as by a bias

    def wrong(self) -> dict[str, float]:
        """What is beyond its bound."""
        return {name: ratio for name, ratio in self.ratios.items() if ratio > 1.0}


def judge(plain: PlainStep, modules: dict[str, Layer], seen: Seen) -> dict[str, Told]:
    """What is told of each module whose calls were seen, against the plain modules, which are on now; `seen.unjudged` of those for which
    there was no time.
    """
    until = time.monotonic() + max(MOST_S, MOST_STEPS * plain.base.seconds)
    complete = {
        name: module
        for name, module in modules.items()
        if seen.calls[name] and all(call.output is not None and call.output.numel() for call in seen.calls[name])
    }
    own = owned(plain.call.root.module, complete)
    again = {name: Rerun(plain, name, module, own[name], seen) for name, module in complete.items()}
    seen.scale = _scale(list(again.values()))
    # A sequence computes nothing between its layers, and what holds most of a model is as far from end to end as the model: these only
    # answer for what one layer leaves to another.
    many = sum(not rerun.holds for rerun in again.values()) / 2
    parts = inside(plain.call.root.module, again)
    later = {
        n
        for n, rerun in again.items()
        if rerun.holds and not own[n] and (_listed(rerun) or sum(not again[p].holds for p in parts[n]) > many)
    }
    # Those without others inside first: where there is no time for all, these have the kernels and the parameters.
    wanted = sorted((rerun for name, rerun in again.items() if name not in later), key=lambda rerun: rerun.holds)
    found = _compared(wanted, until)
    seen.unjudged = sum(rerun.name not in found and rerun.name not in seen.uncalled for rerun in wanted)
    wrong = [name for name, told in found.items() if told.wrong()]
    holding = {name for name in again if name not in seen.uncalled and parts[name].intersection(wrong)}
    for name in holding if not seen.unjudged else ():
        base = _results(again[name])
        if base is not None:
            found[name] = _closely(again[name], base)
    for parameter in plain.call.root.module.parameters():
        parameter.grad = None
    return found


def _listed(rerun: Rerun) -> bool:
    return type(rerun.module) is torch.nn.Sequential


def owned(root: Layer, modules: dict[str, Layer]) -> dict[str, list[torch.nn.Parameter]]:
    """By module the parameters that are judged with it: those that no module inside of it, of these, has. Shared ones with none: their
    gradients are sums over several.
    """
    owners = Counter(id(p) for module in leaves(root).values() for p in module._parameters.values())
    taken: set[int] = set()
    found = {}
    for name in sorted(modules, key=lambda name: -name.count(".")):
        mine = [p for p in modules[name].parameters() if p.requires_grad and id(p) not in taken]
        taken |= set(map(id, mine))
        found[name] = [p for p in mine if owners[id(p)] <= 1]
    return found


def _scale(again: list[Rerun]) -> float:
    """How many times as large gradients were inside the backward pass as those that it left (a loss scale): a power of two."""
    powers: list[float] = []
    for rerun in again:
        left = rerun.seen.gradients
        if len(powers) >= _SCALED_PARAMETERS or not any(left.get(id(p)) is not None for p in rerun.own):
            continue
        base = _results(rerun)
        if base is None:
            continue
        for place, parameter in enumerate(rerun.own):
            gradient = left.get(id(parameter))
            sizes = float(base[f"{PARAMETER} {place}"].norm()), 0.0 if gradient is None else float(gradient.norm())
            if all(0.0 < size < math.inf for size in sizes):
                powers.append(math.log2(sizes[0] / sizes[1]))
    power = round(statistics.median(powers)) if powers else 0
    return 2.0**power if abs(power) >= _SCALED else 1.0


def _compared(again: list[Rerun], until: float) -> dict[str, Told]:
    """Told by bounds that hold without any noise, as most of what is right is within these; else closely. Up to this time."""
    told: dict[str, Told] = {}
    for several in _batches(again):
        if time.monotonic() > until:
            break
        pairs = [(rerun, rerun.found(), base) for rerun in several if (base := _results(rerun)) is not None]
        every = iter(
            _errors([f[n] for _, f, base in pairs for n in base], [t for _, _, base in pairs for t in base.values()])
        )
        for rerun, _, base in pairs:
            ratios = error_ratios(rerun, base, dict.fromkeys(base, Apart()), {name: next(every) for name in base})
            right = max(ratios.values(), default=0.0) <= 1.0
            told[rerun.name] = Told(ratios, False, False, rerun.own) if right else _closely(rerun, base)
    return told


def _results(rerun: Rerun) -> dict[str, torch.Tensor] | None:
    """What the module leaves now; None, and noted, where it is not to be called by itself."""
    try:
        return rerun.results()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the module's own: it reads what only its model has set, or takes what was not kept
        rerun.seen.uncalled[rerun.name] = first_line(error)
        return None


def _batches(again: list[Rerun]) -> Iterator[list[Rerun]]:
    """As many as have room beside the step: each comparison by itself would wait for the device."""
    several: list[Rerun] = []
    elements = 0
    for rerun in again:
        several.append(rerun)
        elements += 2 * sum(call.output.numel() for call in rerun.calls if call.output is not None)
        if elements > BATCH_ELEMENTS:
            yield several
            several, elements = [], 0
    if several:
        yield several


def _closely(rerun: Rerun, base: dict[str, torch.Tensor]) -> Told:
    """Told by what one rounding of all that goes in does to the plain module."""
    found, draws = rerun.found(), range(1, _DRAWS + 1)
    noisy = _noisy(rerun, base, draws)
    told = error_ratios(rerun, base, noisy, apart(found, base))
    if rerun.holds and 1.0 < max(told.values(), default=0.0) < _NEARLY:
        more = _noisy(rerun, base, range(_DRAWS + 1, _DRAWS + _MORE_DRAWS + 1))
        noisy = {name: Apart(*map(max, noisy[name], more[name])) for name in base}
        told = error_ratios(rerun, base, noisy, apart(found, base))
    sharp = {n: most.error <= (_SHARP_BUFFER if n.startswith(BUFFER) else _SHARP) for n, most in noisy.items()}
    if any(ratio > 1.0 for ratio in told.values()) and (half := _in_half(rerun)) is not None:
        other = error_ratios(rerun, half, noisy, apart(found, half))
        told = {name: min(ratio, other[name]) for name, ratio in told.items()}
    if rerun.plain.random and any(ratio > 1.0 for ratio in told.values()):
        others = [rerun.results(-seed) for seed in range(1, _RANDOM_DRAWS + 1)]
        drawn = apart(others[0], others[1])
        for name in [name for name, ratio in told.items() if ratio > 1.0]:
            if drawn[name].error > _RANDOM_FACTOR * noisy[name].error:
                sharp[name] = False
                told[name] = _along(found[name], [other[name] for other in others])
    forward = all(value for name, value in sharp.items() if not name.startswith("gradient"))
    shifted = {
        name
        for name, ratio in told.items()
        if ratio > 1.0 and name.startswith("output") and _shifted(rerun, name, found[name], base[name], noisy[name])
    }
    return Told(told, forward, all(sharp.values()), rerun.own, frozenset(shifted))


def _shifted(rerun: Rerun, name: str, found: torch.Tensor, base: torch.Tensor, usual: Apart) -> bool:
    """Whether nothing but a constant a channel, [N, C, ...], lies between the two."""
    if found.shape != base.shape or found.dim() < 3:
        return False
    off = found.float() - base.float()
    rest = off - off.mean([0, *range(2, off.dim())], keepdim=True)
    least = bound(name, rerun.plain.target_class, usual.error, base.numel() if rerun.holds else 0)
    return float(rest.norm()) <= least * float(base.float().norm())


def _noisy(rerun: Rerun, base: dict[str, torch.Tensor], seeds: range) -> dict[str, Apart]:
    """By result the most that one rounding of all that goes in does, in so many draws."""
    noise = [apart(rerun.results(seed), base) for seed in seeds]
    return {name: Apart(*map(max, zip(*(draw[name] for draw in noise), strict=True))) for name in base}


def error_ratios(
    rerun: Rerun, base: dict[str, torch.Tensor], noisy: dict[str, Apart], errors: dict[str, Apart]
) -> dict[str, float]:
    """By result the error over its bound; 0 where it tells nothing."""
    holds, ratios = rerun.holds, {}
    for name, found in errors.items():
        usual = noisy[name]
        if name == rerun.left_out and not bool(rerun.found()[name].any()):
            ratios[name] = 0.0
            continue
        if usual.error > _NOTHING and math.isfinite(found.error):
            # Of a bias that a norm cancels the gradient may be left out.
            gone = name.startswith(PARAMETER) and base[name].dim() > 1 and not bool(rerun.found()[name].any())
            ratios[name] = math.inf if gone and bool(base[name].any()) else 0.0
            continue
        least = bound(name, rerun.plain.target_class, usual.error, base[name].numel() if holds else 0)
        ratios[name] = found.error / least
        if base[name].numel() >= _RANDOM_VALUES:
            ratios[name] = max(ratios[name], found.along / max(_SHARE, _SHARE_FACTOR * usual.along))
        if name.startswith("output"):
            ratios[name] = max(ratios[name], found.element / max(_ELEMENT, _ELEMENT_FACTOR * usual.element))
    return ratios


def _in_half(rerun: Rerun) -> dict[str, torch.Tensor] | None:
    """What PyTorch's own half precision makes of the module, where it was given or gave that: some of its kernels add up in it."""
    seen = (t for call in rerun.calls for t in (*call.inputs, call.output) if isinstance(t, torch.Tensor))
    dtype = next((t.dtype for t in seen if t.dtype in (torch.bfloat16, torch.float16)), None)
    try:
        return None if dtype is None else rerun.results(half=dtype)
    except RuntimeError:  # a layer that does not take it
        return None


def bound(name: str, target_class: str, noisy: float, inner: int) -> float:
    """How large an error may be of what one rounding of all that goes in moves by `noisy`; `inner`: how many values of it there are, where
    there are activations inside, which may be at an edge; else 0.
    """
    if noisy > _LITTLE:
        return max(_TURNED, _TURNED_FACTOR * noisy)
    roundings = _SUMMED if name.startswith(PARAMETER) else _ROUNDINGS
    least, factor = max(roundings * EPSILON[target_class], _LEAST), _NOISE_FACTOR
    if inner:
        least, factor = max(least, name.startswith("gradient") * max(_EDGES, _EDGE / math.sqrt(inner))), _EDGES_FACTOR
    return max(least, factor * noisy)


def _along(found: torch.Tensor, draws: list[torch.Tensor]) -> float:
    """How far what random numbers leave is, along the mean of the plain draws, from what these are."""
    mean = torch.stack([draw.double() for draw in draws]).mean(0)
    size = float((mean * mean).sum())
    if not size or mean.numel() < _RANDOM_VALUES:
        return 0.0
    shares = [float((draw.double() * mean).sum()) / size for draw in draws]
    spread = max(shares) - min(shares)
    # The mean of few draws holds a part of each of them; the others' is what a new one is held against.
    others = [float((draw.double() * (mean * len(draws) - draw.double())).sum()) / (len(draws) - 1) for draw in draws]
    middle = sum(others) / len(others) / size
    own = float((found.double() * mean).sum()) / size
    return abs(own / middle - 1.0) / (_RANDOM + _RANDOM_FACTOR * spread) if middle > 0 else 0.0


def apart(found: dict[str, torch.Tensor], base: dict[str, torch.Tensor]) -> dict[str, Apart]:
    """By name how far the two are apart."""
    return dict(zip(base, _errors([found[name] for name in base], list(base.values())), strict=True))


def _errors(found: list[torch.Tensor], base: list[torch.Tensor]) -> list[Apart]:
    """Infinite where finite values became infinite or NaN."""
    return [
        Apart(
            error=(math.inf if row[5] else math.sqrt(row[0] / (row[1] or row[3])) if row[0] else 0.0),
            element=math.inf if row[5] else row[4],
            along=abs(row[2] / row[1] - 1.0) if row[1] and row[3] else 0.0,
        )
        for row in rows(list(map(_wide, found)), list(map(_wide, base)))
    ]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() else tensor
