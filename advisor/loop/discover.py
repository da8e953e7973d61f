"""Finds the live objects of the training loop, in the loop, without changing them.

For the first steps `nn.Module.__call__` and a few other entry points are observed (`Discovery.look`); after that only the
classes of the root modules are, at one observed call per root and step. What was found stands in `Training`; facts.py
turns it into plain data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from advisor.loop.compiles import is_compiled
from advisor.loop.epochs import Epochs
from advisor.loop.forwards import ForwardWatch
from advisor.loop.layouts import LayoutWatch, is_channels_last
from advisor.loop.patches import Patch
from advisor.loop.repeats import in_loop
from advisor.loop.sources import user_line
from advisor.loop.steps import EPOCH, EVALUATION, FORWARD, StepWatcher
from advisor.loop.timing import clocks
from advisor.loop.training import Draw, RootModule, StepEvent, Training

# Steps to look closely at: the first builds lazy modules and optimizer state, the second is typical, one to spare.
LOOK_STEPS = 3
# Looking again after the roots have changed is cheap but not free; a script that changes them every few steps is left alone.
# One that trains a model for a while and goes on to the next (k-fold) is followed for as long as it runs.
MAX_LOOKS = 8
CALM_STEPS = 32
STACKS = 200  # timed under anomaly detection: modules of a step or two


@dataclass(slots=True, eq=False)
class ConvCall:
    """The latest call of a convolution module, seen while looking."""

    input_shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    followed_by_bn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IteratorSeen:
    """Settings of an iterator of torch's that no torch DataLoader has made: libraries have loaders of their own around them."""

    workers: int
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: int

    @classmethod
    def of(cls, iterator: Any) -> IteratorSeen:
        """Read from torch's own attributes."""
        return cls(
            workers=iterator._num_workers,
            pin_memory=bool(iterator._pin_memory),
            persistent_workers=bool(getattr(iterator, "_persistent_workers", False)),
            prefetch_factor=getattr(iterator, "_prefetch_factor", None) or 0,
        )


@dataclass(slots=True, eq=False)
class BatchSeen:
    """The latest batch of a training loader."""

    nbytes: int = 0
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()  # of its largest tensor
    pointers: frozenset[int] = frozenset()
    moved_unchanged: bool = False
    non_blocking: bool = False
    source: str = ""
    iterator: IteratorSeen | None = None


@dataclass(slots=True, eq=False)
class Observations:
    """What looking at the first steps has shown beyond the objects themselves."""

    convs: dict[int, ConvCall] = field(default_factory=dict)  # by id of the module
    autocast: torch.dtype | None = None
    zero_grad_to_none: bool | None = None
    clipping: bool = False
    clipped_scaled: str = ""  # the line that has clipped gradients which a GradScaler had scaled and not unscaled
    stack_us: list[float] = field(
        default_factory=list
    )  # what it takes to note where a call comes from, under anomaly detection
    no_sync: bool = False  # DDP was called inside its `no_sync()`
    batch: BatchSeen = field(default_factory=BatchSeen)
    layouts: LayoutWatch = field(default_factory=LayoutWatch)
    first_ns: int = 0  # perf_counter at the first batch or module call


@dataclass(slots=True, eq=False)
class _Call:
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    thread: int


