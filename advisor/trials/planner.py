"""In which order to try what is recommended: what bounds the step first, then what rests on it.

A starved GPU gains nothing from a faster kernel, and a step that waits for launches gains nothing from fewer bytes, so the
bound that the profile shows comes first; after that the stages in `core/transform_table.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set

from advisor.analysis.idle import idle
from advisor.analysis.view import View
from advisor.core.findings import Recommendation
from advisor.core.plan import PlanItem
from advisor.core.profile import StepProfile
from advisor.core.transform_row import TOGETHER, Stage
from advisor.core.transform_table import conflicts, having, row, title
from advisor.core.verdict import Status, Verdict

LAYOUT = "channels_last"
GRAPHS = "cuda_graphs"
HALF = having(lambda row: row.stage is Stage.HALF)
KERNELS = having(lambda row: row.family)
NORMS = having(lambda row: row.family and row.stage is Stage.NORMS)
DEAR = having(lambda row: row.dear)
RESTARTED = having(lambda row: row.loaders)
ON_TOP = having(lambda row: not row.live)
BUNDLED = having(lambda row: row.together != "")
CAPTURED = having(lambda row: row.together == "graph")
IN_NHWC = having(lambda row: row.nhwc)
TOO_SMALL = "with the kept changes, its predicted gain is too small for a trial"
# A kernel that promises this share of what a trial can tell is tried with others that promise it whole.
ALONG = 0.5
LONG_FIRST_STEP_US = 10e6
# A kernel's trial under graphs holds the step's memory this many times: a graph without it, one with it, and the eager calls before
# a capture. Where that does not fit graphs come behind the kernels, whose trials then need it once.
GRAPHED_ROOM = 3
_BOUND_BY = {"launch": GRAPHS, "copy": "prefetch", "sync": "defer_sync"}
# An idle cause below this share of the step does not bound it: the change that removes it waits for its usual turn.
BOUND_FRAC = 0.2
# A change that was too small to be proved is worth a second trial where its share of the step has grown by half.
MUCH_LONGER = 1.5
# So is one that noise has hidden, when it may gain as much of the step as this.
LARGE_GAIN = 0.1


def order(recommendations: Sequence[Recommendation], profile: StepProfile | None = None) -> tuple[Recommendation, ...]:
    """The recommendations in the order of trial, each at most once per transform and parameters.

    What the profile's largest idle cause asks for comes first; then the stages, then predicted gain; what a row is to be tried after
    comes before it, and a circle there is broken at its earliest member. What is predicted to find nothing to do comes last, and
    nothing waits for it.
    """
    first, graphs_last = _bounding(profile), crowded(profile) or _kernels_promise_more(recommendations)
    unique: dict[tuple[str, tuple[tuple[str, str], ...]], Recommendation] = {}
    for item in recommendations:
        unique.setdefault((item.transform, tuple(sorted(item.parameters.items()))), item)
    waiting = sorted(
        unique.values(),
        key=lambda r: (r.transform != first, _idle(r), _stage(r.transform, graphs_last), -expected(r), r.transform),
    )
    ordered: list[Recommendation] = []
    while waiting:
        names = {r.transform for r in waiting if not _idle(r)}
        # The one that a bound puts first is not held back by `after`: there the bound is what must be settled.
        ready = next(
            (r for r in waiting if r.transform == first or not names & set(row(r.transform).after)), waiting[0]
        )
        waiting.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _bounding(profile: StepProfile | None) -> str:
    if profile is None or not profile.typical_us > 0:
        return ""
    # Of the untraced step: a trace makes the host slower. A distillation on an H200 waited 22 ms for launches in a traced step of 57;
    # untraced it took 34 and its kernels 33, and graphs, tried before layout and precision, gained 2 %.
    found = idle(View.of(profile))
    times = {cause.cause: cause.time_us for cause in profile.idle} if found is None else found.by_cause
    causes = {cause: time for cause, time in times.items() if cause in _BOUND_BY}
    if not causes:
        return ""
    worst = max(causes, key=lambda name: causes[name])
    return _BOUND_BY[worst] if causes[worst] / profile.typical_us >= BOUND_FRAC else ""


def crowded(profile: StepProfile | None) -> bool:
    """Whether a kernel's trial under CUDA graphs would not fit the device: graphs come behind the kernels then."""
    if profile is None:
        return False
    return 0 < profile.memory.total_bytes < GRAPHED_ROOM * profile.memory.peak_allocated_bytes


