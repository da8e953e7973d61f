"""What is looked at before a change is refused, because it is costly: noise that a few replays of the plain step do not show.

A change of order meets activations at the edge of zero, rare, and as large as a fault of one element where they are let through
or not. A change to half precision rounds in every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.trials.numerics.bounds import NOISE_FACTOR, worst_ratio
from advisor.trials.numerics.distance import Distance, distance
from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.precision import EPSILON, ROUNDED
from advisor.trials.numerics.replay import Result
from advisor.trials.numerics.seen import bare

# An activation within rounding of zero passes its gradient or not: rare, so that two runs with one rounding at the start seldom
# show it, and as large as a fault of one element. Before a change of order is refused, the plain step is run with as many
# roundings as sums over a thousand terms make (a random walk over 9 x 64 to 9 x 512 terms; 1.6e-6 of the output seen for
# channels_last on a CPU). Coarser classes round products once a layer, which the runs above show already. ResNet-18 at an
# eighth of its width: 6 of 16 right changes refused without it, 1 of 48 with it.
LAYERED_ROUNDINGS, LAYERED_SEEDS = 32.0, (3, 4, 5, 6, 7, 8)
# However far these runs go, they excuse no more than this of a group (ten times as much of an element), times NOISE_FACTOR: a
# gradient that is a third too large stays wrong.
LAYERED_MOST = 0.025
# A few draws do not bound the next: that an activation lies at the edge is rare, and what hangs on it may be nearly anything. But
# a point at an edge is rare, and a fault is not: it is as wrong at points close by. So a gradient that is refused all the same
# is judged there too, with weights and inputs moved by this much: a thousand roundings, so that other activations lie at the
# edge, and the step is else the same. More than half of these must pass (docs/notes/numerics.md#gradients-at-an-edge).
CLOSE_BY, CLOSE_SEEDS = 2.0**-12, (11, 12, 13, 14)
# A change to half precision rounds what every layer puts out, and its gradient; moving weights and inputs once does not show
# that where values are many times their spread, of which the next batch norm takes the mean away (a right bf16 step of a UNet
# on an H200: the last block's weight gradient off by 0.10, past the static bound and four times that noise). Before such a
# change is refused, the plain step is run with every layer's output and gradient rounded to bf16: 0.85 to 1.5 times what
# autocast does to the gradients of that UNet on a CPU. These are the change's own roundings, so a factor of two is enough.
ROUNDED_FACTOR = 2.0

Yardstick = Callable[[PlainStep], list[Distance]]


def yardstick(plain: PlainStep, semantics: Semantics) -> Yardstick | None:
    """What else tells the noise to expect of a change that promises this; None where nothing does."""
    if plain.unusable:
        return None
    if semantics is Semantics.REASSOCIATED and plain.target_class not in ROUNDED:
        return layered_noise
    if semantics is Semantics.PRECISION and plain.target_class == "half":
        return rounded_noise
    return None


def more_noise(plain: PlainStep, semantics: Semantics, on: Callable[[], None], off: Callable[[], None]) -> bool:
    """Add that noise to what is known of the plain step, once; whether there is any to know. Leaves the change on."""
    found = yardstick(plain, semantics)
    if found is None:
        return False
    if not plain.looked_closer:
        off()
        plain.noise += found(plain)
        plain.looked_closer = True
        on()
    return True


def rounded_noise(plain: PlainStep) -> list[Distance]:
    """How far the plain step goes when every layer's output, and its gradient, is rounded to bf16."""
    modules = list(plain.call.root.module.modules())
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(bare(plain))
        for layer in modules:
            if not any(layer.children()):
                hooks.callback(layer.register_forward_hook(_round_output).remove)
        run = plain.moved()
    return [] if run.broken else [run.times(ROUNDED_FACTOR / NOISE_FACTOR)]


def layered_noise(plain: PlainStep) -> list[Distance]:
    """How far the plain step goes for as much rounding as a sum in another order makes in every layer."""
    jitter = LAYERED_ROUNDINGS * EPSILON[plain.target_class]
    # In both orders of the rows: the same activations are at the edge, but with other gradients hanging on them.
    runs = [plain.moved(jitter=jitter, seed=seed, rolled=rolled) for rolled in (False, True) for seed in LAYERED_SEEDS]
    return [
        Distance(
            l2={group: min(value, LAYERED_MOST) for group, value in run.l2.items()},
            worst={group: min(value, 10 * LAYERED_MOST) for group, value in run.worst.items()},
            cosine=max(run.cosine, 1.0 - LAYERED_MOST),
            scale=min(max(run.scale, 1.0 - LAYERED_MOST), 1.0 + LAYERED_MOST),
        )
        for run in runs
        if not run.broken
    ]


def close_by(plain: PlainStep, refused: Check, on: Callable[[], None], off: Callable[[], None]) -> Check:
    """`refused`, or a check that passes where only an activation at an edge speaks against the change; leaves it on.

    So it is when outputs and buffers, which have no edges, are right everywhere; gradients are off by no more than
    the most that edges are let explain; the same call gives the same again; and gradients are right at most points close by.
    """
    noise = plain.repeats + plain.noise
    gradients = [group for group in plain.base.groups if group.startswith("gradient")]
    edge = Distance(
        l2=dict.fromkeys(gradients, LAYERED_MOST),
        worst=dict.fromkeys(gradients, 10 * LAYERED_MOST),
        cosine=1.0 - LAYERED_MOST,
        scale=1.0 + LAYERED_MOST,
    )

    def within(found: Distance, allowed: list[Distance]) -> bool:
        return not found.broken and worst_ratio(found, allowed, plain.target_class)[0] <= 1.0

    def at_points() -> list[Result]:
        return [plain.again(jitter=CLOSE_BY, seed=seed) for seed in CLOSE_SEEDS]

    first, again, rolled = plain.again(), plain.again(), plain.moved(rolled=True)
    off()
    bases = at_points()
    on()
    there = [distance(found, base) for found, base in zip(at_points(), bases, strict=True)]
    right = sum(within(found, noise) for found in there)
    if (
        2 * right <= len(there)
        or not within(distance(again, first), noise)
        or not all(within(found, [*noise, edge]) for found in (distance(first, plain.base), rolled, *there))
    ):
        return refused
    detail = (
        f"{refused.detail}, where activations are at the edge of zero; right at {right} of {len(there)} points close by"
    )
    return Check(passed=True, detail=detail, numbers={**refused.numbers, "of_bound": 1.0})


class _RoundedBf16(torch.autograd.Function):
    """The value rounded to bf16, and its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].bfloat16().to(gradients[0].dtype)


def _round_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: what the layer puts out is rounded to bf16."""
    if not isinstance(output, torch.Tensor) or output.dtype not in (torch.float32, torch.float64):
        return output
    return _RoundedBf16.apply(output)  # type: ignore[no-untyped-call]  # torch's own, without types
