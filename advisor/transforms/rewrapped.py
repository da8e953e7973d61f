"""Another DistributedDataParallel in the place of the script's own, with other settings, around the same module.

The script's object stays what the script calls and saves; its reducer rests, as under `no_sync`, while calls go past it. What the script has
set stays set: its process group, its hooks, its `no_sync`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

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

    def change(self, settings: Mapping[str, Any]) -> None:
        """Calls go through a wrapper with these settings. All ranks call this together, between steps; nothing is sent."""
        self.settings, self.ddp = dict(settings), None
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
            if self.ddp is None or not (module.training and torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            self.ddp.require_backward_grad_sync = self._theirs.require_backward_grad_sync
            return self.ddp(*args, **kwargs)

        return forward

    def _of_script(self) -> dict[str, Any]:
        theirs = self._theirs
        return {
            "bucket_cap_mb": theirs.bucket_bytes_cap / 2**20,
            "gradient_as_bucket_view": theirs.gradient_as_bucket_view,
            "static_graph": theirs.static_graph,
            "find_unused_parameters": theirs.find_unused_parameters,
            BUFFERS: getattr(theirs, BUFFERS),
        }
