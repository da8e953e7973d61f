"""What fresh runs of two kinds, without some changes and with them, say of those changes: times and losses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median

from advisor.core.findings import Interval, Semantics
from advisor.core.plan import PlanItem
from advisor.core.units import bounds_text
from advisor.core.verdict import Check, StackVerdict
from advisor.trials import losses, planner
from advisor.trials.flow import every_us, in_turns
from advisor.trials.records import Measurement
from advisor.trials.statistics import CONFIDENCE, WAITS_FRAC, bursty, process_speedup

# One round of the comparison, in the order that cancels drift.
PLAIN, STACK = "plain", "stack"
ROUND = (PLAIN, STACK, STACK, PLAIN)
# What a step waits for while the device has nothing to do, as people read it.
LOADER, HOST = "its loader", "the host's launches"
# One run of each says enough where its steps are certainly faster by so much: two processes of one kind differ by 1 to 2 %
# (docs/notes/proof.md#how-far-two-processes-tell), and the interval of one and one is made wider by what two of each kind may.
CLEAR, APART = 1.1, 0.04
# Where the device's time decides, the clock on the wall has to say at least this: lower, and the training may be slower. And its
# interval leaves out what would be much slower; where the loader is fed by more workers, which is seldom slower, one of 90 % does.
NOT_SLOWER, NOT_MUCH_SLOWER, GUARD_CONFIDENCE = 0.97, 0.85, 0.9
NOT_FASTER, TOO_NOISY = "not faster", "too noisy to confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The kept changes together against the plain script: the verdict, and the runs that it rests on."""

    verdict: StackVerdict
    plain: tuple[Measurement, ...] = ()
    stack: tuple[Measurement, ...] = ()
    items: tuple[str, ...] = ()  # transforms that were on in the stack's runs

    @classmethod
    def of(
        cls,
        verdict: StackVerdict,
        plain: Sequence[Measurement],
        stack: Sequence[Measurement],
        kept: Sequence[PlanItem],
    ) -> Proof:
        """The proof of what these runs had on."""
        return cls(
            verdict=verdict, plain=tuple(plain), stack=tuple(stack), items=tuple(item.transform for item in kept)
        )

    @property
    def holds(self) -> bool:
        """The kept changes are faster together, and train as the plain script does."""
        return self.verdict.passed is True


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as long a step takes in the slow runs; None where too few steps were timed. Centres of each run, µs."""

    bounds: tuple[float, float, float] | None  # low, point, high
    slow_us: tuple[float, ...]
    fast_us: tuple[float, ...]

    def saved(self, basis: str) -> Interval | None:
        """The share of the slow runs' step that the fast ones save."""
        if self.bounds is None:
            return None
        return Interval(low=1.0 - 1.0 / self.bounds[0], high=1.0 - 1.0 / self.bounds[2], basis=basis)


def in_flow(kept: Sequence[PlanItem]) -> bool:
    """Whether these are judged by the whole flow of steps, since one of them changes what feeds the loop."""
    return any(item.transform in planner.RESTARTED for item in kept)


def ratio(
    slow: Sequence[Measurement],
    fast: Sequence[Measurement],
    *,
    flow: bool,
    alike: bool = False,
    device: bool = False,
    confidence: float = CONFIDENCE,
) -> Ratio:
    """Compare step times; `flow`: by the whole flow of steps, as must be where the loader was changed; `device`: the device's own
    time in them, without what it waits for.

    Where batches come in bursts, too, only the flow tells the rate. `alike`: one change lies between the two, not all of them
    (`statistics.process_speedup`).
    """
    arms = (slow, fast)
    if device:
        slow_own, fast_own = _own_us(arms)
        bounds = _widened(process_speedup(slow_own, fast_own, alike=alike), arms)
        return Ratio(bounds, tuple(map(median, slow_own)), tuple(map(median, fast_own)))
    flow = flow or any(bursty(m.step_us) for m in (*slow, *fast))
    turned = in_turns(arms) if flow else None
    slow_steps, fast_steps = turned or (every_us(arms) if flow else [[list(m.step_us) for m in runs] for runs in arms])
    centre = fmean if flow else median
    found = process_speedup(
        slow_steps, fast_steps, means=flow, alike=alike, turns=turned is not None, confidence=confidence
    )
    bounds = _widened(found, arms)
    return Ratio(bounds, tuple(map(centre, slow_steps)), tuple(map(centre, fast_steps)))


