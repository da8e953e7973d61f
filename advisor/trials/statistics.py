"""Is a change faster, and by how much: paired t on block log-medians, decided in stages.

The unit is the block: the median step time of a run of steps with the change off or on. Steps inside a block are
correlated (AR noise, stragglers), and machines drift; per-step tests call half of all A-against-A comparisons different.
Pairs of neighbouring blocks in ABBA order cancel drift, and their log ratios are close to normal and symmetric where
nothing changed, so a t interval of their trimmed mean holds.

Sources: research on drift and AR(1) noise kept with this project (paired t on block log-medians keeps its level with 6 to
20 pairs; Mann-Whitney on steps does not).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, variance

from advisor.core.findings import Interval
from advisor.core.student import block_logs, t_quantile
from advisor.core.verdict import Status

CONFIDENCE = 0.99
# Share cut at either end, the usual one for trimmed means (Wilcox, Robust Estimation). With one block in twenty a quarter
# slower, 3 % are found in 195 of 200 simulated trials; in 94 untrimmed, in 153 with half of it.
TRIM_FRAC = 0.2
# A trial that could be settled only if its mean were further off than so many standard errors is given up at a stage.
HOPE_ERRORS = 1.5
# Disturbed blocks are taken again, until this many and this share of all tell that the machine is no place to measure now.
LEAST_DISTURBED, DISTURBED_FRAC = 8, 0.4
# Six pairs find a 3 % gain at 1 % noise in most trials; twelve and twenty are for what is close to the threshold.
STAGES = (6, 12, 20)
# Three find what saves a tenth or more, at the price of a slightly wider interval for all looks: for steps so long that six take a while.
EARLY_STAGES = (3, *STAGES)
# A block lasts this long, so that a timer, a straggler or a clock step weighs little in its median ...
BLOCK_S = 0.15
# ... but has steps enough for a median, and not more than a fast loop needs.
MIN_STEPS, MAX_STEPS, LEAST_IN_BLOCK = 3, 30, 3  # the last: of a block of a fresh process
# A noisy machine's blocks come in up to so many parts, which alternate with the other arm's: 20 pairs of six parts of 0.08 s take 20 s, or
# half a minute where a step takes 30 ms. A gain that must be told apart more finely than the default threshold does not ask for more.
MOST_PARTS, LEAST_GAIN = 6, 0.01
# Fresh processes cost seconds each, and what needs them (loader workers) changes the step by tens of per cent.
PROCESS_STAGES = (3, 4, 6)

# Steps this many times longer or shorter than the median are no stragglers of one kind of step when they make up more than
# this share: a loader with eight workers delivers every eighth batch late.
BURST_RATIO, BURST_SHARE = 1.5, 0.08
BURSTY_BLOCKS = 0.25  # with bursts that make medians meaningless, of all

# A device that waits for its loader for this share of a step or more: what a change saves of the device's own time decides then, which
# is steady where the waits are not. Below it a wait is too short to hide much, and the step itself decides.
WAITS_FRAC = 0.1


@dataclass(frozen=True, slots=True)
class Decision:
    """`gain` is the share of the step's time saved, or of the
    device's time in it where that decides; `step_point` is then what the step itself saves."""

    status: Status
    gain: Interval | None
    point: float | None
    reason: str
    step_point: float | None = None


