"""What a training step is, found while the script runs, and the boundary at which everything else happens.

A step is one period of the repeating sequence of `Optimizer.step` calls: each call for one optimizer, D and G together for a
GAN, five D and one G for a WGAN. Where no short period lasts (StyleGAN2's regularisation in every fourth and every sixteenth
round), each call of the optimizer that is called most ends a step, and those with another number of backward passes are not
clean. Gradient accumulation needs no rule of its own: backward passes are counted, not taken for steps. A `GradScaler` that
skips an update still ends the step. Without any optimizer the period in the sequence of backward passes serves (hand-written
updates), and in a script that trains nothing at all, once that is past doubt, the period in the sequence of its model calls;
`advisor.step()` in the script overrides all of them. A loop without optimizer, backward, model call or marker has no steps that
advisor can see.

All of it is in one thread, the first that trains. What another one trains at the same time is no step of this training: a profiler that was
started in one thread cannot be stopped in another, and no change may come while the other is in the middle of a step.

An interval between two boundaries is `clean` when it holds one training step and nothing else. What else it may hold is
noted as marks (a new epoch's iterator, evaluation, a compile, a skipped update); a mark that most intervals bear is part
of the script's step (a `next(iter(loader))` each time) and does not count.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from advisor.loop import heap, stop, updates
from advisor.loop.compiles import compiled_graphs, inside_compiled_call
from advisor.loop.patches import Patches
from advisor.loop.period import MAX_PERIOD, smallest_period
from advisor.loop.records import OWN_WORK
from advisor.loop.session import Session
from advisor.loop.sources import user_line
from advisor.loop.timing import clocks
from advisor.loop.training import StepEvent, Training

# Marks count as unusual from the first interval on, but a mode of shapes or backward passes needs a few to compare with.
MIN_INTERVALS = 4
MEMORY = 64  # steps after which what was usual begins to be forgotten
MAX_SIGNATURES = 64  # more distinct input shapes than this: shapes vary, and there is nothing to compare with
# Backward passes without any Optimizer.step, while an optimizer exists, before they are taken for steps: accumulation
# over more micro-batches than this has not been seen in CNN training.
PATIENCE = 256
# Optimizer calls that make no period, and periods broken by an optimizer already known before they have lasted for `LASTING`
# rounds, before a step is what lies between two calls of one optimizer.
UNSETTLED, BROKEN, LASTING = 4 * MAX_PERIOD, 4, 32
MOVED = 32  # calls in another thread, none in the first, before that one is taken to have trained nothing in earnest
MOST_OPTIMIZERS = 4096  # one a parameter, where each is stepped in backward as soon as its gradient is there
# Model calls without any backward pass or optimizer before a script is taken to train nothing: an evaluation before the
# training may take as many. Slow ones are not waited for beyond so many seconds, once there are a few.
FORWARD_PATIENCE, FORWARD_LEAST, FORWARD_PATIENCE_S = 256, 16, 60.0
# A listener that takes more of a step than this, and more than timer noise, has disturbed the next interval.
LISTENER_FRAC, LISTENER_NS = 0.01, 200_000

FIRST, PATTERN, EPOCH, EVALUATION = "first step", "step pattern changed", "new epoch", "evaluation"
SKIPPED, SHAPES, BACKWARDS = "skipped by GradScaler", "another batch shape", "another number of backward passes"
COMPILE, OWN = "compilation", OWN_WORK
FORWARD = "forward"
CREATE_GRAPH = {"backward": 3, "grad": 4}  # where torch.autograd's functions take `create_graph` without its name


@dataclass(slots=True, eq=False)
class Interval:
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


class StepWatcher:
    """Finds the steps and calls `training.on_step` at each boundary, from inside the user's own call.

    `kind` is "optimizer", "period" (of backward passes), "forward" (period of model calls), "marker" or "none"; `interval` is
    the last finished one and `current` the one being filled. With nothing else listening a boundary costs about 10 µs of host
    time. A listener's exception switches advisor off; StopTraining, SystemExit and KeyboardInterrupt pass.
    """

    def __init__(self, training: Training, session: Session, patches: Patches) -> None:
        self.training, self.session, self.patches = training, session, patches
        self.kind = "none"
        self.seen = 0  # boundaries so far
        self.current, self.interval = Interval(), Interval()
        self.in_backward = False
        self.last_root: int = 0  # id of the root module called last, for the sequence of backward passes
        self._thread: threading.Thread | None = None  # the training's; known from its first call on
        self._others = 0  # calls of other threads since the last of that one
        self.closure_steps = False
        self.usual_backwards = 0  # backward passes of most steps
        self.graph_line = ""  # the script's, of the first `backward(create_graph=True)`
        self._loss: torch.Tensor | None = None
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pattern: tuple[Hashable, ...] = ()
        self._old_pattern: tuple[Hashable, ...] = ()
        self._position = 0
        self._history: deque[Hashable] = deque(maxlen=2 * MAX_PERIOD)
        self._alive: set[Hashable] = set()  # ids of the optimizers that a period has to hold
        self._past: set[Hashable] = set()
        self._recent: deque[Hashable] = deque(maxlen=MOST_OPTIMIZERS)  # optimizers called
        # Optimizers seen before, by id, as long as they live.
        self._met: WeakValueDictionary[Hashable, torch.optim.Optimizer] = WeakValueDictionary()
        self._rounds = 0  # of the pattern so far
        self._broken = 0
        self._unsettled = 0  # calls since there was a pattern
        self._loose = False  # the pattern is one optimizer, and the others' calls are passed over
        self._due = False  # a boundary, at the end of the backward pass
        self._patience = 0  # so many of them, before the one is taken to be done with
        self._optimizer_calls = 0
        self._backward_calls = 0
        self._replays = 0
        self._backwards_before = 0  # those of the interval when the running update began
        self._forwards: deque[Hashable] = deque(maxlen=2 * MAX_PERIOD)  # model calls while nothing was trained
        self._forward_calls = 0
        self._forwards_since_ns = 0
        self._changed = False
        self._mark_counts: Counter[str] = Counter()
        self._intervals = 0
        self._signatures: Counter[tuple[tuple[int, ...], ...]] = Counter()
        self._usual_signature: tuple[tuple[int, ...], ...] = ()
        self._backward_counts: Counter[int] = Counter()
        self._previous_ns = 0
        self._disturbed = False
        self._compiles = 0

    @property
    def thread(self) -> int:
        """Identity of the training thread; 0 while it is not known."""
        return self._thread.ident or 0 if self._thread is not None else 0

    # -- what hooks report ------------------------------------------------------------------------------------------

    def in_training_thread(self) -> bool:
        """Whether the calling thread is the one that trains; the main thread as long as none is known."""
        known = self.thread
        return threading.get_ident() == known if known else threading.current_thread() is threading.main_thread()

    def elsewhere(self) -> bool:
        """Whether the calling thread does not work for the one that trains.

        Raises:
            SystemExit: in another thread, when the script is to end.
        """
        known = self._thread
        if known is None or works_for(known):
            self._others = 0
            return False
        self._others += 1
        if (not self.seen and self._others > MOVED) or not known.is_alive():
            self._thread, self._others = None, 0
            return False
        stop.insist()
        return True

    def update_begins(self) -> None:
        """An `Optimizer.step` begins."""
        self._backwards_before = self.current.backwards
        if self._intervals < MIN_INTERVALS and not self.training.updates_compiled:
            self.training.updates_compiled = inside_compiled_call()

    def closure_ended(self) -> None:
        """An `Optimizer.step` that was given a closure is about to return. One pass is a step like any other, in its own order
        (Lightning); a line search runs as many as it likes.
        """
        if self.current.backwards - self._backwards_before > 1:
            self.current.closure = True

    def optimizer_called(self, optimizer: torch.optim.Optimizer, skipped: bool = False) -> None:
        """An `Optimizer.step` has run, or would have run had its GradScaler not skipped it."""
        if _capturing():
            return  # recorded into a CUDA graph, not run
        if not self.in_backward:  # a hook of a parameter's runs in a thread of autograd's
            self._thread = threading.current_thread()
        self._optimizer_calls += 1
        known = self.training.optimizers
        if not any(optimizer is other for other in known):
            known.append(optimizer)
        if skipped:
            self.current.marks.add(SKIPPED)
        if self.kind == "marker":
            return
        if self.kind != "optimizer":
            self._start("optimizer")
            self._alive = ({id(o) for o in living_optimizers()} - self._past) | {id(optimizer)}
        self._recent.append(id(optimizer))
        self._advance(id(optimizer))
        self._met[id(optimizer)] = optimizer

    def backward_starts(self, tensors: Any) -> None:
        """A backward pass begins: remember its loss, detached and without a synchronisation."""
        self.in_backward = True
        tensor = tensors if isinstance(tensors, torch.Tensor) else None
        if tensor is None and isinstance(tensors, (tuple, list)) and len(tensors) == 1:
            tensor = tensors[0]
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1:
            return
        if self._scaled is not None and tensor is self._scaled[0]:
            tensor = self._scaled[1]
        self._loss = tensor.detach()

    def graph_starts(self) -> None:
        """A backward pass begins whose graph is kept, by the gradients that it leaves in `.grad`."""
        self.in_backward = True
        self.graph_line = self.graph_line or user_line()

    def graph_done(self) -> None:
        """It has returned."""
        if _capturing():
            return
        self.current.graph_backwards += 1
        self._backward_calls += 1
        if self._thread is None:
            self._thread = threading.current_thread()
        if self._due:
            self._boundary()

    def backward_done(self, tensors: Any) -> None:
        """A backward pass has returned."""
        self._scaled = None
        if _capturing():
            return
        self.current.backwards += 1
        self._backward_calls += 1
        if self._thread is None:
            self._thread = threading.current_thread()
        if self._due:
            self._boundary()
        if self._optimizer_calls or self.kind == "marker":
            return
        function = tensors.grad_fn if isinstance(tensors, torch.Tensor) else None
        self._without_optimizer(("backward", self.last_root, type(function).__name__))

    def graph_replayed(self, graph: Any) -> None:
        """A CUDA graph was replayed by the script: the only trace of a step that was captured whole."""
        if self.in_backward or _capturing():
            return
        self.current.replays += 1
        self._replays += 1
        if not self._optimizer_calls and not self._backward_calls and self.kind != "marker":
            self._thread = threading.current_thread()
            self._without_optimizer(("replay", id(graph)))

    def model_called(self, model: Hashable, shapes: list[tuple[int, ...]]) -> None:
        """A model was called by the script itself, with tensors of `shapes`, and has returned."""
        if self._optimizer_calls or self._backward_calls or self._replays or self.kind not in ("none", FORWARD):
            return
        self._thread = threading.current_thread()
        key = (FORWARD, model)
        if self.kind == FORWARD:
            self.current.shapes.extend(shapes)
            self._advance(key)
            return
        self._forwards.append(key)
        self._forward_calls += 1
        self._forwards_since_ns = self._forwards_since_ns or time.perf_counter_ns()
        if not self._patient():
            period = self._forward_period()
            if period and not living_optimizers():
                self._start(FORWARD)
                for entry in list(self._forwards)[-2 * period :]:
                    self._advance(entry)

    def _patient(self) -> bool:
        """Too few model calls were seen to rule out that a training follows. The heap is searched now and then only."""
        count = self._forward_calls
        if self.session.infers or (count >= FORWARD_PATIENCE and count % FORWARD_PATIENCE == 0):
            return False
        seconds = (time.perf_counter_ns() - self._forwards_since_ns) / 1e9
        return count < FORWARD_LEAST or count % FORWARD_LEAST > 0 or seconds < FORWARD_PATIENCE_S

    def _forward_period(self) -> int:
        return smallest_period(tuple(self._forwards), covering=set(self._forwards))

    @property
    def forward_steps(self) -> int:
        """Rounds of model calls in a script that has trained nothing so far; 0 when they do not repeat."""
        period = self._forward_period() if not (self._optimizer_calls or self._backward_calls) else 0
        return self._forward_calls // period if period else 0

    def loss_scaled(self, plain: Any, scaled: Any) -> None:
        """A GradScaler has scaled a loss: the plain one is the one to remember."""
        if isinstance(plain, torch.Tensor) and isinstance(scaled, torch.Tensor):
            self._scaled = (scaled, plain.detach())

    def batch_loaded(self, shape: tuple[int, ...], nanoseconds: int, *, late: bool, first: bool = False) -> None:
        """A DataLoader has handed out a batch whose first tensor has `shape` (empty: none found); `late`: it had to be waited for;
        `first` of an iterator.
        """
        interval = self.current
        interval.loader_ns += nanoseconds
        interval.late_ns += nanoseconds if late else 0
        interval.batches += 1
        interval.iterators += first
        if shape:
            interval.samples += shape[0]
            interval.loader_shapes.append(shape)

    def note(self, mark: str) -> None:
        """The running interval holds something that is no training step."""
        self.current.marks.add(mark)

    def mark(self) -> None:
        """`advisor.step()`: a step ends here, by the script's own word. From the first call on only this counts."""
        if not self.patches.active:
            stop.insist()
            return
        if self.elsewhere():
            return
        self._thread = threading.current_thread()
        if self.kind != "marker":
            self._start("marker")
        self._boundary()

    @property
    def pattern_length(self) -> int:
        """Optimizer calls (or backward passes) in a step; 0 while undecided."""
        return len(self._pattern)

    def pass_over(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """These were stepped before; no period is to wait for them."""
        self._past.update(map(id, optimizers))

    def detach(self) -> None:
        """Take all hooks back; the script goes on untouched."""
        self.patches.restore_all()

    # -- the sequence -----------------------------------------------------------------------------------------------

    def _start(self, kind: str) -> None:
        self._changed = self.kind != "none" and self.seen > 0
        self.kind = kind
        self._pattern, self._position = (), 0
        self._unsettled, self._loose = 0, False
        self._history.clear()

    def _without_optimizer(self, key: Hashable) -> None:
        if self.kind == "period":
            self._advance(key)
            return
        self._history.append(key)
        count = self._backward_calls + self.current.replays
        # A scan for optimizers that exist and were not called yet costs milliseconds: at 3, 6, 12, … calls only.
        if count < 3 or (count % 3 or (count // 3) & (count // 3 - 1)):
            return
        if living_optimizers() and count < PATIENCE:
            return
        history = list(self._history)
        self._start("period")
        self._alive = set()
        for entry in history[:-1]:
            self._history.append(entry)
        self._advance(key)

    def _advance(self, key: Hashable) -> None:
        if self._pattern:
            if key == self._pattern[self._position]:
                self._position += 1
                self._unsettled = 0
                if self._position == len(self._pattern):
                    self._position = 0
                    self._rounds += 1
                    self._boundary()
                return
            if self._loose and self._unsettled < self._patience:
                self._unsettled += 1
                return
            self._broken = self._broken + 1 if key in self._met and self._rounds < LASTING else 0
            self._old_pattern, self._pattern = self._pattern, ()
            self._unsettled, self._loose = 0, False
            self._changed = True
            self._history.clear()
            if self.kind == "optimizer":
                # Those of the old pattern may be of a model that is done with: only new ones are waited for.
                self._past.update(self._old_pattern)
                self._alive = ({id(o) for o in living_optimizers()} - self._past) | {key}
        self._history.append(key)
        self._unsettled += 1
        if self.kind == "optimizer" and (self._broken >= BROKEN or self._unsettled > UNSETTLED) and self._loosen(key):
            return
        period = self._find_period()
        if not period:
            return
        self._settle(tuple(self._history)[-period:])
        if not self._position:
            self._boundary()

    def _find_period(self) -> int:
        history = tuple(self._history)
        if self.kind in ("period", FORWARD):
            return smallest_period(history)
        if len(self._alive) == 1 and not self._old_pattern:
            return 1  # there is but one optimizer, and never was another
        period = smallest_period(history, covering=self._alive)
        if not period and len(history) > MAX_PERIOD:
            # An optimizer that exists is never stepped: go by those that are.
            period = smallest_period(history, covering=set(history))
        return period

    def _settle(self, pattern: tuple[Hashable, ...]) -> None:
        self._position = 0
        old = self._old_pattern
        if old:
            # A round entered in its middle: let it begin where the old one did, at the first of a run of such calls.
            starts = [i for i in range(len(pattern)) if pattern[i] == old[0] and pattern[i - 1] != old[0]]
            if starts and starts[0]:
                shift = starts[0]
                pattern, self._position = pattern[shift:] + pattern[:shift], len(pattern) - shift
        self._pattern, self._rounds, self._unsettled = pattern, 0, 0
        if self.kind == "optimizer":
            stepped = set(pattern)
            self.training.optimizers[:] = [o for o in self.training.optimizers if id(o) in stepped]
        self._history.clear()

    def _loosen(self, key: Hashable) -> bool:
        """No period lasts: from here on a step ends with each call of the optimizer that is called most; not while none is again."""
        latest = max(UNSETTLED, self._unsettled)
        calls = Counter(list(self._recent)[-latest:])
        anchor = max(calls, key=calls.__getitem__)
        if calls[anchor] < 2:
            return False
        self._pattern, self._position, self._rounds = (anchor,), 0, 0
        self._unsettled = self._broken = 0
        self._loose, self._patience = True, UNSETTLED + 2 * len(calls)
        self.training.optimizers[:] = [o for o in self.training.optimizers if id(o) in calls]
        self._history.clear()
        if key == anchor:
            self._boundary()
        return True

    # -- the boundary -----------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        # In a hook of a parameter's autograd's thread-local state is in place, which a profiler cannot be started or stopped in.
        self._due = self.in_backward
        if self._due:
            return
        stop.insist()
        training = self.training
        if training.device.type == "cpu" and training.optimizers:
            training.device = _device_of(training.optimizers[0])
        event, now = clocks(training.device)
        interval, self.current = self.current, Interval()
        interval.backwards = interval.backwards or interval.graph_backwards
        self.interval = interval
        reason = self._judge(interval)
        loss, self._loss = self._loss, None
        step = StepEvent(
            index=self.seen,
            host_ns=now,
            event=event,
            clean=not reason,
            reason=reason,
            loss=loss,
            elements=interval.elements,
            draws=tuple(training.draws or ()),
        )
        if training.draws is not None:
            training.draws.clear()
        self.seen += 1
        for listener in tuple(training.on_step):
            try:
                listener(step)
            except Exception as error:
                self.patches.switch_off(error)
                return
        taken = time.perf_counter_ns() - now
        self._disturbed = taken > max(LISTENER_NS, LISTENER_FRAC * (now - self._previous_ns))
        self._previous_ns = now

    def _judge(self, interval: Interval) -> str:
        """Why the interval is not clean; "" when it is."""
        reasons = []
        if not self.seen:
            reasons.append(FIRST)
        if self._changed:
            reasons.append(PATTERN)
            self._changed = False
        compiles = compiled_graphs()
        if compiles != self._compiles:
            self._compiles = compiles
            interval.marks.add(COMPILE)
        self._intervals += 1
        for mark in sorted(interval.marks):
            self._mark_counts[mark] += 1
            if self._intervals < MIN_INTERVALS or 2 * self._mark_counts[mark] <= self._intervals:
                reasons.append(mark)
        if not {FIRST, PATTERN}.intersection(reasons):
            # Those two hold what came before steps were known: nothing to compare with, nothing to learn from.
            usual, counts = self.usual_backwards, self._backward_counts
            counts[interval.backwards] += 1
            if counts[interval.backwards] >= counts[usual]:
                self.usual_backwards = interval.backwards
            self.closure_steps |= interval.closure
            if self._intervals > MIN_INTERVALS and interval.backwards != usual and not self.closure_steps:
                reasons.append(BACKWARDS)
            if self._other_shapes(interval.signature):
                reasons.append(SHAPES)
        if self._disturbed:
            reasons.append(OWN)
        return reasons[0] if reasons else ""

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
            self.training.fixed_shapes = False
        return other and 2 * usual > total


class _Hooks:
    """Hooks of all optimizers, behind one of torch's, which is there while there are any.

    Torch calls hooks as it walks through the dictionary that holds them, and one put in or taken out meanwhile ends that walk in an
    error, in the user's step. Ours come and go inside a step: they are in a list of their own, and torch's hook stays until a
    moment at which it can go.
    """

    def __init__(self, register: Callable[[Any], RemovableHandle]) -> None:
        self._register = register
        self._hooks: list[tuple[Callable[..., Any], Patches]] = []
        self._handle: RemovableHandle | None = None
        self._walking = 0

    def add(self, hook: Callable[..., Any], patches: Patches) -> None:
        """Call `hook` with what torch gives its own, until `patches` are undone. What it returns is passed on to torch."""
        ours = hook, patches
        self._hooks.append(ours)
        if self._handle is None:
            # Dynamo stays out: of a script that compiles its optimizer's step it would trace all of a boundary, and tell of what it does
            # not know there.
            self._handle = self._register(_disable_dynamo(lambda *given: self._called(*given)))

        def remove() -> None:
            self._hooks.remove(ours)
            self._leave()

        patches.undo(remove)

    def _called(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        given = None
        self._walking += 1
        try:
            for hook, patches in tuple(self._hooks):
                if patches.active:
                    given = hook(optimizer, args, kwargs) or given
        finally:
            self._walking -= 1
        return given

    def _leave(self) -> None:
        if self._hooks or self._handle is None:
            return
        hooks = self._handle.hooks_dict_ref()
        if not (self._walking and hooks and next(reversed(hooks)) != self._handle.id):
            self._handle.remove()
            self._handle = None


_before_steps, _after_steps = _Hooks(register_optimizer_step_pre_hook), _Hooks(register_optimizer_step_post_hook)


def after_optimizer_steps(listener: Callable[[Any], None], patches: Patches) -> None:
    """Call `listener` with each optimizer that has made a step, until `patches` are undone or it raises."""
    listen = patches.guard(listener)
    _after_steps.add(lambda optimizer, args, kwargs: listen(optimizer), patches)


def attach(training: Training, session: Session, patches: Patches | None = None) -> StepWatcher:
    """Hook optimizers, backward passes, GradScalers and graph replays; boundaries are reported from now on.

    Taken back by `StepWatcher.detach()`. The hooks change no random state and no result, and no argument but a closure's, which
    an open traced window annotates.
    """
    patches = patches or Patches()
    watcher = StepWatcher(training, session, patches)
    guard = patches.guard

    optimizer_called = guard(watcher.optimizer_called)
    update_begins, closure_ended = guard(watcher.update_begins), guard(watcher.closure_ended)
    backward_starts, backward_done = guard(watcher.backward_starts), guard(watcher.backward_done)

    def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if watcher.elsewhere():
            return None
        updates.optimizer_begins(optimizer)
        update_begins()
        return updates.annotated_closure(args, kwargs)

    def after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if watcher.elsewhere():
            return
        updates.optimizer_ends()  # before the boundary, at which the window may end
        if updates.closure_of(args, kwargs) is not None:
            closure_ended()
        optimizer_called(optimizer)

    _before_steps.add(before_step, patches)
    _after_steps.add(after_step, patches)

    # Tensor.backward and everything else ends up in these two.
    for name in ("backward", "grad"):
        _wrap_engine(watcher, name, backward_starts, backward_done)

    scaler = torch.amp.grad_scaler.GradScaler
    plain_step, plain_scale = scaler.step, scaler.scale
    loss_scaled = guard(watcher.loss_scaled)
    seen_scaler = guard(lambda found: _append_new(training.scalers, found))

    @wraps(plain_step)
    def scaler_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not patches.active or not self._enabled or watcher.elsewhere():
            return plain_step(self, optimizer, *args, **kwargs)
        seen_scaler(self)
        calls = watcher._optimizer_calls
        result = plain_step(self, optimizer, *args, **kwargs)
        if watcher._optimizer_calls == calls:
            optimizer_called(optimizer, True)
        return result

    @wraps(plain_scale)
    def scaler_scale(self: Any, outputs: Any) -> Any:
        result = plain_scale(self, outputs)
        if not watcher.elsewhere():
            loss_scaled(outputs, result)
        return result

    patches.replace(scaler, "step", scaler_step)
    patches.replace(scaler, "scale", scaler_scale)

    graph = torch.cuda.CUDAGraph
    plain_replay = graph.replay
    graph_replayed = guard(watcher.graph_replayed)

    @wraps(plain_replay)
    def replay(self: Any) -> Any:
        result = plain_replay(self)
        if not watcher.elsewhere():
            graph_replayed(self)
        return result

    patches.replace(graph, "replay", replay)
    return watcher


def _wrap_engine(watcher: StepWatcher, name: str, starts: Any, done: Any) -> None:
    plain = getattr(torch.autograd, name)
    graph_starts, graph_done = watcher.patches.guard(watcher.graph_starts), watcher.patches.guard(watcher.graph_done)

    @wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not watcher.patches.active or watcher.elsewhere():
            return plain(*args, **kwargs)
        if kwargs.get("create_graph", len(args) > CREATE_GRAPH[name] and args[CREATE_GRAPH[name]]):
            # A gradient penalty, part of a loss that comes later.
            if name != "backward":
                return plain(*args, **kwargs)
            graph_starts()
            try:
                result = plain(*args, **kwargs)
            finally:
                watcher.in_backward = False
            graph_done()
            return result
        tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        starts(tensors)
        try:
            result = plain(*args, **kwargs)
        finally:
            watcher.in_backward = False
        done(tensors)
        return result

    watcher.patches.replace(torch.autograd, name, run)


def works_for(thread: threading.Thread) -> bool:
    """Whether the caller is in this thread, or in a backward pass, which threads of autograd's may run for it."""
    return thread is threading.current_thread() or torch._C._current_graph_task_id() != -1


def living_optimizers() -> list[torch.optim.Optimizer]:
    """All optimizer objects in the process whose steps would be seen, stepped or not; a scan of the heap, milliseconds.

    Torch's hooks do not reach a wrapper that never ran `Optimizer.__init__` (Accelerate's): the one inside is told.
    """
    return [
        found
        for found in heap.living(heap.classes(torch.optim.Optimizer))
        if getattr(type(found).step, "hooked", False) and getattr(found, "param_groups", None)
    ]


def _append_new(found: list[Any], value: Any) -> None:
    if not any(value is other for other in found):
        found.append(value)


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _smaller_batch(signature: tuple[tuple[int, ...], ...], usual: tuple[tuple[int, ...], ...]) -> bool:
    """The same shapes with fewer samples in front."""
    return len(signature) == len(usual) and all(
        len(a) == len(b) and a[1:] == b[1:] and a[:1] <= b[:1] for a, b in zip(signature, usual, strict=True)
    )
