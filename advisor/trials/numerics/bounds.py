"""How far a change may be off: static bounds by class of precision, and the plain step's own noise.

Sources: torch.testing tolerances by dtype (1.3e-6 fp32, 1e-3 fp16, 1.6e-2 bf16 for one operator; deep nets accumulate);
torch._dynamo.utils.same (error against the reference's own error, multiplied by 2 to 10).
"""

from __future__ import annotations

import math

from advisor.core.findings import Semantics
from advisor.core.units import percent_text
from advisor.core.verdict import Check
from advisor.trials.numerics.distance import OWN, Distance
from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.precision import ROUNDED

# Static bounds per class: relative L2 of outputs; of gradients and buffer updates; worst element. Ten to a hundred times
# one operator's tolerance, for tens of layers in a row; a wrong operator is off by 1e-1 to 1.
_STATIC = {
    "fp64": (1e-10, 1e-9, 1e-6),
    "fp32": (1e-4, 1e-3, 2e-2),
    "tf32": (1e-2, 3e-2, 3e-1),
    "half": (3e-2, 1e-1, 1.0),
}
# A change may be this many times as far off as the plain step's own noise: roundings enter at every layer, the noise runs
# move only weights and inputs.
NOISE_FACTOR = 4.0
# One more draw of a model's random layers may be this many times as far from the plain step's draw as the farthest of its others.
DRAW_FACTOR = 2.0
# And of one small parameter's gradient: there are a hundred of them, and the farthest of eight draws is little to go by for each.
_OWN_DRAW_FACTOR = 4.0
# Never accepted, however noisy the step: an error as large as the signal. (A missing update has a relative error of 1.) A small
# parameter's gradient by itself may be off by this much at least: it is bf16 in a net of four layers that takes it to 0.6.
CEILING = 0.9
# Unless the plain step itself is chaotic there: where rounding its weights and inputs once to the compute dtype already moves a
# group by a quarter of its size (first layers of a deep net just begun, seen on ResNet-50 in bf16: 0.25 of itself for one
# rounding, 1.2 for a rounding in every layer), its direction tells nothing and only its size is judged; the other groups and
# the loss envelope judge the change. Two unrelated vectors of one length are 1.41 apart, and further where their lengths differ
# from draw to draw: then this many times the farthest of the plain step's own draws. (Squeeze layers of a RegNetY in bf16: draws 1.44
# and 1.68 from the plain step; squeeze-and-excite kernels, which computed what they should, 1.99, and were refused.)
_CHAOTIC_CEILING = _CHAOTIC_FACTOR = 1.5
# One small parameter of a hundred is that sooner: where one rounding moves its gradient by a sixth, it is judged in its pool alone.
_OWN_CHAOTIC = 0.7
# Single elements have heavier tails than norms when every layer rounds.
_ELEMENT_FACTOR = {"half": 8.0, "tf32": 8.0}