def _widened(
    bounds: tuple[float, float, float] | None, arms: Sequence[Sequence[Measurement]]
) -> tuple[float, float, float] | None:
    """What one process of each kind says, with what processes are apart by, which they cannot show."""
    if bounds is None or any(len(runs) > 1 for runs in arms):
        return bounds
    low, point, high = bounds
    return low * (1 - APART), point, high * (1 + APART)


def clear(verdict: StackVerdict) -> bool:
    """Whether it holds by so much that further runs would only make the interval narrower."""
    surest = max(verdict.speedup_low or 0.0, verdict.device_speedup_low or 0.0)
    return verdict.passed is True and surest >= CLEAR


def leaves_open(verdict: StackVerdict, min_gain: float) -> bool:
    """Whether it was not faster, by runs in which noise would hide a gain of `min_gain` as well."""
    slower = verdict.passed is False and verdict.detail.startswith((NOT_FASTER, TOO_NOISY))
    return slower and (verdict.speedup_high or 0.0) > 1.0 + min_gain


def judge(
    plain: Sequence[Measurement], stack: Sequence[Measurement], kept: Sequence[PlanItem], *, flow: bool
) -> StackVerdict:
    """Whether the runs with `kept` are certainly faster than the plain ones, and train alike."""
    if not stack:
        return StackVerdict(passed=False, detail="the plan gave no measurement in a fresh run")
    found = ratio(plain, stack, flow=flow)
    low, point, high = found.bounds or (None, None, None)
    between = bounds_text(found.bounds[0], found.bounds[2]) if found.bounds else ""
    # What feeds the loop is judged by the step; what shortens the device's work beside it, by that.
    fed_only = flow and all(item.transform in planner.RESTARTED for item in kept)
    waits = waits_for(plain, stack) if not fed_only else ""
    own = ratio(plain, stack, flow=False, device=True).bounds if waits else None
    as_fed = not flow and takes_no_more(plain, stack)
    guard = ratio(plain, stack, flow=True, confidence=GUARD_CONFIDENCE) if flow else found
    check = _trained_alike(plain, stack, kept)
    # Steps whose loss cannot be seen (hand-written gradients) have the numeric gate of each change as their proof.
    passed: bool | None = True
    detail = check.detail
    if low is None or point is None:
        passed, detail = None, "too few steps were timed in fresh runs"
    elif check.passed is False:
        passed = False
    elif low <= 1.0 and own is not None and own[0] > 1.0 and not_slower(guard.bounds, as_fed):
        told = f"the device's time is {own[1]:.2f}× shorter ({bounds_text(own[0], own[2])})"
        rate = ", whose rate these changes leave as it is" if as_fed and waits == LOADER else ""
        detail = f"{told}; the step waits for {waits}{rate} ({point:.2f}×, {between}); {check.detail}"
    elif low <= 1.0:
        # Above 1 but not beyond noise leaves it open, and so does a device that needs less time; more runs may tell.
        less_work = own is not None and own[0] > 1.0 and (high or 0.0) >= 1.0
        passed = None if point > 1.0 or less_work else False
        detail = f"{point:.2f}× ({between}) in fresh runs"
        hidden = passed is None or (high or 0.0) > 1.0  # it looks slower, and may as well be faster
        detail = f"{TOO_NOISY if hidden else NOT_FASTER}: {detail}"
    batch = plain[0].batch_size
    return StackVerdict(
        passed=passed,
        detail=detail,
        plain_us=found.slow_us,
        stack_us=found.fast_us,
        speedup=point,
        speedup_low=low,
        speedup_high=high,
        waits_for=waits if own is not None else "",
        device_speedup=own[1] if own is not None else None,
        device_speedup_low=own[0] if own is not None else None,
        device_speedup_high=own[2] if own is not None else None,
        samples_per_s_plain=_rate(batch, found.slow_us),
        samples_per_s_stack=_rate(batch, found.fast_us),
        losses_plain=plain[0].losses,
        losses_stack=stack[0].losses,
        kernels=tuple(sorted({name for run in stack for name in run.kernels})),
    )


