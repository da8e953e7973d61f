"""The numeric gate: does the training step still compute what it computed, on the live model, without moving it an inch.

At a step boundary each root module's latest call is replayed from saved state: same inputs, same random state, same
output gradients; forward, backward, buffers. (The output gradients have the captured ones' size and random signs: backward is
linear in them, so any fault shows, and a net that has learnt its batch by heart, whose own gradients are all cancellation,
is judged like any other.) The plain step is replayed several times to learn its own noise (repeats;
inputs and weights moved by one rounding of the compute dtype; other seeds for models with dropout), then the step with the
change. Parameters, buffers, gradients, random state and plain attributes are put back, and a fingerprint over their
bits says so.

Errors are relative L2 over a group of tensors, the worst element against its neighbours' scale, and the scale and cosine
of the whole gradient. Small tensors are pooled: a tensor of ten values with a true gradient of zero says nothing alone.

Sources: torch.testing tolerances by dtype (1.3e-6 fp32, 1e-3 fp16, 1.6e-2 bf16 for one operator; deep nets accumulate);
torch._dynamo.utils.same (error against the reference's own error, multiplied by 2 to 10).
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.profiling.discover import capture_next_step
from advisor.profiling.steps import StepWatcher
from advisor.profiling.training import RootModule, Training
from advisor.transforms.forward import CAPTURE, ForwardStack

# Half a unit in the last place: what one rounding in this class moves a value by.
_EPSILON = {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "half": 2.0**-9}
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
# Never accepted, however noisy the step: an error as large as the signal. (A missing update has a relative error of 1.)
_CEILING = 0.9
# Unless the plain step itself is chaotic there: where rounding its weights and inputs once to the compute dtype already moves a
# group by a quarter of its size (first layers of a deep net just begun, seen on ResNet-50 in bf16: 0.25 of itself for one
# rounding, 1.2 for a rounding in every layer), its direction tells nothing and only its size is judged; the other groups and
# the loss envelope judge the change. Two unrelated vectors of one length are 1.41 apart.
_CHAOTIC_CEILING = 1.5
# A running statistic that has converged on the batch it sees (fake data: the same one each step) is moved by rounding alone: its
# update may be any number of times as large as that of the plain step, and only the noise, measured beside it, bounds it.
# bf16 of an EfficientNet, a DenseNet and a RegNet was refused on an H200 for updates 1.6 to 2.3 times their size off.
_ROUNDED = ("half", "tf32")
# Single elements have heavier tails than norms when every layer rounds.
_ELEMENT_FACTOR = {"half": 8.0, "tf32": 8.0}
# Tensors below this many values are pooled with others of their kind (batch-norm weights, biases).
_SMALL = 4096
# A group much weaker than the model's mean gradient (a bias before batch norm: truly zero) is measured against that.
_FLOOR = 1e-3
# While a change of precision overflows, output gradients are lowered by this factor, as a GradScaler would.
_LOWER, _LOWER_TRIES = 2.0**-4, 5
# An activation within rounding of zero passes its gradient or not: rare, so that two runs with one rounding at the start seldom
# show it, and as large as a fault of one element. Before a change of order is refused, the plain step is run with as many
# roundings as sums over a thousand terms make (a random walk over 9 x 64 to 9 x 512 terms; 1.6e-6 of the output seen for
# channels_last on a CPU). Coarser classes round products once a layer, which the runs above show already. ResNet-18 at an
# eighth of its width: 6 of 16 right changes refused without it, 1 of 48 with it.
_LAYERED_ROUNDINGS, _LAYERED_SEEDS = 32.0, (3, 4, 5, 6, 7, 8)
# However far these runs go, they excuse no more than this of a group (ten times as much of an element), times NOISE_FACTOR: a
# gradient that is a third too large stays wrong.
_LAYERED_MOST = 0.025
# A few draws do not bound the next: that an activation lies at the edge is rare, and what hangs on it may be nearly anything. But
# a point at an edge is rare, and a fault is not: it is as wrong at points close by. So a gradient that is refused all the same
# is judged there too, with weights and inputs moved by this much: a thousand roundings, so that other activations lie at the
# edge, and the step is else the same. More than half of these must pass (docs/decisions/0016).
_CLOSE_BY, _CLOSE_SEEDS = 2.0**-12, (11, 12, 13, 14)
# A change to half precision rounds what every layer puts out, and its gradient; moving weights and inputs once does not show
# that where values are many times their spread, of which the next batch norm takes the mean away (a right bf16 step of a UNet
# on an H200: the last block's weight gradient off by 0.10, past the static bound and four times that noise). Before such a
# change is refused, the plain step is run with every layer's output and gradient rounded to bf16: 0.85 to 1.5 times what
# autocast does to the gradients of that UNet on a CPU. These are the change's own roundings, so a factor of two is enough.
_ROUNDED_FACTOR = 2.0
_REPEATS = 3
_TURNS = 6


@dataclass(slots=True, eq=False)
class _Call:
    """One root's captured training call, and how autocast stood around it."""

    root: RootModule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grads: list[torch.Tensor | None]
    autocast: tuple[bool, torch.dtype]


