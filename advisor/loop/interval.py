"""What lies between two step boundaries, and whether that is one training step like the others and nothing else.

An interval between two boundaries is `clean` when it holds one training step and nothing else. What else it may hold is
noted as marks (a new epoch's iterator, evaluation, a compile, a skipped update); a mark that most intervals bear is part
of the script's step (a `next(iter(loader))` each time) and does not count.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from advisor.loop.compiles import compiled_graphs
from advisor.loop.records import OWN_WORK
from advisor.loop.training import Training

# Marks count as unusual from the first interval on, but a mode of shapes or backward passes needs a few to compare with.
MIN_INTERVALS = 4
MEMORY = 64  # steps after which what was usual begins to be forgotten
# Listeners that take more of a step than this, and more than timer noise, have disturbed the next interval. Of the mean of the last steps:
# behind loader workers that deliver several batches at once, or ahead of a device, the host comes from boundary to boundary at once.
LISTENER_FRAC, LISTENER_NS, LISTENER_STEPS = 0.01, 200_000, 16
MAX_SIGNATURES = 64  # more distinct input shapes than this: shapes vary, and there is nothing to compare with

FIRST, PATTERN, EPOCH, EVALUATION = "first step", "step pattern changed", "new epoch", "evaluation"
SKIPPED, SHAPES, BACKWARDS = "skipped by GradScaler", "another batch shape", "another number of backward passes"
COMPILE, OWN = "compilation", OWN_WORK


@dataclass(slots=True, eq=False)
class StepInterval:
    """What was seen between two boundaries."""

    backwards: int = 0
    graph_backwards: int = 0  # beside these, `backward(create_graph=True)`
    loader_ns: int = 0  # time of the training thread in the loader's next()
    late_ns: int = 0  # of that, for batches that were not there yet
    batches: int = 0
    iterators: int = 0  # of loaders, that the training drew its first batch from
    samples: int = 0  # from the loaders' batches; 0 when no loader was used
    marks: set[str] = field(default_factory=set)
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of the inputs of the roots' training calls
    elements: int = 0  # of those inputs, and of what lists, tuples and dicts among them hold
    loader_shapes: list[tuple[int, ...]] = field(default_factory=list)
    closure: bool = False  # an optimizer ran a closure again and again: the number of backward passes is its own affair
    replays: int = 0  # CUDA graphs replayed

    @property
    def signature(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.shapes or self.loader_shapes)


class Usual:
    """What most steps are like: intervals are held against it, and it learns from them.

    Attributes:
        changed: the pattern of steps is another one since the last interval.
        disturbed: listeners have taken long enough of the running interval to be felt in it.
        closure_steps: an optimizer runs its closure as often as it likes.
        backwards: backward passes of most steps.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self.intervals = 0
        self.changed = self.disturbed = self.closure_steps = False
        self.backwards = 0
        self._mark_counts: Counter[str] = Counter()
        self._signatures: Counter[tuple[tuple[int, ...], ...]] = Counter()
        self._usual_signature: tuple[tuple[int, ...], ...] = ()
        self._backward_counts: Counter[int] = Counter()
        self._compiles = 0
        self._lengths_ns: deque[int] = deque(maxlen=LISTENER_STEPS)

    def listened(self, taken_ns: int, interval_ns: int) -> None:
        """Listeners took so long at the boundary that ended an interval of this length."""
        self._lengths_ns.append(interval_ns)
        mean_ns = sum(self._lengths_ns) / len(self._lengths_ns)
        self.disturbed = taken_ns > max(LISTENER_NS, LISTENER_FRAC * mean_ns)

    def judge(self, interval: StepInterval, *, first: bool) -> str:
        """Why the interval is not clean; "" when it is."""
        reasons = []
        if first:
            reasons.append(FIRST)
        if self.changed:
            reasons.append(PATTERN)
            self.changed = False
            self._forget()
        compiles = compiled_graphs()
        if compiles != self._compiles:
            self._compiles = compiles
            interval.marks.add(COMPILE)
        self.intervals += 1
        for mark in sorted(interval.marks):
            self._mark_counts[mark] += 1
            if self.intervals < MIN_INTERVALS or 2 * self._mark_counts[mark] <= self.intervals:
                reasons.append(mark)
        if not {FIRST, PATTERN}.intersection(reasons):
            # Those two hold what came before steps were known: nothing to compare with, nothing to learn from.
            usual, counts = self.backwards, self._backward_counts
            counts[interval.backwards] += 1
            if counts[interval.backwards] >= counts[usual]:
                self.backwards = interval.backwards
            self.closure_steps |= interval.closure
            known = self.intervals > MIN_INTERVALS and counts.total() > 1
            if known and interval.backwards != usual and not self.closure_steps:
                reasons.append(BACKWARDS)
            if self._other_shapes(interval.signature):
                reasons.append(SHAPES)
        if self.disturbed:
            reasons.append(OWN)
        return reasons[0] if reasons else ""

    def _forget(self) -> None:
        """Another pattern makes another step of the same training: what the old one's were like says nothing of it."""
        self.backwards, self._backward_counts = 0, Counter()
        self._usual_signature, self._signatures = (), Counter()

    def _other_shapes(self, signature: tuple[tuple[int, ...], ...]) -> bool:
        counts = self._signatures
        if not signature or len(counts) > MAX_SIGNATURES or self.closure_steps:
            return False
        counts[signature] += 1
        if counts[signature] > counts[self._usual_signature]:
            self._usual_signature = signature
        if counts.total() > MEMORY:
            # Half forgotten, so that another image size from some epoch on becomes the usual one.
            for known in counts:
                counts[known] //= 2
            self._signatures = counts = +counts
        usual = counts[self._usual_signature]
        total = counts.total()
        others, other = total - usual, signature != self._usual_signature
        vary = (
            5 * others > total > 10
            if _smaller_batch(signature, self._usual_signature)
            else others > 1 and 20 * others > total
        )
        if other and vary:
            # Neither the epoch's last, smaller batch nor one odd step, such as a first that sizes a model by its data.
            self._training.fixed_shapes = False
        return other and 2 * usual > total


def _smaller_batch(signature: tuple[tuple[int, ...], ...], usual: tuple[tuple[int, ...], ...]) -> bool:
    """The same shapes with fewer samples in front."""
    return len(signature) == len(usual) and all(
        len(a) == len(b) and a[1:] == b[1:] and a[:1] <= b[:1] for a, b in zip(signature, usual, strict=True)
    )