def _kernels_promise_more(recommendations: Sequence[Recommendation]) -> bool:
    """Whether a kernel is for a large share of the step, and for more than graphs are: noise does not hide that.

    A UNet's and a DenseNet's graphs, predicted to save 1 and 4 %, took twenty pairs each on an H200 and were left open; for the
    upsampling and the concatenations, a third of their steps, no time was left.
    """
    graphs = max((expected(r) for r in recommendations if r.transform == GRAPHS), default=0.0)
    kernels = KERNELS - NORMS
    return any(
        r.predicted is not None and r.predicted.high >= LARGE_GAIN and expected(r) > graphs
        for r in recommendations
        if r.transform in kernels
    )


def _stage(transform: str, graphs_last: bool = False) -> Stage:
    if transform == GRAPHS and graphs_last:
        return Stage.ALGORITHMS  # behind all kernels and the optimizer
    return row(transform).stage


def _idle(item: Recommendation) -> bool:
    return item.predicted is not None and item.predicted.high <= 0.0


def expected(item: Recommendation | Verdict) -> float:
    """The middle of what it is predicted to save of the step."""
    return 0.0 if item.predicted is None else 0.5 * (item.predicted.low + item.predicted.high)


def bundle(candidates: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
    """The first candidates, as far as they may be tried as one; a single one, or none, is no bundle."""
    waiting = (c for c in candidates if c.transform not in ON_TOP)
    found = tuple(itertools.takewhile(lambda c: c.transform in BUNDLED and not c.parameters, waiting))
    return found if len(found) > 1 else ()


def with_layout(
    members: Sequence[Recommendation], candidates: Sequence[Recommendation], *, nhwc: bool
) -> tuple[Recommendation, ...]:
    """These, with channels_last before them where some of them run in NHWC alone and the model is not in it.

    By themselves such kernels are in place and never run: 84 places of a RepLKNet in NCHW, and no launch. `candidates` may have it, with
    its prediction; else it is tried for their sake.
    """
    names = {m.transform for m in members}
    if nhwc or LAYOUT in names or not names & IN_NHWC:
        return tuple(members)
    known = next((c for c in candidates if c.transform == LAYOUT and not c.parameters), None)
    layout = known or Recommendation(transform=LAYOUT, title=title(LAYOUT), round=members[0].round)
    return layout, *members


def hidden_alone(members: Sequence[Recommendation], verdict: Verdict, min_gain: float) -> tuple[Recommendation, ...]:
    """Of changes that were tried as one and left open by noise, those of which it would hide more: they promise less by themselves than
    `min_gain` and that noise. Four kernels of a ResNet-18 on CIFAR, 3.6 % as one on a busy host, took six trials more that told nothing.
    """
    if verdict.gain is None or not _right_but_slow(verdict):
        return ()
    noise = 0.5 * (verdict.gain.high - verdict.gain.low)
    return tuple(m for m in members if m.predicted is not None and m.predicted.high < min_gain + noise)


def layout_with_half(verdicts: Sequence[Verdict], candidates: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
    """NHWC and half precision, where neither was kept by itself though right and in effect: to be tried as one.

    In fp32 some convolutions are slower in NHWC, and in 16 bits PyTorch's norms and cuDNN's turning of tensors take in NCHW what the products gain:
    each may cost what both together gain.
    """
    seen = {(identity(v), v.round): v for v in verdicts}
    pair: list[Recommendation] = []
    for names in ({LAYOUT}, HALF):
        if any(v.status == Status.KEPT and v.transform in names for v in verdicts):
            return ()
        tried = ((c, seen.get((identity(c), c.round))) for c in candidates if c.transform in names and not c.parameters)
        lost = [c for c, v in tried if v is not None and _right_but_slow(v)]
        if not lost:
            return ()
        pair.append(lost[0])
    kept = {v.transform for v in verdicts if v.status == Status.KEPT}
    return () if any(kept & set(conflicts(c.transform)) for c in pair) else tuple(pair)


def left_open(
    verdicts: Sequence[Verdict], candidates: Sequence[Recommendation], min_gain: float
) -> tuple[Recommendation, ...]:
    """Those of a round's candidates that were right and in effect, rather faster than not, and left open by noise, to be tried as one.

    Where the host's launches and the device's work take equally long, neither a change for the one nor one for the other shortens a
    step (half precision and the fused optimizer under CUDA graphs), and both together do. None unless there are two or more, which
    seemed to gain twice `min_gain` between them: less would be hidden once more.
    """
    kept = {v.transform for v in verdicts if v.status == Status.KEPT}
    seen = {(identity(v), v.round): v for v in verdicts}
    found: list[Recommendation] = []
    gains = 0.0
    for candidate in candidates:
        verdict = seen.get((identity(candidate), candidate.round))
        if verdict is None or verdict.status != Status.INCONCLUSIVE or not _right_but_slow(verdict):
            continue
        if (
            candidate.parameters
            or candidate.transform in DEAR
            or kept & {candidate.transform, *conflicts(candidate.transform)}
        ):
            continue
        gain = verdict.timing.numbers.get("gain", 0.0) if verdict.timing is not None else 0.0
        if gain > 0.0 and not rivals(candidate, found):
            found.append(candidate)
            gains += gain
    return tuple(found) if len(found) > 1 and gains >= 2 * min_gain else ()


def as_one(members: Sequence[Recommendation]) -> Recommendation:
    """The candidate that stands for all of these."""
    return Recommendation(
        transform=TOGETHER.join(m.transform for m in members),
        title=title(TOGETHER.join(m.transform for m in members)),
        round=members[0].round,
    )


def promises(item: Recommendation, min_gain: float) -> bool:
    """Whether its prediction leaves `min_gain` possible; of what is dear, whether it expects as much."""
    if item.predicted is None:
        return True
    return (expected(item) if item.transform in DEAR else item.predicted.high) >= min_gain


def worth(candidates: Sequence[Recommendation], min_gain: float) -> tuple[Recommendation, ...]:
    """Those that promise enough for a trial, and kernels that promise a part of it where one of those goes into the same graph.

    Tried as one they take no longer, and their gains add up.
    """
    promised = [c for c in candidates if promises(c, min_gain)]
    if any(c.transform in CAPTURED for c in promised):
        promised = [c for c in candidates if promises(c, ALONG * min_gain if c.transform in CAPTURED else min_gain)]
    return tuple(promised)


def second_look(
    verdicts: Sequence[Verdict], candidates: Sequence[Recommendation], step_us: float = 0.0
) -> tuple[Recommendation, ...]:
    """Candidates whose time may have come, in the candidates' order. The latest verdict on each counts.

    What was right and in effect, but not faster, before CUDA graphs were kept: half precision gains nothing while the host's
    launches bound the step, and all it has once a graph is kept. And NHWC, and bundled kernels, that were left out or did not win
    before half precision was kept: other convolutions run then, and kernels are dispatched by dtype. And what may have gained a little of a step that was much longer
    than `step_us`, the step with all that is kept: the same time saved is a larger share of it. And, once, what may have
    gained much and was hidden by noise, as another process may be a better place; and what should gain much more of the step as it
    is profiled anew, since something else may have bound it then. What takes longer than `LONG_FIRST_STEP_US` to switch on is
    not tried twice.
    """
    latest = {identity(v): place for place, v in enumerate(verdicts)}
    turns = Counter(identity(v) for v in verdicts)
    graphs, half = _kept_at(verdicts, {GRAPHS}), _kept_at(verdicts, HALF)
    kept = {v.transform for v in verdicts if v.status == Status.KEPT}

    def again(candidate: Recommendation) -> bool:
        place = latest.get(identity(candidate))
        if place is None or kept & {candidate.transform, *conflicts(candidate.transform)}:
            return False
        verdict, once = verdicts[place], turns[identity(candidate)] == 1
        return (
            (place < graphs and _right_but_slow(verdict))
            or (
                place < half
                and (_of_another_dtype(verdict) or (verdict.transform == LAYOUT and _right_but_slow(verdict)))
            )
            or _of_a_longer_step(verdict, step_us)
            or (once and (_hidden(verdict) or _promises_more(candidate, verdict)))
        )

    return tuple(candidate for candidate in candidates if again(candidate))


def identity(item: Verdict | Recommendation | PlanItem) -> tuple[str, tuple[tuple[str, str], ...]]:
    """What tells one change from another: transform and parameters."""
    return item.transform, tuple(sorted(item.parameters.items()))


def _kept_at(verdicts: Sequence[Verdict], transforms: Set[str]) -> int:
    """Where the first of these was kept; 0 when none was."""
    return next((i for i, v in enumerate(verdicts) if v.status == Status.KEPT and v.transform in transforms), 0)


def _open(verdict: Verdict) -> bool:
    return verdict.status in (Status.REVERTED, Status.INCONCLUSIVE) and verdict.first_step_us < LONG_FIRST_STEP_US


def _right_but_slow(verdict: Verdict) -> bool:
    checks = (
        verdict.timing is not None,
        verdict.effect and verdict.effect.passed,
        verdict.numerics and verdict.numerics.passed,
    )
    return _open(verdict) and all(checks)


def _of_another_dtype(verdict: Verdict) -> bool:
    right = verdict.numerics is not None and bool(verdict.numerics.passed)
    return _open(verdict) and right and verdict.transform in KERNELS


def _of_a_longer_step(verdict: Verdict, step_us: float) -> bool:
    """Its gain was not certainly none, and its share of the step has grown since by half or more."""
    gained = verdict.gain is not None and verdict.gain.high > 0.0
    then = [t for t in verdict.blocks.off_us if t > 0]
    return gained and _right_but_slow(verdict) and 0.0 < step_us * MUCH_LONGER < (min(then) if then else 0.0)


def _hidden(verdict: Verdict) -> bool:
    """Noise left open whether it gains much of the step."""
    gained = verdict.gain is not None and verdict.gain.high >= LARGE_GAIN
    return verdict.status == Status.INCONCLUSIVE and gained and _right_but_slow(verdict)


def _promises_more(candidate: Recommendation, verdict: Verdict) -> bool:
    """A profile since its trial expects much more of it than was expected then. (bf16 on a CIFAR ResNet-18 saved 0.9 % of a step of
    4.1 ms that a slow host needed as well; the device was busy for 3.8 ms of it, and for 2.2 in bf16.)"""
    more = expected(candidate) - expected(verdict)
    return candidate.round > verdict.round and more >= LARGE_GAIN and _right_but_slow(verdict)


def conflicting(transform: str, own: Collection[str], others: Iterable[tuple[str, Collection[str]]]) -> tuple[str, ...]:
    """Which of `others`, pairs of transform and its conflicts, cannot be on together with this one."""
    return tuple(name for name, theirs in others if name in own or transform in theirs)


def rivals(candidate: Recommendation, others: Iterable[Recommendation]) -> tuple[str, ...]:
    """As `conflicting`, of recommendations."""
    pairs = ((other.transform, conflicts(other.transform)) for other in others)
    return conflicting(candidate.transform, conflicts(candidate.transform), pairs)