@dataclass(slots=True, eq=False)
class _Result:
    """Copies of what one replay left: tensors by group, and what else must agree."""

    groups: dict[str, list[torch.Tensor]]
    structure: tuple[Any, ...]
    seconds: float


@dataclass(slots=True)
class _Distance:
    """How far one result is from another, per group; `cosine` and `scale` are of the whole gradient."""

    l2: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    cosine: float = 1.0
    scale: float = 1.0
    broken: str = ""  # not comparable: another structure, NaN where the plain step has none

    @property
    def largest(self) -> float:
        return max(self.l2.values(), default=0.0)

    def times(self, factor: float) -> _Distance:
        """The same at `factor` times the distance."""
        return _Distance(
            l2={group: factor * value for group, value in self.l2.items()},
            worst={group: factor * value for group, value in self.worst.items()},
            cosine=1.0 - factor * (1.0 - self.cosine),
            scale=1.0 + factor * (self.scale - 1.0),
        )


@dataclass(frozen=True, slots=True)
class GateResult:
    """The check, and the extra time of the first replay with the change on (compile, capture, tuning), microseconds."""

    check: Check
    first_us: float = 0.0


class Gate:
    """Compares the step with a change on and off. One capture serves one comparison.

    `arm()` at one boundary, then at the next `captured()` and `judge(...)`; `release()` frees what was captured.
    """

    def __init__(self, training: Training, watcher: StepWatcher | None = None) -> None:
        self.training, self.watcher = training, watcher
        self._autocast: dict[int, tuple[bool, torch.dtype]] = {}
        self._hooks: list[Any] = []
        self._calls: list[_Call] = []

    def arm(self) -> None:
        """Record the coming step's root calls."""
        self.release()
        kind = self.training.device.type
        for root in self.training.roots:
            # How autocast stands is known only at the call itself.
            def note(module: Any, args: Any, kwargs: Any) -> None:
                self._autocast[id(module)] = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

            self._hooks.append(root.module.register_forward_pre_hook(note, with_kwargs=True))
        capture_next_step(self.training)

    def captured(self) -> bool:
        """Take what the step left; True when every root that backward reached can be replayed."""
        self._unhook()
        self._calls = []
        default = (False, torch.get_autocast_dtype(self.training.device.type))
        for root in self.training.roots:
            if id(root.module) not in self._autocast or not any(g is not None for g in root.output_grads):
                continue
            args, kwargs = pytree.tree_map(_detached, (root.args, root.kwargs))
            autocast = self._autocast.get(id(root.module), default)
            self._calls.append(_Call(root, args, kwargs, list(root.output_grads), autocast))
        return bool(self._calls)

    def release(self) -> None:
        """Let go of inputs, outputs and gradients."""
        self._unhook()
        self._calls, self._autocast = [], {}
        self._let_go()

    def _let_go(self) -> None:
        for root in self.training.roots:
            root.output, root.output_grads = None, ()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def judge(
        self,
        on: Callable[[], None],
        off: Callable[[], None],
        semantics: Semantics,
        precision: str = "half",
        computes_in: str = "fp64",
    ) -> GateResult:
        """Compare, and leave the change on.

        Args:
            on, off: switch the change; `on` must leave the loop as it will be timed.
            semantics: what the change promises.
            precision: the class that a PRECISION change computes in: half or tf32.
            computes_in: the coarsest class that the loop as it stands is known to round to inside its models (autocast
                in a forward, kept changes): fp64, fp32, tf32 or half.

        Raises:
            Whatever `on` or a replay with the change on raises; everything saved is put back before.
        """
        modules = [call.root.module for call in self._calls]
        self._let_go()  # the step's graph hangs on its output; replays need the room
        finite = all(bool(torch.isfinite(g).all()) for call in self._calls for g in call.grads if g is not None)
        if not finite:
            on()
            return GateResult(Check(passed=None, detail="the plain step's gradients are NaN or infinite themselves"))
        for call in self._calls:
            call.grads = [None if g is None else _random_like(g) for g in call.grads]
        with _quiet(self.watcher), SavedState(modules, self.training) as saved:
            if any(_has_update_hooks(module) for module in modules):
                on()
                return GateResult(
                    Check(passed=None, detail="parameters update themselves in backward: no replay is possible")
                )
            plain = [self._plain(call, saved, semantics, precision, computes_in) for call in self._calls]
            hooks = [dict(o._optimizer_step_post_hooks) for o in self.training.optimizers]
            before = [_optimizer_state(o) for o in self.training.optimizers]
            on()
            findings, first_us = [], 0.0
            for call, reference in zip(self._calls, plain, strict=True):
                finding, extra = self._compare(call, saved, reference, semantics)
                look_again = self._second_yardstick(semantics, reference)
                if finding.passed is False and look_again is not None:
                    off()
                    reference.noise += look_again(call, saved, reference)
                    on()
                    finding, _ = self._compare(call, saved, reference, semantics)
                    if finding.passed is False and semantics is Semantics.REASSOCIATED:
                        finding = self._close_by(call, saved, reference, finding, on, off)
                findings.append(finding)
                first_us += extra
            saved.restore()
            saved.give_gradients()
            for optimizer, old, user_hooks in zip(self.training.optimizers, before, hooks, strict=True):
                if _optimizer_state(optimizer) != old:
                    findings.append(_compare_update(optimizer, on, off, semantics, user_hooks))
        moved = saved.difference()
        if moved:
            findings.append(Check(passed=False, detail=f"the change moved {moved} outside the step"))
        return GateResult(_joined(findings), first_us)

    # -- the plain step ---------------------------------------------------------------------------------------------

    def _plain(self, call: _Call, saved: SavedState, semantics: Semantics, precision: str, computes_in: str) -> _Plain:
        script_class = _coarser(_compute_class(self.training.device, call), computes_in)
        # What the candidate's own rounding would do is the yardstick for a change of precision.
        target_class = _coarser(precision, script_class) if semantics is Semantics.PRECISION else script_class
        base = _replay(call, saved)
        plain = _Plain(base, _replay(call, saved, rolled=True), target_class)
        if not _finite(base):
            plain.unusable = "the plain step has NaN or infinite gradients itself"
            return plain
        for _ in range(_REPEATS - 1):
            plain.repeats.append(_distance(_replay(call, saved), base))
        for seed in (1, 2):
            plain.noise.append(_distance(_replay(call, saved, jitter=_EPSILON[target_class], seed=seed), base))
        other = _distance(_replay(call, saved, reseed=101), base)
        if other.largest > 2.0 * max(d.largest for d in plain.repeats) + _EPSILON[script_class]:
            plain.seeds = [other, _distance(_replay(call, saved, reseed=202), base)]
        if semantics is Semantics.PRECISION and call.autocast[0]:
            # The script has autocast already: what counts is whether the change is farther from fp32 than the script is.
            with contextlib.suppress(RuntimeError):  # a model with half-precision casts of its own cannot run without
                exact = _replay(call, saved, autocast=False)
                plain.noise.append(_distance(base, exact))
        return plain

    def _second_yardstick(
        self, semantics: Semantics, plain: _Plain
    ) -> Callable[[_Call, SavedState, _Plain], list[_Distance]] | None:
        """What else tells the noise to expect, costly and so looked at only before a change is refused."""
        if plain.unusable:
            return None
        if semantics is Semantics.REASSOCIATED and plain.target_class not in _ROUNDED:
            return self._layered_noise
        if semantics is Semantics.PRECISION and plain.target_class == "half":
            return self._rounded_noise
        return None

    def _rounded_noise(self, call: _Call, saved: SavedState, plain: _Plain) -> list[_Distance]:
        """How far the plain step goes when every layer's output, and its gradient, is rounded to bf16."""
        layers = [module for module in call.root.module.modules() if not any(module.children())]
        with contextlib.ExitStack() as hooks:
            hooks.enter_context(
                ForwardStack.without(call.root.module.modules(), CAPTURE)
            )  # compiled code calls no hooks
            for layer in layers:
                hooks.callback(layer.register_forward_hook(_round_output).remove)
            run = _distance(_replay(call, saved), plain.base)
        return [] if run.broken else [run.times(_ROUNDED_FACTOR / NOISE_FACTOR)]

    def _layered_noise(self, call: _Call, saved: SavedState, plain: _Plain) -> list[_Distance]:
        """How far the plain step goes for as much rounding as a sum in another order makes in every layer."""
        jitter = _LAYERED_ROUNDINGS * _EPSILON[plain.target_class]
        # In both orders of the rows: the same activations are at the edge, but with other gradients hanging on them.
        runs = [
            _distance(_replay(call, saved, jitter=jitter, seed=seed, rolled=rolled), base)
            for rolled, base in ((False, plain.base), (True, plain.rolled))
            for seed in _LAYERED_SEEDS
        ]
        return [_Distance(
            l2={group: min(value, _LAYERED_MOST) for group, value in run.l2.items()},
            worst={group: min(value, 10 * _LAYERED_MOST) for group, value in run.worst.items()},
            cosine=max(run.cosine, 1.0 - _LAYERED_MOST),
            scale=min(max(run.scale, 1.0 - _LAYERED_MOST), 1.0 + _LAYERED_MOST),
        ) for run in runs if not run.broken]  # fmt: skip

    def _close_by(
        self,
        call: _Call,
        saved: SavedState,
        plain: _Plain,
        refused: Check,
        on: Callable[[], None],
        off: Callable[[], None],
    ) -> Check:
        """`refused`, or a check that passes where only an activation at an edge speaks against the change; leaves it on.

        So it is when outputs and buffers, which have no edges, are right everywhere; gradients are off by no more than
        the most that edges are let explain; the same call gives the same again; and gradients are right at most points close by.
        """
        noise = plain.repeats + plain.noise
        gradients = [group for group in plain.base.groups if group.startswith("gradient")]
        edge = _Distance(
            l2=dict.fromkeys(gradients, _LAYERED_MOST),
            worst=dict.fromkeys(gradients, 10 * _LAYERED_MOST),
            cosine=1.0 - _LAYERED_MOST,
            scale=1.0 + _LAYERED_MOST,
        )

        def within(found: _Distance, allowed: list[_Distance]) -> bool:
            return not found.broken and _worst_ratio(found, allowed, plain.target_class)[0] <= 1.0

        def moved() -> Iterator[_Result]:
            return (_replay(call, saved, jitter=_CLOSE_BY, seed=seed) for seed in _CLOSE_SEEDS)

        first, again, rolled = _replay(call, saved), _replay(call, saved), _replay(call, saved, rolled=True)
        off()
        bases = list(moved())
        on()
        there = [_distance(found, base) for found, base in zip(moved(), bases, strict=True)]
        everywhere = [_distance(first, plain.base), _distance(rolled, plain.rolled), *there]
        right = sum(within(distance, noise) for distance in there)
        if (
            2 * right <= len(there)
            or not within(_distance(again, first), noise)
            or not all(within(distance, [*noise, edge]) for distance in everywhere)
        ):
            return refused
        detail = f"{refused.detail}, where activations are at the edge of zero; right at {right} of {len(there)} points close by"
        return Check(passed=True, detail=detail, numbers={**refused.numbers, "of_bound": 1.0})

    # -- the step with the change on --------------------------------------------------------------------------------

    def _compare(self, call: _Call, saved: SavedState, plain: _Plain, semantics: Semantics) -> tuple[Check, float]:
        name = call.root.name
        if plain.unusable:
            return Check(passed=None, detail=f"{name}: {plain.unusable}"), 0.0
        lift = 1.0
        first = _replay(call, saved)
        for _ in range(_LOWER_TRIES if semantics is Semantics.PRECISION else 0):
            if _finite(first):
                break
            lift *= _LOWER
            first = _replay(call, saved, lift=lift)
        # Two batches in turn show a stale output; six calls reach what engages late (a graph's capture).
        seconds: list[float] = []
        worst: Check | None = None
        for turn in range(_TURNS):
            rolled = turn % 2 == 1
            result = first if turn == 0 else _replay(call, saved, lift=lift, rolled=rolled)
            seconds.append(result.seconds)
            check = _verdict(name, _distance(result, plain.rolled if rolled else plain.base), plain, semantics)
            if worst is None or worst.numbers.get("of_bound", 0.0) <= check.numbers.get("of_bound", 0.0):
                worst = check
            if check.passed is not True:
                worst = check
                break
        assert worst is not None  # there is at least one turn
        steady = min(seconds[1:], default=seconds[0])
        return worst, max(0.0, seconds[0] - steady) * 1e6