def log_ratio_interval(ratios: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Trimmed mean of log ratios and its two-sided t interval: (low, mean, high). Needs two values or more.

    `TRIM_FRAC` of the values at either end weigh as their neighbours do, so that a pause of the machine in one block of
    twenty does not hide what the others say; below 1 / `TRIM_FRAC` values none does.

    Sources: Tukey & McLaughlin (1963), Sankhyā A 25: winsorised variance over the trimmed count, n − 2g − 1 degrees.
    """
    n = len(ratios)
    cut = int(TRIM_FRAC * n)
    ordered = sorted(ratios)
    inner = ordered[cut : n - cut]
    mean = math.fsum(inner) / len(inner)
    pulled_in = [inner[0]] * cut + inner + [inner[-1]] * cut
    centre = math.fsum(pulled_in) / n
    variance = math.fsum((r - centre) ** 2 for r in pulled_in) / (n - 1)
    half = t_quantile(0.5 + confidence / 2.0, len(inner) - 1) * math.sqrt(variance * n) / len(inner)
    return mean - half, mean, mean + half


def gain_interval(
    pairs: Sequence[tuple[float, float]], confidence: float = CONFIDENCE
) -> tuple[Interval, float] | None:
    """Share of step time saved, from pairs (off, on) of block medians: 1 − exp(mean log(on/off)), with its interval.

    None with fewer than two pairs or a time that is not positive and finite.
    """
    if len(pairs) < 2 or not all(math.isfinite(v) and v > 0 for pair in pairs for v in pair):
        return None
    low, mean, high = log_ratio_interval([math.log(on / off) for off, on in pairs], confidence)
    basis = f"{len(pairs)} ABBA pairs, paired t on log block medians, {100 * confidence:.3g} %"
    return Interval(low=_saved(high), high=_saved(low), basis=basis), _saved(mean)


def _saved(log_ratio: float) -> float:
    return 1.0 - math.exp(min(log_ratio, 700.0))


def decide(
    pairs: Sequence[tuple[float, float]],
    min_gain: float,
    *,
    max_pairs: int = STAGES[-1],
    stages: Sequence[int] = STAGES,
    last: bool = False,
    anew: bool = False,
) -> Decision:
    """What the pairs (off, on) gathered so far say about a gain above `min_gain`.

    Looks only when a stage is full, so that chance has few occasions, and each look has its share of what all of them
    may err by (Bonferroni): intervals hold together with `CONFIDENCE`. Kept when the interval's lower bound is above
    `min_gain`; reverted when its upper bound is below it (a certain loser stops at the first stage); either too when all blocks
    with the change are apart by it from all without; inconclusive when the last stage still straddles it, or when at this noise
    it would.

    Args:
        last: there will be no more pairs, so look now. With fewer than the first stage asks for nothing is kept.
        anew: the first stage may have been looked at before, with other pairs: that is one look more.
    """
    usable = [s for s in stages if s < max_pairs] + [max_pairs]
    if not last and len(pairs) not in usable and len(pairs) < usable[-1]:
        return Decision(Status.MORE, None, None, f"{len(pairs)} pairs so far")
    confidence = 1.0 - (1.0 - CONFIDENCE) / (len(usable) + anew)
    result = gain_interval(pairs, confidence)
    if result is None:
        few = "fewer than two pairs of blocks were timed" if len(pairs) < 2 else ""
        return Decision(Status.INCONCLUSIVE, None, None, few or "block times are missing or not positive")
    gain, point = result
    told = f"{_share(point)} of the step saved ({_interval(gain)}, {len(pairs)} pairs)"
    if gain.low > min_gain:
        if len(pairs) >= usable[0]:
            return Decision(Status.KEPT, gain, point, told)
        return Decision(Status.INCONCLUSIVE, gain, point, f"too few pairs to keep it: {told}")
    if gain.high < min_gain:
        if gain.high < 0:
            slower = f"{_share(-gain.high)} to {_share(-gain.low)}, {len(pairs)} pairs"
            told = f"slower: {_share(-point)} added to the step ({slower})"
        else:
            told = f"no gain above {_share(min_gain)}: {told}"
        return Decision(Status.REVERTED, gain, point, told)
    apart = _apart(pairs, min_gain, confidence)
    if apart is not None and apart < min_gain:
        told = f"no gain above {_share(min_gain)} between any two blocks: {told}"
        return Decision(Status.REVERTED, Interval(low=min(gain.low, apart), high=apart, basis=gain.basis), point, told)
    if apart is not None and len(pairs) >= usable[0]:
        told = (
            f"{_share(point)} of the step saved ({_share(apart)} or more between any two blocks of {len(pairs)} pairs)"
        )
        basis = f"{len(pairs)} ABBA pairs, slowest block with against fastest without"
        return Decision(Status.KEPT, Interval(low=apart, high=gain.high, basis=basis), point, told)
    hidden = f"too noisy to confirm a gain of {_share(min_gain)}: {told}"
    if last or len(pairs) >= usable[-1]:
        return Decision(Status.INCONCLUSIVE, gain, point, hidden)
    early = stages is EARLY_STAGES and len(pairs) < STAGES[0]  # three pairs say little of their own spread
    if not early and _hopeless(pairs, min_gain, usable[-1], confidence):
        return Decision(Status.INCONCLUSIVE, gain, point, f"{hidden}; more repeats would not settle it")
    return Decision(Status.MORE, gain, point, told)


def _apart(pairs: Sequence[tuple[float, float]], min_gain: float, confidence: float) -> float | None:
    """What every block with the change saves of every block without, at least, or at most where that is below `min_gain`; None where
    blocks of both kinds mingle around `min_gain`, or so few are apart by chance more often than `confidence` allows.

    Where the host's launches bound the step of one arm and a replayed graph's the other, the first wanders by tens of per cent
    and the second not at all: the t interval has the one's noise, and there is no doubt. Of 2 n blocks that do not differ, the n of
    one arm come first in one of C(2 n, n) orders, and the alternation of the arms makes it rarer where speed wanders.
    """
    n = len(pairs)
    if 2.0 / math.comb(2 * n, n) > 1.0 - confidence:
        return None
    off, on = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    least, most = 1.0 - max(on) / min(off), 1.0 - min(on) / max(off)
    return least if least > min_gain else most if most < min_gain else None


def _hopeless(pairs: Sequence[tuple[float, float]], min_gain: float, most: int, confidence: float) -> bool:
    """Whether `most` pairs with the spread of these would leave it open, were the mean off by what chance allows it."""
    _, mean, high = log_ratio_interval([math.log(on / off) for off, on in pairs], confidence)
    degrees, cut = len(pairs) - 2 * int(TRIM_FRAC * len(pairs)) - 1, int(TRIM_FRAC * most)
    error = (high - mean) / t_quantile(0.5 + confidence / 2.0, degrees)
    final = t_quantile(0.5 + confidence / 2.0, most - 2 * cut - 1) * error * math.sqrt(len(pairs) / most)
    return abs(mean - math.log(1.0 - min_gain)) + HOPE_ERRORS * error < final


def parts(pairs: Sequence[tuple[float, float]], min_gain: float, before: int = 1) -> int:
    """Of how many parts blocks should be, after pairs of blocks of `before` parts.

    Six pairs tell `min_gain` where their log ratios spread by half of it: t at the first look's level over the root of six is 2. The
    mean of parts that alternate between the arms spreads less by their root. Longer blocks would not do: where the host's
    launches bound a step its speed wanders at all scales from ten steps to a thousand, and only neighbours see the same
    (docs/notes/proof.md#blocks-in-parts). Between 1 and `MOST_PARTS`; `before` as long as fewer pairs than the first stage's have been seen.
    """
    if len(pairs) < STAGES[0] or not all(math.isfinite(v) and v > 0 for pair in pairs for v in pair):
        return before
    _, mean, high = log_ratio_interval([math.log(on / off) for off, on in pairs])
    degrees = len(pairs) - 2 * int(TRIM_FRAC * len(pairs)) - 1
    spread = (high - mean) / t_quantile(0.5 + CONFIDENCE / 2.0, degrees) * math.sqrt(len(pairs))
    return parts_for(spread * math.sqrt(before), min_gain)


def block_s(step_s: float) -> float:
    """What a block of one part takes, with the step behind a switch, in a loop with this step."""
    steps = max(MIN_STEPS, min(MAX_STEPS, math.ceil(BLOCK_S / max(step_s, 1e-6))))
    return (steps + 1) * step_s


def noise(steps: Sequence[float]) -> float | None:
    """By how much two neighbouring blocks of the same loop differ, a standard deviation of log ratios; from its clean steps in order. None
    where these are too few.

    Of blocks of three steps, the shortest there are: noise of the host wanders at all scales, and longer ones tell little more.
    """
    usable = [s for s in steps if math.isfinite(s) and s > 0]
    logs = [math.log(median(usable[i : i + 3])) for i in range(0, len(usable) - 2, 3)]
    differences = [after - before for before, after in pairwise(logs)]
    return math.sqrt(math.fsum(d * d for d in differences) / len(differences)) if len(differences) >= 3 else None


def tells(spread: float, pairs: int = STAGES[0]) -> float:
    """The least difference, a share of the step, that so many pairs of blocks tell from none, where neighbours differ by `spread`."""
    confidence = 1.0 - (1.0 - CONFIDENCE) / (len(STAGES) + 1)
    return 1.0 - math.exp(-t_quantile(0.5 + confidence / 2.0, pairs - 1) * spread / math.sqrt(pairs))


def parts_for(spread: float, min_gain: float) -> int:
    """Of how many parts blocks should be from the start, in a loop whose neighbouring blocks differ by so much; as `parts` has it."""
    return round(min(MOST_PARTS, max(1.0, (spread / (0.5 * max(min_gain, LEAST_GAIN))) ** 2)))


def whole_blocks(found: Sequence[float], count: int) -> list[float]:
    """The means of every `count` parts that follow each other, one a block; a block that lacks parts is left out."""
    count = max(1, count)
    return [math.fsum(found[i : i + count]) / count for i in range(0, len(found) - count + 1, count)]


def _interval(gain: Interval) -> str:
    """`0.4 % to 3.1 %`; of one that reaches below twice the step it says that it is of no use."""
    return "too few or too noisy for an interval" if gain.low < -1.0 else f"{_share(gain.low)} to {_share(gain.high)}"


def _share(fraction: float) -> str:
    """`−0.7 %`: a share with one digit and a proper minus sign; what no table needs to the digit is cut off."""
    if fraction < -10.0:
        return "below −1000 %"
    return f"{100 * fraction:.1f} %".replace("-", "−")


def trial(
    pairs: Callable[[], Sequence[tuple[float, float]]],
    on: bool,
    min_gain: float,
    max_pairs: int = STAGES[-1],
    *,
    patient: bool = True,
    anew: bool = False,
    stages: Sequence[int] = STAGES,
    hasty: bool = False,
) -> Generator[bool, str, Decision]:
    """One trial, block by block: yields whether the next block runs with the change on, and returns the decision.

    Blocks come in ABBA order, one switch a pair, beginning with the state that is on. It is sent, for each block, why the
    machine was no measure of it, or an empty text: then the caller has added it to what `pairs` gives. A disturbed block
    is taken again; too many of them end the trial without a decision. Without patience it ends at its first stage, whatever
    that says: the first of `STAGES`, or in haste that of `stages`. `anew` and `stages` as `decide` has them.
    """
    taken, disturbed = 0, Counter[str]()
    while True:
        decision = decide(pairs(), min_gain, max_pairs=max_pairs, anew=anew, stages=stages)
        looked = len(pairs()) >= (stages[0] if hasty else STAGES[0])
        if decision.status != Status.MORE or (decision.gain is not None and looked and not patient):
            return decision
        for state in (on, not on):
            while reason := (yield state):
                taken += 1
                disturbed[reason] += 1
                if disturbed.total() >= max(LEAST_DISTURBED, DISTURBED_FRAC * taken):
                    worst = disturbed.most_common(1)[0][0]
                    told = f"the machine was disturbed in {disturbed.total()} of {taken} blocks, mostly by {worst}"
                    return Decision(Status.INCONCLUSIVE, None, None, told)
            taken += 1
        on = not on


def bursty(steps: Sequence[float]) -> bool:
    """Whether steps come in bursts, as where loader workers deliver several batches at once: then a median says nothing
    about the rate, and means have to serve."""
    usable = [s for s in steps if math.isfinite(s) and s > 0]
    if len(usable) < 3:
        return False
    middle = median(usable)
    odd = sum(not middle / BURST_RATIO <= s <= middle * BURST_RATIO for s in usable)
    return odd >= 2 and odd >= BURST_SHARE * len(usable)


def rate_by_means(bursty_blocks: int, blocks: int) -> bool:
    """Whether so many blocks have bursts that the means of all of them, not their medians, tell the rate."""
    return blocks > 0 and bursty_blocks >= BURSTY_BLOCKS * blocks


def process_speedup(
    plain: Sequence[Sequence[float]],
    stack: Sequence[Sequence[float]],
    *,
    means: bool = False,
    alike: bool = False,
    turns: bool = False,
    confidence: float = CONFIDENCE,
) -> tuple[float, float, float] | None:
    """Speed-up (low, point, high) of fresh processes, from each process's step times: plain over stack.

    Each process gives up to six blocks, by their medians or `means`. The variance of an arm's mean is that of its blocks
    plus that between its processes, so two processes that disagree widen the interval. Degrees of freedom are the blocks'
    (Welch) and, for what processes are apart by beyond their blocks' noise, the processes' (Satterthwaite). Two and two that are
    apart by 1 to 2 % are told with 95 to 98 %, not 99 (docs/notes/proof.md#how-far-two-processes-tell). None when an arm has fewer than two blocks.

    Args:
        means: compare the time of all steps together, which is what a training takes: the ratio of arithmetic means. Epoch starts and
            evaluations come at the same steps of each process, so where an arm has several a block is compared with those of its place.
        alike: the arms' steps hardly differ, and so take the same course from a process's first step on: under the power cap a ResNet-50
            on an H200 slows down by 4 % within thirty steps, in each run. Steps are then compared with those of the same place, and an arm
            of one process is as uncertain as the other's processes are apart.
            Either compares as many steps of each run as the shortest has.
        turns: each time is that of a whole turn of loader workers; one may be a block.
    """
    placed = alike or (means and not turns)  # turns begin anywhere, and are as many as there were
    arms = _same_lengths(plain, stack) if placed else [_usable(plain), _usable(stack)]
    logs = [[block_logs(_blocks(steps, turns), means=means) for steps in arm if steps] for arm in arms]
    if any(sum(map(len, arm)) < 2 for arm in logs):
        return None
    freedoms, lost = [sum(map(len, arm)) - 1 for arm in logs], [1.0, 1.0]
    if alike:
        lost = [_without_course([process for arm in logs for process in arm])] * 2
    elif placed:
        for i, arm in enumerate(logs):
            if len(arm) > 1:
                lost[i] = _without_course(arm)
                freedoms[i] = (len(arm) - 1) * (len(arm[0]) - 1)
    centres = [[math.fsum(p) / len(p) for p in arm] for arm in logs]
    apart = [variance(arm) if len(arm) > 1 else None for arm in centres]
    known = [v for v in apart if v is not None]
    differences, errors, beyond = [], [], 0.0
    for arm, middles, between, raised in zip(logs, centres, apart, lost, strict=True):
        blocks = sum(map(len, arm))
        within = math.fsum((m - c) ** 2 for p, c in zip(arm, middles, strict=True) for m in p)
        if between is None:
            between = math.fsum(known) / len(known) if alike and known else 0.0
        of_blocks, of_processes = raised * within / max(1, blocks - len(middles)) / blocks, between / len(middles)
        errors.append(of_blocks + of_processes)
        beyond += of_processes - of_blocks
        differences.append(math.fsum(middles) / len(middles))
    difference, total = differences[0] - differences[1], math.fsum(errors)
    if total == 0.0:
        return math.exp(difference), math.exp(difference), math.exp(difference)
    beyond = 0.0 if alike else max(0.0, beyond)
    by_blocks = (1.0 - beyond / total) ** 2 * sum(e**2 / max(1, n) for e, n in zip(errors, freedoms, strict=True))
    by_processes = beyond**2 / max(1, sum(len(arm) - 1 for arm in logs))
    degrees = total**2 / (by_blocks + by_processes)
    half = t_quantile(0.5 + confidence / 2.0, max(1.0, degrees)) * math.sqrt(total)
    return math.exp(difference - half), math.exp(difference), math.exp(difference + half)


def _usable(arm: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[s for s in steps if math.isfinite(s) and s > 0] for steps in arm]


def _same_lengths(*given: Sequence[Sequence[float]]) -> list[list[list[float]]]:
    """As many steps of each run as the shortest has."""
    arms = [_usable(arm) for arm in given]
    shortest = min((len(steps) for arm in arms for steps in arm if steps), default=0)
    return [[steps[:shortest] for steps in arm] for arm in arms]


def _without_course(processes: Sequence[list[float]]) -> float:
    """Take out of each process's blocks, in place, what they have in common as it goes on.

    Returns:
        By how much a variance within processes is to be raised, since their course was estimated from them.
    """
    count, blocks = len(processes), len(processes[0])
    course = [math.fsum(p[i] - math.fsum(p) / blocks for p in processes) / count for i in range(blocks)]
    for process in processes:
        process[:] = [m - c for m, c in zip(process, course, strict=True)]
    return count / (count - 1)


def _blocks(steps: Sequence[float], turns: bool = False, most: int = 6) -> list[Sequence[float]]:
    """Up to `most` runs of neighbouring steps, as equal as can be, at least three steps each where there are so many, or one turn."""
    count = max(1, min(most, len(steps) // (1 if turns else LEAST_IN_BLOCK)))
    ends = [len(steps) * i // count for i in range(count + 1)]
    return [steps[start:end] for start, end in pairwise(ends)]