def not_slower(bounds: tuple[float, float, float] | None, as_fed: bool) -> bool:
    """Whether a training whose device has less to do is no slower for it, by these bounds of the step on the wall.

    Args:
        as_fed: no change touches the loader, and the script's process computes no more a step. The loader's rate, or the host's, then bounds
            the step as before, and how the runs differ tells of the machine: from one process to the next a loader's rate differs by tens of per
            cent. Only what is certainly slower counts.
    """
    if bounds is None:
        return False
    low, point, high = bounds
    return high >= 1.0 if as_fed else point >= NOT_SLOWER and low >= NOT_MUCH_SLOWER


def takes_no_more(plain: Sequence[Measurement], stack: Sequence[Measurement]) -> bool:
    """Whether the script's own process takes no more of the processors a step in any run of the plan than in a plain one: then a loader that
    was not changed itself delivers at the rate that it had.

    What is taken more, up to `1 - NOT_SLOWER` of a step, could at worst come from the core of one worker, and would make its batches, and so the
    step, later by no more than that. False where nobody saw.
    """
    if not all(m.cpu_us for m in (*plain, *stack)):
        return False
    more_us = max(fmean(m.cpu_us) for m in stack) - min(fmean(m.cpu_us) for m in plain)
    return more_us <= (1.0 - NOT_SLOWER) * fmean(fmean(m.every_us) for m in plain)


def waits_for(plain: Sequence[Measurement], stack: Sequence[Measurement]) -> str:
    """What a good part of the step waits for, in the plain runs or in those of the plan, as far as both kinds of runs have seen it: `LOADER`,
    `HOST` (whose launches leave the device idle), or "" for nothing.

    A step that the plan makes shorter than its loader's is no shorter than that, and as unsteady.
    """

    def wait(own: Callable[[Measurement], Sequence[float]], *kinds: Sequence[Measurement]) -> bool:
        seen = all(own(m) and min(own(m)) > 0 for m in (*plain, *stack))
        # Of means: behind workers that deliver several batches at once most steps do not wait, and few wait for long.
        return seen and any(runs and waited(runs, own) for runs in kinds)

    def waited(runs: Sequence[Measurement], own: Callable[[Measurement], Sequence[float]]) -> bool:
        return sum(fmean(own(m)) for m in runs) < (1 - WAITS_FRAC) * sum(fmean(m.step_us) for m in runs)

    if wait(lambda m: m.device_us, plain, stack):
        return LOADER
    return HOST if wait(lambda m: m.kernel_us, plain) else ""


def _own_us(arms: Sequence[Sequence[Measurement]]) -> list[list[tuple[float, ...]]]:
    """The device's own time in the steps of each run: its kernels', or where nobody asked for these, without waits for the loader."""
    kernels = all(m.kernel_us for runs in arms for m in runs)
    return [[m.kernel_us if kernels else m.device_us for m in runs] for runs in arms]


def apart(plain: Sequence[Measurement], stack: Sequence[Measurement], kept: Sequence[PlanItem]) -> bool:
    """Whether the losses of the runs with `kept` are finite and lie outside the plain runs' envelope."""
    return losses.apart(_trained_alike(plain, stack, kept))


def _trained_alike(plain: Sequence[Measurement], stack: Sequence[Measurement], kept: Sequence[PlanItem]) -> Check:
    precision = any(item.semantics == Semantics.PRECISION.value for item in kept)
    return losses.compare([m.losses for m in plain], [m.losses for m in stack], precision=precision)


def _rate(batch: int, steps_us: Sequence[float]) -> float | None:
    """Samples a second at the middle of these runs, which is the one that their step is told by."""
    return batch / geometric_mean(steps_us) * 1e6 if batch and steps_us else None