@dataclass(slots=True, eq=False)
class _Plain:
    """The plain step: its result on the captured batch and on the same rows in another order, and its noise."""

    base: _Result
    rolled: _Result
    target_class: str
    repeats: list[_Distance] = field(default_factory=list)
    noise: list[_Distance] = field(default_factory=list)
    seeds: list[_Distance] = field(default_factory=list)  # other random seeds, when they matter
    unusable: str = ""


def _verdict(name: str, found: _Distance, plain: _Plain, semantics: Semantics) -> Check:
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
    ratio, group, error = _worst_ratio(found, noise, plain.target_class)
    numbers = {"error": error, "of_bound": ratio, "cosine": found.cosine, "scale": found.scale}
    numbers["noise"] = max((d.l2.get(group, 0.0) for d in noise), default=0.0)
    if ratio <= 1.0:
        return Check(
            passed=True, detail=f"{name}: {group} off by {error:.1e}, {ratio:.0%} of the bound", numbers=numbers
        )
    if plain.seeds:
        # Random layers draw other numbers when kernels or layouts change: then the step is one more draw, no worse.
        drawn = max(
            (found.l2[g] / (1.5 * max(d.l2.get(g, 0.0) for d in plain.seeds) or math.inf) for g in found.l2),
            default=0.0,
        )
        fair_scale = abs(found.scale - 1.0) <= 0.05 + 2.0 * max(abs(d.scale - 1.0) for d in plain.seeds)
        if (
            all(
                found.l2[g]
                <= max(1.5 * max(d.l2.get(g, 0.0) for d in plain.seeds), _bound(g, plain.target_class, noise))
                for g in found.l2
            )
            and fair_scale
        ):
            detail = f"{name}: random layers; as far from the plain step as another seed ({drawn:.0%} of the bound)"
            return Check(passed=True, detail=detail, numbers={**numbers, "of_bound": drawn})
    return Check(
        passed=False, detail=f"{name}: {group} off by {error:.1e}, {ratio:.1f} times the bound", numbers=numbers
    )


