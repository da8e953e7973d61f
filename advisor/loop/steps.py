"""What a training step is, found while the script runs, and the boundary at which everything else happens.

A step is one period of the repeating sequence of `Optimizer.step` calls: each call for one optimizer, D and G together for a
GAN, five D and one G for a WGAN. Where no short period lasts (StyleGAN2's regularisation in every fourth and every sixteenth
round), each call of the optimizer that is called most ends a step, and those with another number of backward passes are not
clean. Gradient accumulation needs no rule of its own: backward passes are counted, not taken for steps. A `GradScaler` that
skips an update still ends the step. Without any optimizer the period in the sequence of backward passes serves (hand-written
updates), and in a script that trains nothing at all, once that is past doubt, the period in the sequence of its model calls;
`advisor.step()` in the script overrides all of them. A loop without optimizer, backward, model call or marker has no steps that
advisor can see. What lies between two boundaries: interval.py.

All of it is in one thread, the first that trains. What another one trains at the same time is no step of this training: a profiler that was
started in one thread cannot be stopped in another, and no change may come while the other is in the middle of a step.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch

from advisor.loop import stop
from advisor.loop.compiles import inside_compiled_call
from advisor.loop.interval import MIN_INTERVALS, SKIPPED, StepInterval, Usual
from advisor.loop.latestloss import LatestLoss
from advisor.loop.modelcalls import ModelCalls
from advisor.loop.optimizers import device_of, living_optimizers
from advisor.loop.patches import Patches
from advisor.loop.period import MAX_PERIOD, begun_like, period_of, smallest_period
from advisor.loop.session import Session
from advisor.loop.sources import user_line
from advisor.loop.threads import capturing, works_for
from advisor.loop.timing import clocks
from advisor.loop.training import StepEvent, Training

# Backward passes without any Optimizer.step, while an optimizer exists, before they are taken for steps: accumulation
# over more micro-batches than this has not been seen in CNN training.
PATIENCE = 256
# Optimizer calls that make no period, and periods broken by an optimizer already known before they have lasted for `LASTING`
# rounds, before a step is what lies between two calls of one optimizer.
UNSETTLED, BROKEN, LASTING = 4 * MAX_PERIOD, 4, 32
MOVED = 32  # calls in another thread, none in the first, before that one is taken to have trained nothing in earnest
MOST_OPTIMIZERS = 4096  # one a parameter, where each is stepped in backward as soon as its gradient is there

FORWARD = "forward"


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
        self.current, self.interval = StepInterval(), StepInterval()
        self.in_backward = False
        self.last_root: int = 0  # id of the root module called last, for the sequence of backward passes
        self._thread: threading.Thread | None = None  # the training's; known from its first call on
        self._others = 0  # calls of other threads since the last of that one
        self.graph_line = ""  # the script's, of the first `backward(create_graph=True)`
        self._loss = LatestLoss()
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
        self.optimizer_calls = 0
        self._backward_calls = 0
        self._replays = 0
        self._backwards_before = 0  # those of the interval when the running update began
        self._model_calls = ModelCalls(patient=not session.infers)
        self._previous_ns = 0
        self.usual = Usual(training)

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
        if self.usual.intervals < MIN_INTERVALS and not self.training.updates_compiled:
            self.training.updates_compiled = inside_compiled_call()

    def closure_ended(self) -> None:
        """An `Optimizer.step` that was given a closure is about to return. One pass is a step like any other, in its own order
        (Lightning); a line search runs as many as it likes.
        """
        if self.current.backwards - self._backwards_before > 1:
            self.current.closure = True

    def optimizer_called(self, optimizer: torch.optim.Optimizer, skipped: bool = False) -> None:
        """An `Optimizer.step` has run, or would have run had its GradScaler not skipped it."""
        if capturing():
            return  # recorded into a CUDA graph, not run
        if not self.in_backward:  # a hook of a parameter's runs in a thread of autograd's
            self._thread = threading.current_thread()
        self.optimizer_calls += 1
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
        self._loss.backward_starts(tensors)

    def graph_starts(self) -> None:
        """A backward pass begins whose graph is kept, by the gradients that it leaves in `.grad`."""
        self.in_backward = True
        self.graph_line = self.graph_line or user_line()

    def graph_done(self) -> None:
        """It has returned."""
        if capturing():
            return
        self.current.graph_backwards += 1
        self._pass_done()

    def backward_done(self, tensors: Any) -> None:
        """A backward pass has returned."""
        self._loss.backward_done()
        if capturing():
            return
        self.current.backwards += 1
        self._pass_done()
        if self.optimizer_calls or self.kind == "marker":
            return
        function = tensors.grad_fn if isinstance(tensors, torch.Tensor) else None
        self._without_optimizer(("backward", self.last_root, type(function).__name__))

    def _pass_done(self) -> None:
        self._backward_calls += 1
        if self._thread is None:
            self._thread = threading.current_thread()
        if self._due:
            self._boundary()

    def graph_replayed(self, graph: Any) -> None:
        """A CUDA graph was replayed by the script: the only trace of a step that was captured whole."""
        if self.in_backward or capturing():
            return
        self.current.replays += 1
        self._replays += 1
        if not self.optimizer_calls and not self._backward_calls and self.kind != "marker":
            self._thread = threading.current_thread()
            self._without_optimizer(("replay", id(graph)))

    def model_called(self, model: Hashable, shapes: list[tuple[int, ...]]) -> None:
        """A model was called by the script itself, with tensors of `shapes`, and has returned."""
        if self.optimizer_calls or self._backward_calls or self._replays or self.kind not in ("none", FORWARD):
            return
        self._thread = threading.current_thread()
        key = (FORWARD, model)
        if self.kind == FORWARD:
            self.current.shapes.extend(shapes)
            self._advance(key)
            return
        entries = self._model_calls.saw(key)
        if entries and not living_optimizers():
            self._start(FORWARD)
            for entry in entries:
                self._advance(entry)

    @property
    def forward_steps(self) -> int:
        """Rounds of model calls in a script that has trained nothing so far; 0 when they do not repeat."""
        return 0 if self.optimizer_calls or self._backward_calls else self._model_calls.rounds

    def loss_scaled(self, plain: Any, scaled: Any) -> None:
        """A GradScaler has scaled a loss: the plain one is the one to remember."""
        self._loss.scaled(plain, scaled)

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
        self.usual.changed = self.kind != "none" and self.seen > 0
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
            self.usual.changed = True
            self._history.clear()
            if self.kind == "optimizer":
                # Those of the old pattern may be of a model that is done with: only new ones are waited for.
                self._past.update(self._old_pattern)
                self._alive = ({id(o) for o in living_optimizers()} - self._past) | {key}
        self._history.append(key)
        self._unsettled += 1
        if self.kind == "optimizer" and (self._broken >= BROKEN or self._unsettled > UNSETTLED) and self._loosen(key):
            return
        known = self.kind == "optimizer"
        period = (
            period_of(tuple(self._history), self._alive, new=not self._old_pattern)
            if known
            else smallest_period(tuple(self._history))
        )
        if not period:
            return
        self._settle(tuple(self._history)[-period:])
        if not self._position:
            self._boundary()

    def _settle(self, pattern: tuple[Hashable, ...]) -> None:
        pattern, self._position = begun_like(self._old_pattern, pattern)
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
            training.device = device_of(training.optimizers[0])
        event, now = clocks(training.device)
        interval, self.current = self.current, StepInterval()
        interval.backwards = interval.backwards or interval.graph_backwards
        self.interval = interval
        reason = self.usual.judge(interval, first=not self.seen)
        step = StepEvent(
            index=self.seen,
            host_ns=now,
            event=event,
            clean=not reason,
            reason=reason,
            loss=self._loss.take(),
            elements=interval.elements,
            draws=tuple(training.draws or ()),
            cpu_ns=time.process_time_ns(),
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
        self.usual.listened(taken, now - self._previous_ns)
        self._previous_ns = now