def subtracts_means(norm: torch.nn.Module, conv: torch.nn.Module) -> bool:
    """Whether `norm`, behind `conv`, is a batch norm; or an instance norm, which matters for the convolution's bias alone."""
    kinds = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm._InstanceNorm
    return isinstance(norm, kinds if conv.bias is not None else kinds[:1])


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
        self._watching: list[Patch] = []
        self._calls: list[_Call] = []
        self._silent: dict[int, torch.nn.Module] = {}  # called without gradients since the last boundary
        self._guides: dict[int, torch.nn.Module] | None = None  # so called in each of the looked-at steps but the first
        self._roots: dict[int, RootModule] = {}
        self._trains: dict[int, bool] = {}
        self._root_calls = 0
        self._grads: dict[int, list[torch.Tensor | None]] = {}
        self._depth = threading.local()
        self._last_conv: tuple[torch.nn.Module, torch.Tensor] | None = None
        self._samples: Counter[int] = Counter()
        self._iterators: WeakKeyDictionary[Any, DataLoader[Any]] = WeakKeyDictionary()
        self._drawn: list[DataLoader[Any]] = []
        self.epochs = Epochs()
        self._forwards = ForwardWatch(self.patches, self._observe_forward)
        self.patches.undo(self._let_go)

    def _let_go(self) -> None:
        """Hold nothing of the script's any more: what torch remembers of a hook may hold this for good."""
        self._calls, self._last_conv, self._drawn = [], None, []
        self._silent, self._guides, self._grads = {}, None, {}
        self._roots.clear()  # which a hook has too

    # -- boundaries -------------------------------------------------------------------------------------------------

    def on_step(self, step: StepEvent) -> None:
        """The `Training.on_step` listener."""
        interval = self.watcher.interval
        if self._looking:
            self._adopt_calls()
            self._sift_guides()
            self._steps_looked += 1
            if self._steps_looked >= LOOK_STEPS:
                self.stop_looking()
        elif self._root_calls == 0 and (interval.backwards or not self._roots) and self._hasty_looks < MAX_LOOKS:
            self.look()
        else:
            self._calm += 1
        self._root_calls = 0
        self._adopt_loaders(step.clean)
        self._count_samples()
        if self.training.keep_gradients:
            # Asked for by a listener at the last boundary, after this method had run: one whole step has been recorded.
            self.training.keep_gradients = False
            for root in self.training.roots:
                root.output_grads = tuple(self._grads.pop(id(root), ()))
            self._grads.clear()

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

    def _sift_guides(self) -> None:
        """Keep what runs without gradients in every step; the first interval may hold what comes before training."""
        silent, self._silent = self._silent, {}
        if self._steps_looked == 0:
            return
        known = silent if self._guides is None else self._guides
        self._guides = {key: module for key, module in known.items() if key in silent}

    def _adopt_guides(self) -> None:
        training, found = self.training, self._guides or {}
        self._silent, self._guides = {}, None
        within = {id(module) for root in training.roots for module in root.module.modules()}
        training.guides.clear()
        for key, module in found.items():
            # What has the trained model in it, or is in it, is no other model.
            if key not in within and within.isdisjoint(map(id, module.modules())):
                training.guides.append(RootModule(module=module, name=self._name(module)))

    def _name(self, module: torch.nn.Module) -> str:
        name = type(inner(module)).__name__
        taken = {root.name for root in self.training.models}
        numbered, count = name, 1
        while numbered in taken:
            count += 1
            numbered = f"{name}#{count}"
        return numbered

    def _adopt_loaders(self, clean: bool) -> None:
        drawn, self._drawn = self._drawn, []
        # The batch that led to this boundary was drawn last; other loaders count in intervals without evaluation.
        for loader in drawn if clean else drawn[-1:]:
            self._adopt(loader, drawn)

    def _adopt(self, loader: DataLoader[Any], drawn: list[DataLoader[Any]]) -> None:
        """Add a loader, or put it in the place of one over the same data that the script has made anew: its workers must not live on."""
        known = self.training.loaders
        if any(loader is other for other in known):
            return
        for place, other in enumerate(known):
            done = self.epochs.left(other) and not any(other is used for used in drawn)
            if done and other.dataset is loader.dataset:
                known[place] = loader
                return
        known.append(loader)

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
        if not self._in_training_thread() or self.watcher.in_backward or next(module.parameters(), None) is None:
            return
        if not self.seen.first_ns:
            self.seen.first_ns = start
        self.watcher.model_called(id(module), _shapes(args, kwargs))

    def look(self) -> None:
        """Observe every module call, `zero_grad`, clipping and host-to-device moves for the next steps."""
        self._forwards.end()
        self._unwatch()
        self._looks += 1
        self._hasty_looks += self._calm < CALM_STEPS
        self._steps_looked = self._calm = 0
        replace = self.patches.replace
        self._looking = [replace(torch.nn.Module, "__call__", self._module_call())]
        self._looking += [
            replace(owner, "zero_grad", self._zero_grad(owner.zero_grad))
            for owner in (torch.optim.Optimizer, torch.nn.Module)
        ]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clip = self._clip(getattr(torch.nn.utils, name))
            self._looking += [replace(torch.nn.utils, name, clip), replace(torch.nn.utils.clip_grad, name, clip)]
        # What a `clip_grad_norm_` that the script has imported by its name calls.
        within = self._clip(torch.nn.utils.clip_grad._clip_grads_with_norm_)
        self._looking.append(replace(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", within))
        if torch.version.cuda is not None:
            self._looking += [
                replace(torch.Tensor, name, self._move(getattr(torch.Tensor, name))) for name in ("to", "cuda")
            ]

    def stop_looking(self) -> None:
        """Take the close look back; from here on only calls of the roots are observed."""
        for patch in reversed(self._looking):
            self.patches.restore(patch)
        self._looking = []
        self._calls, self._last_conv = [], None
        self._adopt_guides()
        for root in self.training.roots:
            root.output = None  # a reference to it would keep the step's graph nodes
            if not self.keep_inputs:
                root.args, root.kwargs = (), {}
        self._watch()
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
        if isinstance(module, torch.nn.modules.conv._ConvNd) and args and isinstance(args[0], torch.Tensor):
            value = args[0]
            seen.convs[id(module)] = ConvCall(tuple(value.shape), _weight_dtype(module, value), is_channels_last(value))
            if isinstance(output, torch.Tensor):
                self._last_conv = (module, output)
        elif self._last_conv is not None and subtracts_means(module, self._last_conv[0]):
            conv, conv_output = self._last_conv
            if args and args[0] is conv_output and id(conv) in seen.convs:
                seen.convs[id(conv)].followed_by_bn = True
        if seen.autocast is None:
            kind = output.device.type if isinstance(output, torch.Tensor) else self.training.device.type
            seen.autocast = _autocast(kind)
        if not outermost:
            return
        self._last_conv = None
        infers = self.watcher.kind == FORWARD
        if not torch.is_grad_enabled() and not infers:
            if not module.training:
                self.watcher.note(EVALUATION)
            if self._in_training_thread() and next(module.parameters(), None) is not None:
                self._silent[id(module)] = module
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
                self._record(known, args, kwargs, output)
        if infers and self._in_training_thread():
            self.watcher.model_called(id(module), _shapes(args, kwargs))

    def _zero_grad(self, plain: Any) -> Any:
        def observe(held: list[torch.Tensor]) -> None:
            if held:
                zeroed = held[0].grad is not None
                # Of several networks one may zero its own.
                self.training.zeroes_gradients |= zeroed
                self.seen.zero_grad_to_none = not (zeroed or self.seen.zero_grad_to_none is False)

        record = self.patches.guard(observe)

        @wraps(plain)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            held = _with_gradient(owner) if self.patches.active else []
            result = plain(owner, *args, **kwargs)
            record(held)
            return result

        return zero_grad

    def _clip(self, plain: Any) -> Any:
        observe = self.patches.guard(self._observe_clip)

        @wraps(plain)
        def clip(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Iterator):  # `model.parameters()` can be gone through once
                args = (list(args[0]), *args[1:])
            observe(args[0] if args else kwargs.get("parameters"))
            return plain(*args, **kwargs)

        return clip

    def _observe_clip(self, given: Any) -> None:
        self.seen.clipping = True
        if self.seen.clipped_scaled or isinstance(given, (Iterator, type(None))):
            return
        first = given if isinstance(given, torch.Tensor) else next(iter(given), None)
        if first is not None and any(_scaled(scaler, first, self.training) for scaler in self.training.scalers):
            self.seen.clipped_scaled = user_line()

    def _move(self, plain: Any) -> Any:
        observe = self.patches.guard(self._observe_move)

        @wraps(plain)
        def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain(tensor, *args, **kwargs)
            if not torch.compiler.is_compiling():
                observe(tensor, result, args, kwargs)
            return result

        return move

    def _observe_move(self, tensor: torch.Tensor, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = _sent(tensor)
        if type(tensor) is not torch.Tensor or type(result) is not torch.Tensor:
            return  # a fake tensor has no address
        if result.device.type != "cuda" or tensor.device.type != "cpu":
            return
        batch = self.seen.batch
        if tensor.data_ptr() in batch.pointers:
            batch.moved_unchanged = True
            batch.non_blocking = bool(kwargs.get("non_blocking", any(arg is True for arg in args)))

    # -- the steady state -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self._roots = {id(root.module): root for root in self.training.roots}
        for kind in {type(root.module) for root in self.training.roots}:
            if any(patch.owner in kind.__mro__ for patch in self._watching):
                continue
            self._watching.append(self.patches.replace(kind, "__call__", self._root_call(kind)))

    def _unwatch(self) -> None:
        for patch in reversed(self._watching):
            self.patches.restore(patch)
        self._watching = []
        self._roots.clear()

    def _root_call(self, kind: type[torch.nn.Module]) -> Any:
        observe = self.patches.guard(self._observe_root)
        watcher, patches, roots = self.watcher, self.patches, self._roots
        own = kind.__call__ if kind.__call__ is not torch.nn.Module.__call__ else None

        @wraps(kind.__call__)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: the annotations of the traced window are put on nn.Module after this.
            plain = own or torch.nn.Module.__call__
            if torch.compiler.is_compiling() or not patches.active:
                return plain(module, *args, **kwargs)
            root = roots.get(id(module))
            if root is None or watcher.in_backward:
                return plain(module, *args, **kwargs)
            output = plain(module, *args, **kwargs)
            observe(root, args, kwargs, output)
            return output

        return call

    def _observe_root(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        module, watcher = root.module, self.watcher
        if watcher.kind == FORWARD:
            if threading.get_ident() == watcher.thread:
                watcher.model_called(id(module), _shapes(args, kwargs))
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
            self._record(root, args, kwargs, output)

    def _note_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        interval = self.watcher.current
        interval.shapes.extend(_shapes(args, kwargs))
        interval.elements += _elements(args, kwargs)

    def _record(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        root.args, root.kwargs, root.output = args, kwargs, output
        tensors = output_tensors(output)
        grads: list[torch.Tensor | None] = [None] * len(tensors)
        self._grads[id(root)] = grads
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                # A copy: autograd may go on adding into the buffer it hands to the hook.
                def keep(grad: torch.Tensor, position: int = position, into: list[Any] = grads) -> None:
                    held = into[position]
                    into[position] = grad.detach().clone() if held is None else held + grad.detach()

                tensor.register_hook(keep)

    # -- loaders ----------------------------------------------------------------------------------------------------

    def hook_loaders(self) -> None:
        """Observe new DataLoader iterators and the time spent in their `next()`, from now to the end."""
        plain_iter, plain_next = DataLoader.__iter__, _BaseDataLoaderIter.__next__
        iterating, drawn = self.patches.guard(self._observe_iter), self.patches.guard(self._observe_batch)
        ended, timed = self.patches.guard(self.epochs.ended), self.patches.guard(self._time_draw)

        @wraps(plain_iter)
        def loader_iter(loader: Any) -> Any:
            start = time.perf_counter_ns()
            iterator = plain_iter(loader)
            iterating(loader, iterator, time.perf_counter_ns() - start)
            return iterator

        @wraps(plain_next)
        def loader_next(iterator: Any) -> Any:
            if not self.patches.active:
                return plain_next(iterator)
            late, wanted = _late(iterator), self.training.draws
            before = clocks(self.training.device) if wanted is not None else None
            start = time.perf_counter_ns()
            try:
                batch = plain_next(iterator)
            except StopIteration:
                ended(iterator, time.perf_counter_ns() - start)
                raise
            drawn(iterator, batch, start, time.perf_counter_ns() - start, late)
            if before is not None:
                timed(before)
            return batch

        self.patches.replace(DataLoader, "__iter__", loader_iter)
        self.patches.replace(_BaseDataLoaderIter, "__next__", loader_next)

    def _observe_iter(self, loader: DataLoader[Any], iterator: Any, nanoseconds: int) -> None:
        self._iterators[iterator] = loader
        if self._in_training_thread():
            self.epochs.made(iterator, loader, nanoseconds, again=in_loop(sys._getframe()))
            self.watcher.note(EPOCH)

    def _time_draw(self, before: tuple[torch.cuda.Event | None, int]) -> None:
        if self.training.draws is not None and self._in_training_thread():
            self.training.draws.append(Draw(before, clocks(self.training.device)))

    def _observe_batch(self, iterator: Any, batch: Any, start: int, nanoseconds: int, late: bool) -> None:
        if not self._in_training_thread():
            return
        if not self.seen.first_ns:
            self.seen.first_ns = start
        if not torch.is_grad_enabled() and self.watcher.kind != FORWARD:
            return  # evaluation
        loader = self._iterators.get(iterator)
        if loader is not None and not (self._drawn and self._drawn[-1] is loader):
            self._drawn = [*(known for known in self._drawn if known is not loader), loader]  # the latest last
        begun = self.epochs.begun
        making = self.epochs.drawn(iterator, loader, nanoseconds)
        first = self.epochs.begun > begun
        self.watcher.batch_loaded(_first_shape(batch), nanoseconds + making, late=late, first=first)
        if self._looking or not self.finished:
            self._look_at_batch(batch)
            self.seen.batch.iterator = IteratorSeen.of(iterator) if loader is None else None

    def _look_at_batch(self, batch: Any) -> None:
        tensors = [_sent(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return
        largest = max(tensors, key=lambda t: t.numel() * t.element_size())
        seen = self.seen.batch
        seen.shape = tuple(largest.shape)
        seen.nbytes = sum(t.numel() * t.element_size() for t in tensors)
        seen.dtype = largest.dtype
        seen.pointers = frozenset([largest.data_ptr()])
        seen.source = user_line()

    def _in_training_thread(self) -> bool:
        known = self.watcher.thread
        return threading.get_ident() == known if known else threading.current_thread() is threading.main_thread()


def attach(training: Training, watcher: StepWatcher, *, keep_inputs: bool = True, infer: bool = False) -> Discovery:
    """Begin to look: `training` fills up within the first steps.

    `keep_inputs` keeps each root's latest arguments; `infer` reports model calls to the watcher while nothing trains.
    """
    discovery = Discovery(training, watcher, keep_inputs=keep_inputs)
    if infer:
        discovery.wait_for_forwards()
    discovery.look_once_an_optimizer_is_made()
    discovery.hook_loaders()
    training.on_step.insert(0, discovery.on_step)
    return discovery


def capture_next_step(training: Training) -> None:
    """Record the coming step: call from an `on_step` listener.

    At the next boundary each root that was called has `args`, `kwargs`, `output` and `output_grads` of its latest
    training call in that step, and `training.keep_gradients` is False again. The gradients are copies; arguments and
    output are references. Set the roots' `output` and `output_grads` to None and () when done: they hold memory.
    """
    training.keep_gradients = True


def inner(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            wrapped = module.module
        else:
            wrapped = getattr(module, "_orig_mod", None)
        if not isinstance(wrapped, torch.nn.Module):
            return module
        module = wrapped


def _scaled(scaler: Any, parameter: torch.Tensor, training: Training) -> bool:
    """Whether the parameter's gradient is still multiplied by this scaler's scale: `unscale_` has not been called for its optimizer."""
    if not scaler.is_enabled() or scaler._scale is None:
        return False
    owners = [
        o for o in training.optimizers for group in o.param_groups if any(p is parameter for p in group["params"])
    ]
    if not owners:
        return False
    state = scaler._per_optimizer_states.get(id(owners[0]))
    return state is None or state["stage"].name == "READY"


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """What goes to the GPU for a tensor of a batch: itself, or the bytes that stand for it (transforms/images.py)."""
    pixels: torch.Tensor = getattr(tensor, "pixels", tensor)
    return pixels


def _weight_dtype(module: torch.nn.Module, value: torch.Tensor) -> torch.dtype:
    return _autocast(value.device.type) or value.dtype


def _autocast(kind: str) -> torch.dtype | None:
    """What autocast computes in on this kind of device; None where it is off, or not known at all (`meta`)."""
    known = torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    found = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor)]
    found.extend(tuple(value.shape) for value in kwargs.values() if isinstance(value, torch.Tensor))
    return found


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model returned, in order: in tuples, lists and dictionaries, and in dataclasses, which are leaves to torch."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += output_tensors([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
    return found


def _elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the tensors that a call is given, in lists, tuples and dicts too, as a detector takes its images."""
    found = 0
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found += value.numel()
        elif isinstance(value, (list, tuple, dict)):
            found += sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


def _late(iterator: Any) -> bool:
    """Whether the next batch is still to be made: by the training thread, or by workers that are behind it.

    One that is there takes time as well: a detector's images and boxes 6 ms, from the workers' memory.
    """
    try:
        waiting = iterator._task_info.get(iterator._rcvd_idx, ())
        return len(waiting) < 2 and bool(iterator._data_queue.empty())
    except (AttributeError, OSError):  # no workers; or they have ended
        return True


def _first_shape(batch: Any) -> tuple[int, ...]:
    """The shape of the first images [N, C, H, W] in nested lists, tuples and dicts, else of the first tensor; () when there is none.

    What stands before the images may have another number of rows than there are samples: a detector's boxes. Images of many sizes come as
    a list of them beside their targets: that has as many samples as images.
    """
    first: tuple[int, ...] = ()
    for shape in _batch_shapes(batch):
        if len(shape) >= 4:
            return shape
        first = first or shape
    return first


def _batch_shapes(batch: Any, *, within: bool = False) -> Iterator[tuple[int, ...]]:
    if isinstance(batch, torch.Tensor):
        yield tuple(batch.shape)
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        if within and batch and all(map(_is_image, batch)):
            yield (len(batch), *batch[0].shape)
            return
        for part in batch[:8]:
            yield from _batch_shapes(part, within=True)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[0] in (1, 3, 4)


def _with_gradient(owner: Any) -> list[torch.Tensor]:
    """The first parameter of an optimizer or a module that has a gradient."""
    if isinstance(owner, torch.nn.Module):
        parameters = owner.parameters()
    else:
        parameters = (p for group in owner.param_groups for p in group["params"])
    for parameter in parameters:
        if parameter.grad is not None:
            return [parameter]
    return []
