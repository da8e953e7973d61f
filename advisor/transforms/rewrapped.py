"""Another DistributedDataParallel in the place of the script's own, with other settings, around the same module.

The script's object stays what the script calls and saves; its reducer rests, as under `no_sync`, while calls go past it. What the script has
set stays set: its process group, its hooks, its `no_sync`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from advisor.loop.training import Training
from advisor.transforms import targets
from advisor.transforms.forward import GRAPH, REPLICATED, ForwardStack
from advisor.transforms.graphs.sending import CallsOfAStep, Sending, average, buckets_of

# What torch calls "rank 0's buffers are everybody's at each forward", from 2.13 on and before.
BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
OURS = ("sent_as", "passes")  # settings that are no arguments of DistributedDataParallel


class Shell(torch.nn.Module):
    """What a DistributedDataParallel holds in the script's module's place: a call is that of `inner`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.inner: Callable[..., Any] = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def send_as(ddp: DistributedDataParallel, kind: str) -> None:
    """Gradients travel as "bf16" or "fp16"."""
    ddp.register_comm_hook(
        None, default_hooks.bf16_compress_hook if kind == "bf16" else default_hooks.fp16_compress_hook
    )


def refused(theirs: DistributedDataParallel) -> str:
    """Why a script's wrapper is left as it is; "" where another can stand for it."""
    known: Any = theirs
    if known.mixed_precision is not None or known._delay_all_reduce_params:
        return "the script's DistributedDataParallel has settings that cannot be carried over"
    return "it trains under Join, which is its own" if known._join_config.enable else ""


class Rewrapped:
    """A layer for the script's wrapper's ForwardStack: calls with gradients go through `ddp`, where its settings are not the script's.

    Attributes:
        settings: as Replicated (distributed/gradients.py) has them.
    """

    def __init__(self, theirs: DistributedDataParallel) -> None:
        self._theirs: Any = theirs
        self._own = self.settings = self._of_script()
        self.ddp: DistributedDataParallel | None = None
        self._sending: Sending | None = None
        self._held = False  # gradients of a backward that has not sent are there
        self._turns = CallsOfAStep()
        stepped = WeakMethod(self._steps)
        register_optimizer_step_pre_hook(lambda *_: call() if (call := stepped()) is not None else None)
        targets.mark_replicated(theirs)

    def change(self, settings: Mapping[str, Any]) -> None:
        """Calls go through a wrapper with these settings. All ranks call this together, between steps; nothing is sent."""
        self.settings, self.ddp, self._sending = dict(settings), None, None
        if self.settings == self._own:
            return
        theirs = self._theirs
        own = {name: value for name, value in settings.items() if name not in OURS}
        shell = Shell(theirs.module)
        shell.inner = theirs.module.__call__
        self.ddp = DistributedDataParallel(
            shell, device_ids=theirs.device_ids, process_group=theirs.process_group, init_sync=False, **own
        )
        if (kind := settings.get("sent_as")) is not None:
            send_as(self.ddp, kind)
        else:
            for hook, state in theirs._comm_hooks:
                self.ddp.register_comm_hook(state, hook)

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            graphs: Any = ForwardStack.of(module).get(GRAPH)
            sending = self._sends() if graphs is not None and graphs.sends else None
            if not self._turns.offers(sending is not None):
                return self._through(inner, *args, **kwargs)
            # Rank 0's buffers are everybody's, whether a graph follows or not: a rank that runs it eagerly is not to ask for them again.
            wrapper: Any = self.ddp if self.ddp is not None else self._theirs
            if wrapper.will_sync_module_buffers():
                wrapper._sync_buffers()
            wrapper.require_forward_param_sync = False
            graphs.sending = sending
            try:
                return inner(*args, **kwargs)
            finally:
                graphs.sending, wrapper.require_forward_param_sync = None, True

        return forward

    def _through(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._held = not self._theirs.require_backward_grad_sync
        if self._turns.holds:
            with self._silently():
                return inner(*args, **kwargs)
        if self.ddp is None:
            return inner(*args, **kwargs)
        self.ddp.require_backward_grad_sync = self._theirs.require_backward_grad_sync
        return self.ddp(*args, **kwargs)

    def _sends(self) -> Sending | None:
        """What a graph of the backward has to send in place of DistributedDataParallel; None where that is not settled, where the script
        says that this backward does not send, or where one before it has not.
        """
        theirs = self._theirs
        if self._held or not theirs.require_backward_grad_sync or theirs._comm_hooks or refused(theirs):
            return None
        if self._sending is None:
            sends = self.ddp if self.ddp is not None else theirs
            if (buckets := buckets_of(sends)) is not None:
                self._sending = Sending(
                    buckets=buckets,
                    group=theirs.process_group,
                    sent_as=self.settings.get("sent_as", ""),
                    eagerly=self._through,
                    silently=self._silently,
                )
        return self._sending

    def _steps(self) -> None:
        if self._turns.steps():
            average((p for p in self._theirs.parameters() if p.requires_grad), self._theirs.process_group)

    @contextlib.contextmanager
    def _silently(self) -> Iterator[None]:
        names = ("require_backward_grad_sync", "require_forward_param_sync")
        before = {name: getattr(self._theirs, name) for name in names}
        for name in names:
            setattr(self._theirs, name, False)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self._theirs, name, value)

    def _of_script(self) -> dict[str, Any]:
        theirs = self._theirs
        return {
            "bucket_cap_mb": theirs.bucket_bytes_cap / 2**20,
            "gradient_as_bucket_view": theirs.gradient_as_bucket_view,
            "static_graph": theirs.static_graph,
            "find_unused_parameters": theirs.find_unused_parameters,
            BUFFERS: getattr(theirs, BUFFERS),
        }


def layers(training: Training) -> list[Any]:
    """What holds the settings of each root's wrapper. That of a script's own is made here, and does nothing until it is told to."""
    found = []
    for root in training.roots:
        stack = ForwardStack.of(root.module)
        layer = stack.get(REPLICATED)
        if layer is None and isinstance(root.module, DistributedDataParallel) and not targets.of_one(root.module):
            layer = Rewrapped(root.module)
            stack.set(REPLICATED, layer)
        found += [layer] if layer is not None else []
    return found