def _bound(group: str, target_class: str, noise: list[_Distance]) -> float:
    static = _STATIC[target_class][0 if group.startswith("output") else 1]
    noisy = NOISE_FACTOR * max((d.l2.get(group, 0.0) for d in noise), default=0.0)
    chaotic = target_class in _ROUNDED and noisy >= _CEILING and not group.startswith("output")
    if chaotic and group.startswith("buffer"):
        return max(_CHAOTIC_CEILING, noisy)
    return min(_CHAOTIC_CEILING if chaotic else _CEILING, max(static, noisy if not chaotic else _CHAOTIC_CEILING))


def _worst_ratio(found: _Distance, noise: list[_Distance], target_class: str) -> tuple[float, str, float]:
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
        ceiling = _CEILING if target_class in _ROUNDED else 0.5
        rows.append((value / min(ceiling, max(0.5 * static, NOISE_FACTOR * max(of_noise, default=0.0))), what, value))
    return max(rows)


def _joined(checks: list[Check]) -> Check:
    """One check from several: failed when one failed, not made when one could not be made, else the nearest to its bound."""
    if not checks:
        return Check(passed=None, detail="nothing could be compared")
    for outcome in (False, None):
        for check in checks:
            if check.passed is outcome:
                return check
    return max(checks, key=lambda c: c.numbers.get("of_bound", 0.0))


