"""Finds the live objects of the training loop, in the loop, without changing them.

For the first steps `nn.Module.__call__` and a few other entry points are observed (`Discovery.look`); after that only the
classes of the root modules are, at one observed call per root and step. What was found stands in `Training`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from advisor.loop.compiles import is_compiled
from advisor.loop.forwards import ForwardWatch
from advisor.loop.guides import Guides
from advisor.loop.habits import Habits
from advisor.loop.interval import EVALUATION
from advisor.loop.loaders import LoaderHooks
from advisor.loop.observed import IteratorSeen, Observations
from advisor.loop.patches import Patch
from advisor.loop.recorded import RecordedStep
from advisor.loop.rootcalls import RootCalls
from advisor.loop.sources import user_line
from advisor.loop.steps import FORWARD, StepWatcher
from advisor.loop.training import RootModule, StepEvent, Training
from advisor.loop.values import autocast_dtype, class_of, elements, inner, sent, shapes
from advisor.loop.waiting import tell_called

# Steps to look closely at: the first builds lazy modules and optimizer state, the second is typical, one to spare.
LOOK_STEPS = 3
# Looking again after the roots have changed is cheap but not free; a script that changes them every few steps is left alone.
# One that trains a model for a while and goes on to the next (k-fold) is followed for as long as it runs.
MAX_LOOKS = 8
CALM_STEPS = 32
STACKS = 200  # timed under anomaly detection: modules of a step or two


@dataclass(slots=True, eq=False)
class _Call:
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    thread: int


class Discovery:
    """Fills a Training. Registered as its first `on_step` listener, so that later listeners see the step's objects.

    `finished` is True once the first look is over; `seen` holds the observations.
    """

    def __init__(self, training: Training, watcher: StepWatcher, *, keep_inputs: bool) -> None:
        self.training, self.watcher, self.patches = training, watcher, watcher.patches
        self.seen = Observations()
        self.finished = False
        self.keep_inputs = keep_inputs
        self._steps_looked = 0
        self._looks = 0
        self._hasty_looks = 0  # soon after the last
        self._calm = 0  # boundaries since the last look
        self._looking: list[Patch] = []
        self._calls: list[_Call] = []
        self._guides = Guides()
        self._root_watch = RootCalls(watcher, self._observe_root)
        self._trains: dict[int, bool] = {}
        self._root_calls = 0
        self._recorded = RecordedStep()
        self._depth = threading.local()
        self._samples: Counter[int] = Counter()
        self.loaders = LoaderHooks(training, watcher, self._begun, self.look_at_batch)
        self._habits = Habits(training, self.patches, lambda: self.seen)
        self._forwards = ForwardWatch(self.patches, self._observe_forward)
        self.patches.undo(self._let_go)

    def _let_go(self) -> None:
        """Hold nothing of the script's any more: what torch remembers of a hook may hold this for good."""
        self._calls, self.seen.last_conv = [], None
        self.loaders.let_go()
        self._guides.let_go()
        self._recorded.let_go()
        self._root_watch.let_go()

    # -- boundaries -------------------------------------------------------------------------------------------------

    def on_step(self, step: StepEvent) -> None:
        """The `Training.on_step` listener."""
        interval = self.watcher.interval
        if self._looking:
            self._adopt_calls()
            self._guides.sift(first=self._steps_looked == 0)
            self._steps_looked += 1
            if self._steps_looked >= LOOK_STEPS:
                self.stop_looking()
        elif (
            self._root_calls == 0 and (interval.backwards or not self._root_watch.any) and self._hasty_looks < MAX_LOOKS
        ):
            self.look()
        else:
            self._calm += 1
        self._root_calls = 0
        self.loaders.adopt(clean=step.clean)
        self._count_samples()
        if self.training.keep_gradients:
            # Asked for by a listener at the last boundary, after this method had run: one whole step has been recorded.
            self.training.keep_gradients = False
            self._recorded.hand_over(self.training.roots)

    def _adopt_calls(self) -> None:
        calls, self._calls = self._calls, []
        latest: dict[int, _Call] = {}
        counts: Counter[int] = Counter()
        for call in calls:
            if call.thread == self.watcher.thread or not self.watcher.thread:
                latest[id(call.module)] = call
                counts[id(call.module)] += 1
        if not latest:
            return
        roots = self.training.roots
        if self._steps_looked == 1 and self._looks > 1:
            # A new look: modules that are no longer called are no longer roots.
            roots[:] = [root for root in roots if id(root.module) in latest]
        for key, call in latest.items():
            root = next((r for r in roots if r.module is call.module), None)
            if root is None:
                root = RootModule(module=call.module, name=self._name(call.module))
                roots.append(root)
            root.calls = counts[key]
            root.args, root.kwargs, root.output = call.args, call.kwargs, call.output
        if self.training.device.type == "cpu":
            parameter = next((p for r in roots for p in r.module.parameters()), None)
            if parameter is not None:
                self.training.device = parameter.device

    def _name(self, module: torch.nn.Module) -> str:
        name = class_of(inner(module)).__name__
        taken = {root.name for root in self.training.models}
        numbered, count = name, 1
        while numbered in taken:
            count += 1
            numbered = f"{name}#{count}"
        return numbered

    def _count_samples(self) -> None:
        interval = self.watcher.interval
        samples = interval.samples
        if not samples and interval.shapes:
            firsts = [shape[0] for shape in interval.shapes if shape]
            one_model = len(self.training.roots) == 1 and len(self.training.optimizers) <= 1
            samples = sum(firsts) if one_model and not interval.closure else max(firsts, default=0)
        if samples:
            if len(self._samples) > 1000:
                self._samples.clear()
            self._samples[samples] += 1
            if self._samples[samples] >= self._samples[self.training.batch_size]:
                self.training.batch_size = samples

    @property
    def looking(self) -> bool:
        """A close look is under way: every module call is observed."""
        return bool(self._looking)

    # -- looking closely --------------------------------------------------------------------------------------------

    def look_once_an_optimizer_is_made(self) -> None:
        """Begin the close look when the script makes its first optimizer; without one it begins at the first boundary.

        Not earlier: making an optimizer loads Dynamo and torch.fx, and both keep the `nn.Module.__call__` that they find
        when they are loaded as the true one.
        """
        plain = torch.optim.Optimizer.__init__

        @wraps(plain)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            unless()
            plain(optimizer, *args, **kwargs)
            begin()

        def look() -> None:
            self.patches.restore(patch)
            if not self._looks:
                self.look()

        begin, unless = self.patches.guard(look), self.patches.guard(self._forwards.end)
        patch = self.patches.replace(torch.optim.Optimizer, "__init__", init)

    def wait_for_forwards(self) -> None:
        """Count the script's model calls where it shows signs of training nothing; making an optimizer ends that."""
        self._forwards.wait()

    def _observe_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], start: int
    ) -> None:
        if not self.watcher.in_training_thread() or self.watcher.in_backward or next(module.parameters(), None) is None:
            return
        self._begun(start)
        self.watcher.model_called(id(module), shapes(args, kwargs))

    def look(self) -> None:
        """Observe every module call, `zero_grad`, clipping and host-to-device moves for the next steps."""
        self._forwards.end()
        self._root_watch.end()
        self._looks += 1
        self._hasty_looks += self._calm < CALM_STEPS
        self._steps_looked = self._calm = 0
        call = self.patches.replace(torch.nn.Module, "__call__", self._module_call())
        self._looking = [call, *self._habits.patch()]

    def stop_looking(self) -> None:
        """Take the close look back; from here on only calls of the roots are observed."""
        for patch in reversed(self._looking):
            self.patches.restore(patch)
        self._looking = []
        self._calls, self.seen.last_conv = [], None
        self.training.guides.clear()
        for module in self._guides.found(self.training.roots):
            self.training.guides.append(RootModule(module=module, name=self._name(module)))
        for root in self.training.roots:
            root.output = None  # a reference to it would keep the step's graph nodes
            if not self.keep_inputs:
                root.args, root.kwargs = (), {}
        self._root_watch.watch(self.training.roots)
        self.finished = True

    def look_anew(self) -> None:
        """Forget what was observed and look closely at the next steps: the script's step is another one from here on."""
        if self._looking:
            self.stop_looking()
        first_ns, self.seen = self.seen.first_ns, Observations(batch=self.seen.batch)
        self.seen.first_ns = first_ns
        self.finished = False
        self.look()

    def rest(self) -> None:
        """No close look from here on. To be called before others put their own `nn.Module.__call__` on top of the look's,
        as the annotation of a traced window does: hooks that end in another order than they began cannot be taken back.
        """
        self._hasty_looks = MAX_LOOKS
        if self._looking:
            self.stop_looking()

    def _module_call(self) -> Any:
        plain = torch.nn.Module.__call__
        depth = self._depth
        observe = self.patches.guard(self._observe_call)
        entering, leaving = self.patches.guard(self._enter), self.patches.guard(self._leave)

        @wraps(plain)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.patches.active or not self._looking or torch.compiler.is_compiling():
                return plain(module, *args, **kwargs)
            level = getattr(depth, "level", 0)
            if level == 0 and not self.seen.first_ns:
                self.seen.first_ns = time.perf_counter_ns()
                tell_called(self.watcher.session, torch)
            depth.level = level + 1
            entering(module, args)
            try:
                with self.out_of_sight() if is_compiled(module) else contextlib.nullcontext():
                    output = plain(module, *args, **kwargs)
            finally:
                depth.level = level
            leaving(module, args, output)
            observe(module, args, kwargs, output, level == 0)
            return output

        return call

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not self.watcher.in_backward and torch.is_grad_enabled():
            self.seen.layouts.enter(module, args)

    def _leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.watcher.in_backward and torch.is_grad_enabled():
            self.seen.layouts.leave(module, args, output)

    @contextlib.contextmanager
    def out_of_sight(self) -> Iterator[None]:
        """Inside, nothing of a close look is in place: what Dynamo traces there is torch's own code.

        It would guard on ours as well, and trace the whole forward once more when the look is over.
        """
        looking = self._looking
        hidden = [patch for patch in looking if vars(patch.owner).get(patch.name) is patch.replacement]
        for patch in reversed(hidden):
            patch.restore()
        try:
            yield
        finally:
            if self.patches.active and self._looking is looking:
                for patch in hidden:
                    setattr(patch.owner, patch.name, patch.replacement)

    def _observe_call(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, outermost: bool
    ) -> None:
        if self.watcher.in_backward:
            return  # activation checkpointing runs forward again
        seen = self.seen
        if len(seen.stack_us) < STACKS and torch.is_anomaly_enabled():
            begin = time.perf_counter_ns()
            traceback.format_stack()  # as torch does for each node of the graph
            seen.stack_us.append((time.perf_counter_ns() - begin) / 1e3)
        seen.note_convolution(module, args, output)
        if seen.autocast is None:
            kind = output.device.type if isinstance(output, torch.Tensor) else self.training.device.type
            seen.autocast = autocast_dtype(kind)
        if not outermost:
            return
        seen.last_conv = None
        infers = self.watcher.kind == FORWARD
        if not torch.is_grad_enabled() and not infers:
            if not module.training:
                self.watcher.note(EVALUATION)
            if self.watcher.in_training_thread() and next(module.parameters(), None) is not None:
                self._guides.called(module)
            return
        if next(module.parameters(), None) is None:
            return  # a loss, or a preprocessing module
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            seen.no_sync |= not module.require_backward_grad_sync
        self.watcher.last_root = id(module)
        if not infers:
            self._note_inputs(args, kwargs)
        self._trains[id(module)] = module.training
        self._calls.append(_Call(module, args, kwargs, output, threading.get_ident()))
        if self.training.keep_gradients:
            known = next((root for root in self.training.roots if root.module is module), None)
            if known is not None:
                self._recorded.note(known, args, kwargs, output)
        if infers and self.watcher.in_training_thread():
            self.watcher.model_called(id(module), shapes(args, kwargs))

    # -- the steady state -------------------------------------------------------------------------------------------

    def _observe_root(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        module, watcher = root.module, self.watcher
        if watcher.kind == FORWARD:
            if threading.get_ident() == watcher.thread:
                watcher.model_called(id(module), shapes(args, kwargs))
            return
        trains = self._trains.get(id(module), True)
        if module.training != trains and trains:
            watcher.note(EVALUATION)
            return
        if not torch.is_grad_enabled() or threading.get_ident() != watcher.thread:
            return
        self._root_calls += 1
        watcher.last_root = id(module)
        self._note_inputs(args, kwargs)
        if self.training.keep_gradients:
            self._recorded.note(root, args, kwargs, output)

    def _note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        interval = self.watcher.current
        interval.shapes.extend(shapes(args, kwargs))
        interval.elements += elements(args, kwargs)

    def _begun(self, start: int) -> None:
        if not self.seen.first_ns:
            self.seen.first_ns = start

    def look_at_batch(self, batch: Any, iterator: Any) -> None:
        """Note a batch of training; `iterator`: what made it, where that is no loader of torch's."""
        if self.finished and not self._looking:
            return
        self.seen.batch.iterator = None if iterator is None else IteratorSeen.of(iterator)
        tensors = [sent(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return
        largest = max(tensors, key=lambda t: t.numel() * t.element_size())
        seen = self.seen.batch
        seen.shape = tuple(largest.shape)
        seen.nbytes = sum(t.numel() * t.element_size() for t in tensors)
        seen.dtype = largest.dtype
        seen.pointers = frozenset([largest.data_ptr()])
        seen.source = user_line()


def attach(training: Training, watcher: StepWatcher, *, keep_inputs: bool = True, infer: bool = False) -> Discovery:
    """Begin to look: `training` fills up within the first steps.

    `keep_inputs` keeps each root's latest arguments; `infer` reports model calls to the watcher while nothing trains.
    """
    discovery = Discovery(training, watcher, keep_inputs=keep_inputs)
    if infer:
        discovery.wait_for_forwards()
    discovery.look_once_an_optimizer_is_made()
    discovery.loaders.hook()
    training.on_step.insert(0, discovery.on_step)
    return discovery
