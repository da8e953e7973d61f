"""Gradients' sums over ranks inside a captured backward: DistributedDataParallel's own buckets, each sent as soon as it is full.

A graph of the whole backward gives all gradients at its end, when nothing is left to hide their way to the other ranks behind. So the
collectives are captured with it. They are those of DistributedDataParallel's, in its buckets and its order: a rank that replays and one that
runs this step eagerly (another shape, a capture that has failed) meet in the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

# What tells, from its third iteration on, which parameters DistributedDataParallel has put into which bucket.
_BUCKETS = "rebuilt_per_bucket_param_indices"
_WIRE = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sending:
    """What a call of a replicated module is to send.

    Attributes:
        buckets: identities of the parameters, in the order in which they lie and are sent.
        sent_as: "bf16" or "fp16" where gradients travel so.
        eagerly: `eagerly(forward, *args, **kwargs)`: the call through DistributedDataParallel, which then sends.
        silently: inside, the forward that is captured sends nothing by itself.
    """

    buckets: tuple[tuple[int, ...], ...]
    group: Any
    sent_as: str = ""
    eagerly: Callable[..., Any]
    silently: Callable[[], AbstractContextManager[Any]] = nullcontext


def buckets_of(ddp: DistributedDataParallel) -> tuple[tuple[int, ...], ...] | None:
    """Identities of the parameters in each of its buckets; None while they are not settled, or where it sends more than them."""
    wrapper: Any = ddp
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return None  # it also asks all ranks which parameters they have used
    told = wrapper._get_ddp_logging_data().get(_BUCKETS, "")
    parameters = [id(p) for p in ddp.parameters() if p.requires_grad]
    buckets = tuple(tuple(parameters[int(i)] for i in bucket.split()) for bucket in told.split(",") if bucket.strip())
    return buckets if sorted(i for bucket in buckets for i in bucket) == sorted(parameters) else None


class CallsOfAStep:
    """Which calls of a step graphs may send for: that of a step with one call.

    With more, DistributedDataParallel averages what all of them have left, once; a graph would send for each. So the further calls of a step
    whose first was a graph's are held back, and averaged before the optimizer steps; and graphs rest for some steps. All ranks count alike,
    whichever of them replay.
    """

    AGAIN = 20  # steps of one call each, before graphs may send again

    def __init__(self) -> None:
        self.calls = 0  # since the last step
        self._offered = False
        self._resting = 0

    def offers(self, ready: bool) -> bool:
        """A call begins: whether it may be a graph's. `ready`: what is sent is settled."""
        self.calls += 1
        if self.calls > 1:
            self._resting = self.AGAIN
            return False
        self._offered = ready and not self._resting
        return self._offered

    @property
    def holds(self) -> bool:
        """Whether the call that has begun is to send nothing."""
        return self._offered and self.calls > 1

    def steps(self) -> bool:
        """The optimizer is about to step: whether what was held back has to be averaged first."""
        held, self._offered = self.holds, False
        if self.calls == 1:
            self._resting = max(0, self._resting - 1)
        self.calls = 0
        return held


def average(parameters: Iterable[torch.Tensor], group: Any = None) -> None:
    """The gradients that are there become the means of all ranks', one by one."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad /= distributed.get_world_size(group)
            distributed.all_reduce(parameter.grad, group=group)


class SentBuckets:
    """The buckets of one capture. To be made inside it: their memory is the graph's.

    Args:
        leaves: what stands for each parameter in the capture, by the parameter's identity.
    """

    def __init__(self, sending: Sending, leaves: Mapping[int, torch.nn.Parameter]) -> None:
        self._sending, self._leaves = sending, leaves
        self._ranks = distributed.get_world_size(sending.group)
        self._waiting = [set(bucket) for bucket in sending.buckets]
        self._of = {parameter: number for number, bucket in enumerate(sending.buckets) for parameter in bucket}
        self._arrived: dict[int, torch.Tensor] = {}
        self._sent: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # the bucket, what travels, what it waits by
        self._views: dict[int, torch.Tensor] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a backward sends what it computes."""
        handles = [
            leaf.register_hook(self._hook(parameter))
            for parameter, leaf in self._leaves.items()
            if parameter in self._of
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, parameter: int) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            self._arrived[parameter] = gradient
            self._waiting[self._of[parameter]].discard(parameter)
            self._send_full()

        return arrived

    @torch.no_grad()
    def _send_full(self) -> None:
        while len(self._sent) < len(self._waiting) and not self._waiting[len(self._sent)]:
            self._send(self._sending.buckets[len(self._sent)])

    def _send(self, bucket: Sequence[int]) -> None:
        parameters = [self._leaves[parameter] for parameter in bucket]
        flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        views = [part.as_strided(p.shape, p.stride(), part.storage_offset()) for part, p in zip(
            flat.split([p.numel() for p in parameters]), parameters, strict=True
        )]  # fmt: skip
        self._views.update(zip(bucket, views, strict=True))
        found = [(view, self._arrived.pop(i)) for i, view in zip(bucket, views, strict=True) if i in self._arrived]
        for i, view in zip(bucket, views, strict=True):
            if i in self._waiting[len(self._sent)]:
                view.zero_()
        torch._foreach_copy_([view for view, _ in found], [gradient for _, gradient in found])
        wire = flat.to(_WIRE[self._sending.sent_as]) if self._sending.sent_as else flat
        wire.div_(self._ranks)
        self._sent.append((flat, wire, distributed.all_reduce(wire, group=self._sending.group, async_op=True)))

    @torch.no_grad()
    def end(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """Behind the backward: the means over all ranks, by these parameters. One without a gradient on this rank has the others'."""
        while len(self._sent) < len(self._waiting):
            self._send(self._sending.buckets[len(self._sent)])
        for flat, wire, work in self._sent:
            work.wait()
            if wire is not flat:
                flat.copy_(wire)
        found = [self._views.pop(id(parameter), None) for parameter in parameters]
        self._sent.clear()
        return found