# -- one replay -----------------------------------------------------------------------------------------------------


def _replay(
    call: _Call,
    saved: SavedState,
    *,
    jitter: float = 0.0,
    seed: int = 0,
    reseed: int = 0,
    rolled: bool = False,
    lift: float = 1.0,
    autocast: bool | None = None,
) -> _Result:
    """Run one root forward and backward from the saved state.

    jitter: move weights and inputs by this relative amount. rolled: the batch's rows in another order. lift: output
    gradients times this power of two, parameter gradients back down. reseed: another random state.
    """
    saved.restore(buffers_only=not jitter)
    if reseed:
        torch.manual_seed(reseed)
    module = call.root.module
    args, kwargs, grads = call.args, call.kwargs, call.grads
    if rolled:
        args, kwargs = pytree.tree_map(_rolled, (args, kwargs))
    if jitter:
        generator = torch.Generator().manual_seed(seed)
        args, kwargs = pytree.tree_map(lambda leaf: _jittered(leaf, jitter, generator), (args, kwargs))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(_jittered(parameter, jitter, generator))
    enabled, dtype = call.autocast
    kind = saved.device.type
    _synchronize(saved.device)
    start = time.perf_counter()
    args, kwargs = pytree.tree_map(_fresh, (args, kwargs))
    try:
        with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled if autocast is None else autocast):
            output = module(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        # Read as the script reads them, on its stream and at once: what is filled in later, by another stream or in
        # backward, is too late for the loss.
        outputs = [t.detach().clone() for t in tensors]
        wanted = [
            (t, g * lift if lift != 1.0 else g)
            for t, g in zip(tensors, grads, strict=False)
            if g is not None and t.requires_grad and t.shape == g.shape
        ]
        if wanted:
            torch.autograd.backward([t for t, _ in wanted], [g.to(t.dtype) for t, g in wanted])
        inputs = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        groups = _grouped(module, outputs, inputs, saved, lift)
        _synchronize(saved.device)
        seconds = time.perf_counter() - start
        structure = (
            pytree.tree_structure(output),
            tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors),
            tuple(name for name, p in module.named_parameters() if p.grad is not None and p.numel() >= _SMALL),
            tuple(id(p) for p in module.parameters()),
            tuple(int(b) if b.numel() == 1 else 0 for b in module.buffers() if not b.is_floating_point()),
        )
        return _Result(groups, structure, seconds)
    finally:
        for parameter in module.parameters():
            parameter.grad = None
        if jitter:
            saved.restore()


