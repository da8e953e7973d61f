"""Gradients of the whole batch: DistributedDataParallel around the model that the script's optimizer trains.

Which model that is shows in the first step. Its gradients are averaged by one call behind each backward pass; when the optimizer steps, the
model that was called and holds the optimizer's parameters gets a DistributedDataParallel around its forward (transforms/forward.py: the
module, its parameters and its `state_dict` stay what they are). The next optimizer, of another phase or fold, begins in the same way.
Where ranks keep a share of the optimizer's state (shared_state.py) or of the weights too (shared_weights.py), that begins there as well.

Where parts differ in size, the loss is weighted by the rank's share before it goes backward: what is averaged is the whole batch's mean.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import distributed
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from advisor.core.held import ModuleCost
from advisor.distributed import shared_weights, stages
from advisor.distributed.board import Watch
from advisor.distributed.place import HALVES, HYBRID, OF_WEIGHTS, PIPELINE, ZERO1
from advisor.distributed.refused import refuse
from advisor.distributed.shards import Loaders
from advisor.distributed.shared_state import SharedState
from advisor.loop.patches import Patches
from advisor.loop.sources import shown, user_line
from advisor.transforms import targets
from advisor.transforms.forward import GRAPH, REPLICATED, ForwardStack
from advisor.transforms.graphs.sending import CallsOfAStep, Sending, average, buckets_of
from advisor.transforms.rewrapped import BUFFERS, OURS, Shell, send_as


class Gradients:
    """Averages gradients over all ranks, from `install` on.

    Attributes:
        wrapped: modules with a DistributedDataParallel around them, in the order in which they came.
    """

    def __init__(
        self,
        loaders: Loaders,
        *,
        settings: Mapping[str, Any] | None = None,
        synchronised: bool = True,
        shard: str = "",
    ) -> None:
        self._loaders, self._settings, self._synchronised = loaders, dict(settings or {}), synchronised
        self._shard = shard
        self._shared: WeakKeyDictionary[torch.optim.Optimizer, SharedState] = WeakKeyDictionary()
        self._moved: dict[int, tuple[torch.Tensor, torch.nn.Parameter]] = {}  # FSDP2's parameters, by those before
        self._rank, self._ranks = loaders.rank, loaders.ranks
        self._depth = 0
        self._called: dict[int, torch.nn.Module] = {}  # roots called with gradients, that are not wrapped
        self._lines: dict[int, str] = {}
        self._checked: set[int] = set()
        self._known: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._costs: dict[int, list[ModuleCost]] = {}  # of `_called`, in a pipeline
        self._covered: set[int] = set()  # parameters whose gradients a wrapper averages
        self.wrapped: list[torch.nn.Module] = []
        self._layers: list[Replicated] = []
        self._process = os.getpid()
        self.watch: Watch | None = None  # that wants to know of steps

    def install(self, patches: Patches) -> None:
        """Hook module calls, backward passes and optimizers."""
        patches.undo(register_optimizer_step_pre_hook(self._steps).remove)
        # Not by global hooks of modules, which take each call through torch's slow way: 12 µs more a module, and 4 so (60 empty modules, a
        # busy Xeon, 2026-11-27). Only the outermost call has anything to tell.
        patches.replace(torch.nn.Module, "__call__", self._calls(torch.nn.Module.__call__))
        patches.replace(torch.autograd, "backward", self._backward(torch.autograd.backward))

    @property
    def inside_model(self) -> bool:
        """Whether a module's forward is running."""
        return self._depth > 0

    # -- what is called ---------------------------------------------------------------------------------------------

    def _calls(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth:
                return plain(module, *args, **kwargs)
            self._depth = 1
            try:
                if torch.is_grad_enabled() and module.training and id(module) not in self._called:
                    self._enters(module)
                with self._first_in_a_pipeline(module):
                    return plain(module, *args, **kwargs)
            finally:
                self._depth = 0

        return call

    def _enters(self, module: torch.nn.Module) -> None:
        if any(id(p) not in self._covered for p in _trained(module)):
            self._called[id(module)] = module
            self._lines[id(module)] = user_line()

    @contextlib.contextmanager
    def _first_in_a_pipeline(self, module: torch.nn.Module) -> Iterator[None]:
        """The step that tells which model trains is one rank's, whole: it keeps on the host what a stage would not have room for."""
        if self._shard != PIPELINE or id(module) not in self._called:
            yield
            return
        costs = stages.Costs(module)
        try:
            with torch.autograd.graph.save_on_cpu() if torch.cuda.is_available() else contextlib.nullcontext():
                yield
        finally:
            self._costs[id(module)] = costs.end()

    # -- backward ---------------------------------------------------------------------------------------------------

    def _backward(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if os.getpid() != self._process or self._depth:  # a checkpoint's own backward
                return plain(tensors, grad_tensors, *args, **kwargs)
            if self._shard == PIPELINE:
                plain(tensors, grad_tensors, *args, **kwargs)
                return self._average_unwrapped()
            if not self._loaders.divided:
                line = user_line()
                refuse("what is trained on was not loaded by a DataLoader, so its batches cannot be divided", line)
            result = plain(tensors, self._weighted(tensors, grad_tensors), *args, **kwargs)
            self._average_unwrapped()
            return result

        return backward

    def _weighted(self, tensors: Any, given: Any) -> Any:
        """The gradients to begin with: this rank's share of the batch, in units of an even one."""
        weight = self._loaders.share * self._ranks
        if weight == 1.0:
            return given
        single = isinstance(tensors, torch.Tensor)
        losses = (tensors,) if single else tuple(tensors)
        begins = [None] * len(losses) if given is None else [given] if isinstance(given, torch.Tensor) else list(given)
        weighted = [
            torch.full_like(loss, weight) if begin is None else begin * weight
            for loss, begin in zip(losses, begins, strict=True)
        ]
        return weighted[0] if single else weighted

    def _average_unwrapped(self) -> None:
        """Gradients that no wrapper has averaged."""
        gradients = []
        for module in self._called.values():
            if id(module) not in self._checked:
                self._checked.add(id(module))
                self._check_alike(module)
            gradients += [p.grad for p in _trained(module) if p.grad is not None and id(p) not in self._covered]
        for gradient in {id(g): g for g in gradients}.values():
            gradient /= self._ranks
            distributed.all_reduce(gradient)

    def _check_alike(self, module: torch.nn.Module) -> None:
        """Leave the script where the ranks have not begun with the same weights."""
        named = dict(module.named_parameters())
        other = differing([p.detach().double().sum() for p in named.values()], 0.0)
        if other is not None:
            name = list(named)[other]
            refuse(
                f"the ranks have begun with different weights in {name}",
                self._lines[id(module)],
                "Seed what draws them.",
            )

    # -- the optimizer ----------------------------------------------------------------------------------------------

    def _steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        if self.watch is not None:
            self.watch.steps += 1
        for layer in self._layers:
            layer.stepped()
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._meets(optimizer)
            if self._shard == ZERO1:
                self._shared[optimizer] = SharedState(optimizer, self._rank, self._ranks)
            elif self._shard in OF_WEIGHTS:
                shared_weights.follow(optimizer, self._moved)
        if (shared := self._shared.get(optimizer)) is not None:
            shared.starts(args[1:], kwargs)

    def _meets(self, optimizer: torch.optim.Optimizer) -> None:
        """Wrap the models that it trains and nobody wraps yet."""
        params = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        missing = {key: p for key, p in params.items() if key not in self._covered and p.grad is not None}
        if not missing:
            return
        roots = [m for m in self._called.values() if any(id(p) in missing for p in m.parameters())]
        line = user_line()
        if len(roots) + len(self.wrapped) > 1 and not self._same_make(roots):
            names = ", ".join(type(m).__name__ for m in (*self.wrapped, *roots))
            refuse(f"several models are trained together ({names}), each with losses of the other's", line)
        reached = {id(p) for root in roots for p in root.parameters()}
        if left := [key for key in missing if key not in reached]:
            shapes = ", ".join(str(tuple(missing[key].shape)) for key in left[:3])
            refuse(f"the optimizer has parameters ({shapes}) that no model's call leads to", line)
        for root in roots:
            self._check_state(root)
            self._wrap(root)

    def _same_make(self, roots: Iterable[torch.nn.Module]) -> bool:
        """One model after another of a kind: a fold each."""
        return len(list(roots)) == 1 and all(isinstance(known, type(root)) for root in roots for known in self.wrapped)

    def _check_state(self, root: torch.nn.Module) -> None:
        """Leave the script where a step has left different state in the ranks: a memory bank, a queue, a running sum."""
        found = [
            (f"{path}.{name}" if path else name, module, buffer)
            for path, module in root.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.numel() and (self._synchronised or not isinstance(module, _NormBase))
        ]
        other = differing([buffer.detach().double().norm() for _, _, buffer in found], 1e-3)
        if other is not None:
            name, module, _ = found[other]
            refuse(
                f"a step leaves other values in the buffer {name} on each rank: {type(module).__name__} keeps something of the batch",
                _defined(module),
            )

    def _wrap(self, root: torch.nn.Module) -> None:
        if self._shard == PIPELINE:
            names = stages.cuts(self._costs[id(root)], self._ranks)
            ForwardStack.of(root).set(REPLICATED, stages.Staged(root, names, own_norms=not self._synchronised))
        elif self._shard in OF_WEIGHTS:
            self._moved |= shared_weights.share(root, copies=HALVES if self._shard == HYBRID else 1)
        else:
            unused = any(p.grad is None for p in _trained(root))
            layer = Replicated(
                root, self._loaders, {"find_unused_parameters": unused, **self._settings}, self._synchronised
            )
            ForwardStack.of(root).set(REPLICATED, layer)
            self._layers.append(layer)
        self._covered.update(id(p) for p in root.parameters())
        self._called.pop(id(root), None)
        self.wrapped.append(root)
        if next(root.parameters()).is_cuda and len(self.wrapped) == 1 and self._shard != PIPELINE:
            # Dropout and noise on the device are each rank's own.
            torch.cuda.manual_seed(torch.cuda.initial_seed() + 7_919 * (self._rank + 1))


class Replicated:
    """A layer for the root's ForwardStack: calls with gradients go through `ddp`.

    Attributes:
        settings: DistributedDataParallel's own, and `sent_as` ("bf16", "fp16") for how gradients travel, `passes` for how many
            backward passes a step has, of which the last one sends.
        held_back: calls whose backward did not send.
    """

    def __init__(
        self, root: torch.nn.Module, loaders: Loaders, settings: Mapping[str, Any], synchronised: bool
    ) -> None:
        self._root, self._loaders = root, loaders
        self._target = targets.unwrapped(root)  # whose backward graphs hold
        self._on_cpu = not next(root.parameters()).is_cuda
        self._turns = CallsOfAStep()
        self.held_back = 0
        # Synchronised batch norms leave the same statistics everywhere. Without, rank 0's are everybody's before somebody looks: no
        # step of a training does, and DistributedDataParallel's way, at each step, takes three copies a norm.
        self._own_norms, self._versions = not synchronised, -1
        self.settings: dict[str, Any] = {}
        self.ddp: DistributedDataParallel
        self._sending: Sending | None = None
        self.change({BUFFERS: False, **settings})

    def change(self, settings: Mapping[str, Any]) -> None:
        """Another DistributedDataParallel stands around the root, with these settings. All ranks call this together, between steps."""
        own = {name: value for name, value in settings.items() if name not in OURS}
        self._shell = Shell(self._root)
        self.ddp = DistributedDataParallel(self._shell, **own)  # the one before takes its hooks along
        if (kind := settings.get("sent_as")) is not None:
            send_as(self.ddp, kind)
        self.settings, self._turns, self._sending = dict(settings), CallsOfAStep(), None
        targets.replicate(self._root, self.ddp)

    def sends(self) -> Sending | None:
        """What a graph of the root's backward has to send in place of `ddp`; None where that is not settled, or is not each backward's."""
        if self._sending is None and self.settings.get("passes", 1) == 1:
            buckets = buckets_of(self.ddp)
            if buckets is not None:
                self._sending = Sending(
                    buckets=buckets,
                    group=self.ddp.process_group,
                    sent_as=self.settings.get("sent_as", ""),
                    eagerly=self._through,
                )
        return self._sending

    def _through(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._shell.inner = inner
        sends = self._turns.calls % self.settings.get("passes", 1) == 0 and not self._turns.holds
        self.ddp.require_backward_grad_sync = sends
        self.held_back += not sends
        return self.ddp(*args, **kwargs)

    def stepped(self) -> None:
        """Before the optimizer's step: what was held back and not sent since is averaged now."""
        held = self._turns.calls > 0 and not self.ddp.require_backward_grad_sync
        if self._turns.steps() or held:
            average(_trained(self._root))

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                self._evaluated()
                return inner(*args, **kwargs)
            self._versions = -1
            # Dropout draws from the host's generator on a CPU.
            with self._loaders.generators.in_place() if self._on_cpu else contextlib.nullcontext():
                graphs: Any = ForwardStack.of(self._target).get(GRAPH)
                sending = self.sends() if graphs is not None and graphs.sends else None
                if not self._turns.offers(sending is not None):
                    return self._through(inner, *args, **kwargs)
                graphs.sending = sending
                try:
                    return inner(*args, **kwargs)
                finally:
                    graphs.sending = None

        return forward

    def _evaluated(self) -> None:
        """Rank 0's statistics of norms are all ranks', where they have been trained or loaded since. All ranks call this together."""
        if not self._own_norms:
            return
        buffers = [buffer for buffer in self._root.buffers() if buffer.numel()]
        if sum(buffer._version for buffer in buffers) != self._versions:
            with torch.no_grad():
                for buffer in buffers:
                    distributed.broadcast(buffer, 0)
            self._versions = sum(buffer._version for buffer in buffers)


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def differing(values: list[torch.Tensor], tolerance: float) -> int | None:
    """Index of the first value that is not the same on all ranks, within `tolerance` of its size; None where all are."""
    if not values:
        return None
    own = torch.stack([value.cpu() for value in values])
    low, high = own.clone(), own.clone()
    distributed.all_reduce(low, distributed.ReduceOp.MIN)
    distributed.all_reduce(high, distributed.ReduceOp.MAX)
    apart = (high - low) > tolerance * torch.maximum(high.abs(), low.abs())
    return int(apart.nonzero()[0]) if bool(apart.any()) else None


def _defined(module: torch.nn.Module) -> str:
    """Where the module's class stands."""
    try:
        return f"{shown(inspect.getfile(type(module)))}:{inspect.getsourcelines(type(module))[1]}"
    except (OSError, TypeError):
        return ""
