"""Changes with a fault in them, for a training script that imports this file: advisor finds them beside its own.

Each fault strikes on a GPU as it does in life; on a CPU its nearest kin stands in, so that the same tests run there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from advisor.core.transform_row import Row, Stage
from advisor.core.transform_table import ROWS
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo

STRIKE = r'extern "C" __global__ void strike(float* where) { where[threadIdx.x] = 1.f; }'
NOWHERE = 16  # an address that belongs to nobody
TOO_MUCH = 2**45  # bytes
# By clock cycles, a minute or more: for ever as far as a trial of seconds goes, and over should nobody end it.
FOR_EVER = 200_000_000_000
LATE = 60_000_000  # cycles: some 30 ms, long against the launches that follow
# The gate replays a step some ten times; what waits for the user's own step lets these calls pass.
GATE_CALLS = 20

Forward = Callable[[torch.Tensor], torch.Tensor]


def illegal_access(x: torch.Tensor) -> None:
    """A kernel writes where nothing is."""
    if not x.is_cuda:
        os.kill(os.getpid(), signal.SIGSEGV)
    import cupy

    cupy.RawModule(code=STRIKE, backend="nvrtc").get_function("strike").kernel((1, 1, 1), (32, 1, 1), (NOWHERE,))


def failed_assertion(x: torch.Tensor) -> None:
    """A kernel of PyTorch's finds an index that is out of bounds; on a GPU that ends the context."""
    torch.zeros(4, device=x.device)[torch.tensor([1_000_000], device=x.device)].sum()


def out_of_memory(x: torch.Tensor) -> None:
    """More memory is asked for than any device has."""
    torch.empty(TOO_MUCH, dtype=torch.uint8, device=x.device)


def hang(x: torch.Tensor) -> None:
    """The device, or the host, does not come back. On a CPU the alarm that the trial has set is brought forward, for nobody to wait."""
    if x.is_cuda:
        torch.cuda._sleep(FOR_EVER)
        return
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    while True:
        time.sleep(600)


class _Late(torch.autograd.Function):
    """The values arrive later than the tensor: on another stream that nobody waits for, or only in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, side: Any) -> torch.Tensor:
        y = torch.zeros_like(x)
        ctx.left = None
        if side is None:
            ctx.left = (y, x.detach().clone())
            return y
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            y.copy_(x)
        for tensor in (x, y):
            tensor.record_stream(side)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.left is not None:
            y, x = ctx.left
            y.data.copy_(x)
        return gradient, None


def lazy(forward: Forward) -> Forward:
    """`forward`, whose output is filled in by its backward."""
    return lambda x: _Late.apply(forward(x), None)


def on_a_side_stream(forward: Forward) -> Forward:
    """`forward`, whose output is still being made when it is returned."""
    side = torch.cuda.Stream()
    return lambda x: _Late.apply(forward(x), side)


def cached(forward: Forward) -> Forward:
    """`forward` of the first batch, whatever the batch."""
    held: list[torch.Tensor] = []

    def changed(x: torch.Tensor) -> torch.Tensor:
        if not held:
            held.append(x.clone())
        return forward(held[0])

    return changed


def slower(forward: Forward) -> Forward:
    """`forward`, and as much idle time as makes ten steps of it."""

    def changed(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            torch.cuda._sleep(LATE)
        else:
            time.sleep(0.03)
        return forward(x)

    return changed


def striking(strike: Callable[[torch.Tensor], None], after: int = 0) -> Callable[[Forward], Forward]:
    """A change that strikes in its call number `after`, counted from zero, and leaves values as they are."""

    def change(forward: Forward) -> Forward:
        calls = [0]

        def changed(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == after + 1:
                strike(x)
            return forward(x)

        return changed

    return change


CHANGES: dict[str, Callable[[Forward], Forward]] = {
    "cached": cached,
    "failed_assertion": striking(failed_assertion, GATE_CALLS),
    "hangs": striking(hang),
    "illegal_access": striking(illegal_access),
    "lazy": lazy,
    "nothing": lambda forward: forward,
    "out_of_memory": striking(out_of_memory),
    "out_of_memory_later": striking(out_of_memory, GATE_CALLS),
    "side_stream": on_a_side_stream,
    "slower": slower,
}


class Planted(Transform):
    """Puts one of `CHANGES` around the first root's forward."""

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        return Match(applies=bool(training.roots), reason="no model", sites=tuple(r.name for r in training.roots))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        net, undo = training.roots[0].module, Undo()
        kept = net.__dict__.setdefault("planted", {})  # a change that counts its calls goes on counting
        if self.id not in kept:
            kept[self.id] = CHANGES[self.id](type(net).forward.__get__(net))
        net.__dict__["forward"] = kept[self.id]
        undo.push(lambda: net.__dict__.pop("forward", None))
        return undo


def plant() -> None:
    """From here on there are rows for the changes above."""
    register(CHANGES, Planted)


def register(names: Iterable[str], kind: type[Transform]) -> None:
    """From here on there are rows of these names, each a class of this kind."""
    module = sys.modules[__name__]
    sys.modules["advisor.transforms.planted"] = module
    for name in names:
        setattr(module, name.title(), type(name.title(), (kind,), {"id": name}))
        ROWS[name] = row(name)


def row(name: str) -> Row:
    """Of a planted change."""
    return Row(id=name, title=f"planted: {name}", code=f"planted:{name.title()}", stage=Stage.NORMS)