def _grouped(
    module: torch.nn.Module, outputs: list[torch.Tensor], inputs: list[torch.Tensor], saved: SavedState, lift: float
) -> dict[str, list[torch.Tensor]]:
    """What a step leaves, by group, in tensors of its own; `outputs` are copies already."""
    groups: dict[str, list[torch.Tensor]] = {}
    for i, tensor in enumerate(outputs):
        groups[f"output {i}" if len(outputs) > 1 else "output"] = [tensor]
    for i, tensor in enumerate(inputs):
        if tensor.grad is not None:
            groups[f"gradient of input {i}"] = [tensor.grad.detach() / lift]
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        small = parameter.numel() < _SMALL
        # A small parameter may have no gradient where its true gradient is zero (a bias that a norm cancels).
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) if small else None
        if grad is not None:
            groups.setdefault("gradients of small parameters" if small else f"gradient of {name}", []).append(
                grad.detach() / lift if lift != 1.0 else grad.detach().clone()
            )
    for name, buffer in module.named_buffers():
        before = saved.buffers.get(id(buffer))
        if before is not None and buffer.is_floating_point() and buffer.shape == before[1].shape:
            owner = name.rpartition(".")[0] or type(module).__name__
            groups.setdefault(f"buffer updates of {owner}", []).append(buffer.detach() - before[1])
    return groups


def _distance(found: _Result, base: _Result) -> _Distance:
    distance = _Distance()
    if found.structure != base.structure:
        distance.broken = _difference(found.structure, base.structure)
        return distance
    if found.groups.keys() != base.groups.keys():
        distance.broken = "other tensors have gradients"
        return distance
    gradients = [g for g in base.groups if g.startswith("gradient") and not g.startswith("gradient of input")]
    rows = [_sums(found.groups[group], base.groups[group]).cpu() for group in base.groups]
    table = dict(zip(base.groups, torch.stack(rows).tolist(), strict=True)) if rows else {}
    count = sum(t.numel() for g in gradients for t in base.groups[g])
    energy = sum(table[g][1] for g in gradients)
    for group, (squares, reference, _, _, worst, broken) in table.items():
        if broken:
            distance.broken = f"{group} has NaN or infinite values that the plain step has not"
            return distance
        size = sum(t.numel() for t in base.groups[group])
        floor = _FLOOR**2 * energy / max(1, count) * size if group in gradients else 0.0
        if group.startswith("buffer"):
            floor = 1e-12 * size  # below fp32 resolution of values around one
        distance.l2[group] = math.sqrt(squares / max(reference, floor)) if squares else 0.0
        distance.worst[group] = worst if group.startswith(("output", "gradient of ")) else 0.0
    if gradients:
        product = sum(table[g][2] for g in gradients)
        own = sum(table[g][3] for g in gradients)
        if energy > 0:
            distance.scale = product / energy
            distance.cosine = product / math.sqrt(energy * own) if own > 0 else 0.0
    return distance


def _sums(found: list[torch.Tensor], base: list[torch.Tensor]) -> torch.Tensor:
    """Σ(a−b)², Σb², Σab, Σa², worst |a−b| / (|b| + rms of b), and how many values lost finiteness; fp64, one transfer."""
    total = torch.zeros(6, dtype=torch.float64, device=base[0].device)
    for raw_a, raw_b in zip(found, base, strict=True):
        if not raw_b.is_floating_point():
            unequal = (raw_a != raw_b).double().mean()
            total[0] += unequal * raw_b.numel()
            total[1] += raw_b.numel()
            continue
        wide = torch.float64 if raw_b.dtype == torch.float64 else torch.float32
        a, b = raw_a.to(wide), raw_b.to(wide)
        both = torch.isfinite(a) & torch.isfinite(b)
        total[5] += (torch.isfinite(b) & ~both).sum() + (torch.isnan(a) & ~torch.isnan(b)).sum()
        a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
        difference = a - b
        total[0] += (difference * difference).sum(dtype=torch.float64)
        squares = (b * b).sum(dtype=torch.float64)
        total[1] += squares
        total[2] += (a * b).sum(dtype=torch.float64)
        total[3] += (a * a).sum(dtype=torch.float64)
        if b.numel():
            rms = torch.sqrt(squares / b.numel()).to(wide)
            tiny = torch.finfo(wide).tiny
            total[4] = torch.maximum(total[4], (difference.abs() / (b.abs() + rms + tiny)).max().double())
    return total