def judged(name: str, found: Distance, plain: PlainStep, semantics: Semantics) -> Check:
    """The check of one root: `found` against what the plain step's noise and the class allow."""
    if found.broken:
        return Check(passed=False, detail=f"{name}: {found.broken}", numbers={"of_bound": math.inf})
    repeatable = all(d.largest == 0.0 for d in plain.repeats)
    if semantics is Semantics.EXACT and repeatable:
        if found.largest == 0.0:
            return Check(passed=True, detail=f"{name}: bit-equal", numbers={"error": 0.0, "of_bound": 0.0})
        group = max(found.l2, key=lambda g: found.l2[g])
        detail = f"{name}: {group} differs by {found.l2[group]:.1e}, and this change promises bit-equal results"
        if not plain.seeds:
            return Check(passed=False, detail=detail, numbers={"error": found.largest, "of_bound": math.inf})
    noise = plain.repeats + plain.noise
    ratio, group, error = worst_ratio(found, noise, plain.target_class)
    numbers = {"error": error, "of_bound": ratio, "cosine": found.cosine, "scale": found.scale}
    numbers["noise"] = max((d.l2.get(group, 0.0) for d in noise), default=0.0)
    if ratio <= 1.0:
        return Check(
            passed=True,
            detail=f"{name}: {group} off by {error:.1e}, {percent_text(ratio)} of the bound",
            numbers=numbers,
        )
    if plain.seeds:
        # Random layers draw other numbers when kernels or layouts change: then the step is one more draw, no worse.
        another = {
            g: (_OWN_DRAW_FACTOR if g.startswith(OWN) else DRAW_FACTOR) * max(d.l2.get(g, 0.0) for d in plain.seeds)
            for g in found.l2
        }
        bounds = {g: max(another[g], _bound(g, plain.target_class, noise)) for g in found.l2}
        beyond = max(found.l2, key=lambda g: found.l2[g] / bounds[g])
        if found.l2[beyond] > bounds[beyond]:
            times = found.l2[beyond] / bounds[beyond]
            detail = f"{name}: random layers; {beyond} {times:.1f} times as far off as other seeds allow"
            return Check(passed=False, detail=detail, numbers={**numbers, "of_bound": times})
        if abs(found.scale - 1.0) <= 0.05 + 2.0 * max(abs(d.scale - 1.0) for d in plain.seeds):
            drawn = max((found.l2[g] / (another[g] or math.inf) for g in found.l2), default=0.0)
            detail = f"{name}: random layers; as far from the plain step as another seed ({percent_text(drawn)} of the bound)"
            return Check(passed=True, detail=detail, numbers={**numbers, "of_bound": drawn})
    return Check(
        passed=False, detail=f"{name}: {group} off by {error:.1e}, {ratio:.1f} times the bound", numbers=numbers
    )


def _bound(group: str, target_class: str, noise: list[Distance]) -> float:
    static = _STATIC[target_class][0 if group.startswith("output") else 1]
    farthest = max((d.l2.get(group, 0.0) for d in noise), default=0.0)
    noisy = NOISE_FACTOR * farthest
    # A running statistic that has converged on the batch it sees (fake data: the same one each step) is moved by rounding alone: its
    # update may be any number of times as large as that of the plain step, and only the noise, measured beside it, bounds it.
    # bf16 of an EfficientNet, a DenseNet and a RegNet was refused on an H200 for updates 1.6 to 2.3 times their size off.
    chaotic = target_class in ROUNDED and noisy >= CEILING and not group.startswith("output")
    if group.startswith(OWN):
        return math.inf if target_class in ROUNDED and noisy >= _OWN_CHAOTIC else max(CEILING, noisy)
    if chaotic:
        return max(_CHAOTIC_CEILING, noisy if group.startswith("buffer") else _CHAOTIC_FACTOR * farthest)
    return min(CEILING, max(static, noisy))


def worst_ratio(found: Distance, noise: list[Distance], target_class: str) -> tuple[float, str, float]:
    """(error over bound, what it is of, error), of whichever quantity is nearest its bound or farthest past it."""
    rows = [(found.l2[g] / _bound(g, target_class, noise), g, found.l2[g]) for g in found.l2]
    for group, value in found.worst.items():
        factor = _ELEMENT_FACTOR.get(target_class, NOISE_FACTOR)
        noisy = factor * max((d.worst.get(group, 0.0) for d in noise), default=0.0)
        rows.append((value / max(_STATIC[target_class][2], noisy), f"one element of {group}", value))
    static = _STATIC[target_class][1]
    for what, value, of_noise in (
        ("the gradient's direction", 1.0 - found.cosine, [1.0 - d.cosine for d in noise]),
        ("the gradient's scale", abs(found.scale - 1.0), [abs(d.scale - 1.0) for d in noise]),
    ):
        # As for single groups: where one rounding already turns the gradient, roundings in every layer may turn it further.
        ceiling = CEILING if target_class in ROUNDED else 0.5
        rows.append((value / min(ceiling, max(0.5 * static, NOISE_FACTOR * max(of_noise, default=0.0))), what, value))
    return max(rows)


def joined(checks: list[Check]) -> Check:
    """One check from several: failed when one failed, not made when one could not be made, else the nearest to its bound."""
    if not checks:
        return Check(passed=None, detail="nothing could be compared")
    for outcome in (False, None):
        for check in checks:
            if check.passed is outcome:
                return check
    return max(checks, key=lambda c: c.numbers.get("of_bound", 0.0))