def _difference(found: tuple[Any, ...], base: tuple[Any, ...]) -> str:
    names = (
        "the output has another structure",
        "outputs have another shape, dtype or device",
        "other parameters have gradients",
        "parameters are other objects",
        "counters (buffers of integers) differ",
    )
    return next(name for name, a, b in zip(names, found, base, strict=True) if a != b)


def _finite(result: _Result) -> bool:
    gradients = [t for g, ts in result.groups.items() if g.startswith("gradient") for t in ts]
    return all(bool(torch.isfinite(t).all()) for t in gradients)


# -- the optimizer --------------------------------------------------------------------------------------------------


def _optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What a change of the optimizer shows in: its class, its own `step`, its options."""
    options = tuple(
        tuple(sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "lr")))
        for group in optimizer.param_groups
    )
    return type(optimizer), id(optimizer.__dict__.get("step")), options


def _compare_update(
    optimizer: torch.optim.Optimizer,
    on: Callable[[], None],
    off: Callable[[], None],
    semantics: Semantics,
    user_hooks: dict[Any, Any],
) -> Check:
    """One optimizer step from the same state with the change on (as it is now) and off; leaves it on."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return Check(
            passed=None, detail="the optimizer's gradients are gone at the boundary: its update was not compared"
        )
    try:
        changed = _update(optimizer, parameters, user_hooks)
    finally:
        off()
    try:
        plain = _update(optimizer, parameters, user_hooks)
    finally:
        on()
    sums = _sums(changed, plain).tolist()
    if sums[5]:
        return Check(
            passed=False, detail="the optimizer's update has NaN or infinite values", numbers={"of_bound": math.inf}
        )
    error = math.sqrt(sums[0] / sums[1]) if sums[1] else (0.0 if sums[0] == 0 else math.inf)
    # The difference p' − p of fp32 parameters keeps few bits of a small update; that rounding is no fault of either.
    size = math.sqrt(sum(float((p.detach().float() ** 2).sum()) for p in parameters))
    rounding = 2.0**-23 * size / math.sqrt(sums[1]) if sums[1] else 0.0
    bound = rounding if semantics is Semantics.EXACT else max(1e-3, 4.0 * rounding)
    ratio = error / bound if bound else (0.0 if error == 0 else math.inf)
    detail = f"{type(optimizer).__name__}: update off by {error:.1e}"
    return Check(passed=ratio <= 1.0, detail=detail, numbers={"error": error, "of_bound": ratio})


def _update(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], user_hooks: dict[Any, Any]
) -> list[torch.Tensor]:
    """What one step does to the parameters; parameters, gradients and optimizer state are put back."""
    before = [p.detach().clone() for p in parameters]
    grads = [(p, p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
    states = {
        p: {k: (v, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in optimizer.state[p].items()}
        for p in list(optimizer.state)
    }
    held = optimizer._optimizer_step_post_hooks
    removed = {key: held.pop(key) for key in list(held) if key in user_hooks}
    try:
        with torch.no_grad():
            optimizer.step()
        return [p.detach() - old for p, old in zip(parameters, before, strict=True)]
    finally:
        held.update(removed)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
            for parameter, gradient, values in grads:
                gradient.copy_(values)
                parameter.grad = gradient
            for key in list(optimizer.state):
                if key not in states:
                    del optimizer.state[key]
            for key, entries in states.items():
                kept = optimizer.state[key]
                for name in [n for n in kept if n not in entries]:
                    del kept[name]
                for name, (value, copy) in entries.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(copy)
                    kept[name] = value


# -- saving and putting back ----------------------------------------------------------------------------------------


class SavedState:
    """Parameters, buffers, gradients, random states and plain attributes of some modules; put back on leaving."""

    def __init__(self, modules: list[torch.nn.Module], training: Training) -> None:
        self.modules, self.device = modules, training.device
        self.parameters = {id(p): (p, p.detach().clone()) for m in modules for p in m.parameters()}
        self.buffers = {id(b): (b, b.detach().clone()) for m in modules for b in m.buffers()}
        self.grads = [(p, p.grad) for p, _ in self.parameters.values()]
        self.plain = [
            (child.__dict__, {k: v for k, v in child.__dict__.items() if type(v) in (bool, int, float)})
            for module in modules
            for child in module.modules()
        ]
        self.random = torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.python_random = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy_random = numpy.random.get_state() if numpy is not None else None
        self._bits = self._fingerprint()
        self._after: list[int] = []

    def __enter__(self) -> SavedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self.give_gradients()
        self._after = self._fingerprint()

    def restore(self, *, buffers_only: bool = False) -> None:
        """Back to the saved state, gradients cleared."""
        with torch.no_grad():
            if not buffers_only:
                for parameter, value in self.parameters.values():
                    parameter.copy_(value)
            for buffer, value in self.buffers.values():
                buffer.copy_(value)
        for parameter, _ in self.parameters.values():
            parameter.grad = None
        for attributes, values in self.plain:
            for name, value in values.items():
                if attributes.get(name) is not value:
                    attributes[name] = value
        torch.set_rng_state(self.random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random, self.device)
        random.setstate(self.python_random)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)

    def give_gradients(self) -> None:
        """The user's own gradient tensors are in their places again; replays made their own and dropped them."""
        for parameter, grad in self.grads:
            parameter.grad = grad

    def difference(self) -> str:
        """What is not as it was, after leaving; "" when the bits agree."""
        now = {id(t) for m in self.modules for t in (*m.parameters(), *m.buffers())}
        if now != set(self.parameters) | set(self.buffers):
            return "parameters or buffers"
        return "" if self._after == self._bits else "the model's state"

    def _fingerprint(self) -> list[int]:
        tensors = [t.detach() for t, _ in (*self.parameters.values(), *self.buffers.values()) if t.numel()]
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [t.view(whole[t.element_size()]).sum(dtype=torch.int64) for t in tensors if t.element_size() in whole]
        return [int(value) for value in torch.stack([s.cpu() for s in sums])] if sums else []


@contextlib.contextmanager
def _quiet(watcher: StepWatcher | None) -> Iterator[None]:
    """The watcher's hooks do not take replays for training."""
    if watcher is None:
        yield
        return
    before, watcher.patches.active = watcher.patches.active, False
    try:
        yield
    finally:
        watcher.patches.active = before


def _compute_class(device: torch.device, call: _Call) -> str:
    """What the script's own convolutions and products round to."""
    if call.autocast[0]:
        return "half"
    dtypes = {p.dtype for p in call.root.module.parameters()}
    if dtypes & {torch.float16, torch.bfloat16}:
        return "half"
    if dtypes == {torch.float64}:
        return "fp64"
    if device.type != "cuda":
        return "fp32"
    try:
        tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the script uses the newer fp32_precision settings, which refuse to be read this way
        tf32 = True
    return "tf32" if tf32 else "fp32"


def _coarser(one: str, other: str) -> str:
    return max(one, other, key=lambda name: _EPSILON[name])


def _has_update_hooks(module: torch.nn.Module) -> bool:
    return any(getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # A copy: a forward that works in place on its input must find it as it was, every time.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _rolled(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
        return leaf
    with torch.no_grad():
        other = torch.roll(leaf, 1, 0) if leaf.size(0) > 1 else leaf.flip(-1)
        return torch.empty_like(leaf).copy_(other).requires_grad_(leaf.requires_grad)


def _random_like(gradient: torch.Tensor) -> torch.Tensor:
    """Normal random values of the same root mean square (of a mean loss's, where it is zero), the same ones each time."""
    generator = torch.Generator().manual_seed(gradient.numel() % 2**31)
    row = torch.randn(8191, generator=generator).to(gradient.device)
    values = row.repeat(-(-gradient.numel() // row.numel()))[: gradient.numel()].view(gradient.shape)
    rms = gradient.float().square().mean().sqrt().clamp_min(1.0 / max(1, gradient.numel()))
    return torch.empty_like(gradient).copy_(values * rms)


def _jittered(leaf: Any, amount: float, generator: torch.Generator) -> Any:
    """Each value times (1 ± amount), the sign drawn from `generator` on the CPU so that it is the same everywhere."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.numel() == 0:
        return leaf
    with torch.no_grad():
        # Signs of a short row are enough, and far cheaper to draw and move than one for each value.
        signs = (torch.randint(0, 2, (8191,), generator=generator, dtype=torch.int8) * 2 - 1).to(leaf.device)
        repeated = signs.repeat(-(-leaf.numel() // signs.numel()))[: leaf.numel()].view(leaf.shape)
        moved = leaf.double() if leaf.dtype == torch.float64 else leaf.float()
        moved = moved * (1.0 + 2.0 * amount * repeated)
        return torch.empty_like(leaf).copy_(moved).requires_grad_(leaf.requires_grad and leaf.is_leaf)


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
    return _RoundedBf16.apply(output)  # type: ignore[no-untyped-call]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
