"""What stands for a module's forward: CUDA graphs where one fits, else the forward itself, and then why.

There is one graph for each kind of call (shapes, dtypes, other arguments, which parameters learn), and one more for each forward of that
kind that is still waiting for its backward: two views through one encoder, a module that is called over and over in a step.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from advisor.core.errors import first_line
from advisor.loop import compiles
from advisor.transforms import tf32
from advisor.transforms.forward import CAPTURED, ForwardStack
from advisor.transforms.graphs import hooks
from advisor.transforms.graphs.arguments import Arguments, taken_apart
from advisor.transforms.graphs.captured import Captured
from advisor.transforms.graphs.host_values import HostValues
from advisor.transforms.graphs.replaying import Replay, serving
from advisor.transforms.graphs.sending import Sending
from advisor.transforms.patch import is_script
from advisor.transforms.targets import data_parallel, is_replicated

# Eager calls of a kind before it is captured: libraries create their handles and workspaces and cuDNN tunes in them.
WARM_CALLS = 3
# A loop with more kinds of calls than this gains nothing from graphs and would fill the memory with their pools.
MAX_SIGNATURES = 4
# Forwards of a kind that wait for their backward at the same time; and how often one came too many before it gets a graph of its own.
MOST_IN_FLIGHT, _CROWDED = 16, 2
# A graph that an attribute of its module's outdates (a script that counts its steps there) within so many replays was not worth its capture;
# after so many such ones no other is made.
WORTH_REPLAYS, _MOST_OUTDATED = 20, 3

TWICE = "its gradients are differentiated once more (create_graph), which no replay can be"


class Settings(Protocol):
    """What holds for all forwards of one layer: layer.py's GraphLayer."""

    beside: bool  # weight gradients are captured on a stream of their own
    reducers: list[ref[DistributedDataParallel]]  # wrappers of one process around the module
    sends: bool  # graphs may send to other ranks
    sending: Sending | None  # what the call that runs now sends to them

    def reducers_rest(self) -> bool:
        """Whether no wrapper counts gradients."""

    def descend(self, module: torch.nn.Module) -> None:
        """Graph the larger parts of a module whose forward cannot be captured."""


class GraphedForward:
    """What stands for one inner forward: replays where a captured graph fits, else the inner forward itself.

    Args:
        layer: whose settings hold, and who has wrappers around the module.
    """

    def __init__(self, inner: Callable[..., Any], module: torch.nn.Module, layer: Settings) -> None:
        self.inner = inner
        self.layer = layer
        self.module = ref(module)
        self.captured: dict[Any, list[Captured]] = {}
        self.failed: dict[Any, str] = {}
        self.eager: Counter[str] = Counter()  # why calls were not replayed
        self.calls: Counter[Any] = Counter()
        self.outdated: Counter[Any] = Counter()
        self.dropped: Counter[str] = Counter()  # why graphs were made anew
        self._crowded: Counter[Any] = Counter()
        self._latest: Any = None  # the kind of the latest call that may be captured
        self._host: dict[Any, HostValues] = {}
        self._parameters = list(module.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, sending = self.module(), self.layer.sending
        plain = self.inner if sending is None else functools.partial(sending.eagerly, self.inner)
        if (
            paused_now or module is None or torch.compiler.is_compiling()
        ):  # Dynamo traces what lies around it, through it
            return plain(*args, **kwargs)
        if not module.training or not torch.is_grad_enabled():
            self.eager["it is called in evaluation mode or without gradients"] += 1
            return plain(*args, **kwargs)
        if sending is None and is_replicated(module):
            self.eager["its DistributedDataParallel has not settled what it sends, or sends more than gradients"] += 1
            return plain(*args, **kwargs)
        arguments = taken_apart(args, kwargs)
        if isinstance(arguments, str):
            self.eager[arguments] += 1
            return plain(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return plain(*args, **kwargs)
        key = self._latest = (*_signature(arguments, self._parameters), _what_is_sent(sending))
        slots = self.captured.get(key)
        if slots and (slots[0].layout.changed() or slots[0].twice):
            self._drop(key, module)
            slots = None
        if key in self.failed:
            return plain(*args, **kwargs)
        if slots is None:
            slots = self._first(key, module, arguments)
            if slots is None:
                return self._eagerly(key, plain, args, kwargs)
        captured = next((c for c in slots if not c.busy()), None) or self._another(key, slots, module, arguments)
        if captured is None:
            return plain(*args, **kwargs)
        direct = self._direct(captured)
        leaves = [captured.gradients.anchor] if direct else captured.leaves
        return captured.output(Replay.apply(captured, direct, *arguments.tensors, *leaves))  # type: ignore[no-untyped-call]  # torch's own, without types

    def _eagerly(self, key: Any, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call before the capture: what it brings from the host, and whether it is differentiated twice, is noted."""
        calls = self.calls[key]
        if key in self.failed or not 1 < calls <= WARM_CALLS:
            return plain(*args, **kwargs)
        with self._host.setdefault(key, HostValues()).watching(within=self._compiled()):
            output = plain(*args, **kwargs)
        failed = self.failed

        def note(gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                failed[key] = TWICE

        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(note)
                break
        return output

    def _first(self, key: Any, module: torch.nn.Module, arguments: Arguments) -> list[Captured] | None:
        """The first graph of a kind of calls; None as long as there is none."""
        if len(self.captured) >= MAX_SIGNATURES:
            self.eager[f"it is called in more than {MAX_SIGNATURES} ways: {self._what_differs()}"] += 1
            return None
        self.calls[key] += 1
        if self.calls[key] <= WARM_CALLS:
            return None
        why = (
            unfit(module, sends=self.layer.sends) or self._host.get(key, HostValues()).differ()
        )  # hooks may have come later
        captured = None if why else self._capture(key, module, arguments)
        if why:
            self.failed[key] = why
        if captured is None:
            return None
        self.captured[key] = [captured]
        return self.captured[key]

    def _another(
        self, key: Any, slots: list[Captured], module: torch.nn.Module, arguments: Arguments
    ) -> Captured | None:
        """One more graph, where all wait for their backward; None where this has been so too seldom, or too often."""
        self._crowded[key] += 1
        if self._crowded[key] <= _CROWDED:
            return None
        if len(slots) >= MOST_IN_FLIGHT or (key, "more") in self.failed:
            self.eager[f"{len(slots)} earlier forwards wait for their backward"] += 1
            return None
        if not slots[0].fits_once_more():
            self.eager[
                f"{len(slots)} earlier forwards wait for their backward, and no memory is left for one graph more"
            ] += 1
            return None
        captured = self._capture((key, "more"), module, arguments, self._host.get(key))
        if captured is not None:
            slots.append(captured)
        return captured

    def _capture(
        self, key: Any, module: torch.nn.Module, arguments: Arguments, host_values: HostValues | None = None
    ) -> Captured | None:
        sending = self.layer.sending
        try:
            with sending.silently() if sending is not None else nullcontext():
                return Captured(
                    self.inner,
                    module,
                    arguments,
                    beside=self.layer.beside,
                    host_values=host_values or self._host.get(key),
                    within=self._compiled(),
                    sending=sending,
                )
        except Exception as error:
            self.failed[key] = told(error)
            self.layer.descend(module)
            return None

    def _drop(self, key: Any, module: torch.nn.Module) -> None:
        """The captured graphs are of a module that is another by now. What is new in it is warmed up like the first."""
        slots = self.captured.pop(key)
        if not slots[0].twice:
            name = slots[0].layout.other_attribute()
            self.dropped[f"the attribute {name} of its modules" if name else "a tensor, a hook or a layer of it"] += 1
        self._parameters = list(module.parameters())
        self.calls[key], self._crowded[key] = 0, 0
        if any(captured.twice for captured in slots):
            self.failed[key] = TWICE
        if slots[0].replays < WORTH_REPLAYS and not slots[0].layout.same_attributes():
            self.outdated[key] += 1
            if self.outdated[key] >= _MOST_OUTDATED:
                name = slots[0].layout.other_attribute()
                self.failed[key] = f"an attribute of its modules changes every few steps{f' ({name})' if name else ''}"

    def _what_differs(self) -> str:
        """Between the kinds of calls that were captured."""
        kinds = list(self.captured)
        if len({(kind[2], kind[3:]) for kind in kinds}) == 1:
            return "other parameters learn, or settings change"
        if len({kind[3:] for kind in kinds}) == 1:
            return "arguments that are no tensors change from call to call"
        return "shapes, dtypes or layouts of its inputs change from call to call"

    def _compiled(self) -> bool:
        """Whether Dynamo has a hand in the forward: ours, or the script's own."""
        module = self.module()
        return (
            module is None
            or ForwardStack.of(module).get(CAPTURED) is not None
            or any(compiles.is_compiled(m) for m in module.modules())
        )

    def _direct(self, captured: Captured) -> bool:
        """Whether gradients may go past autograd.

        On another stream than that of the parameters their edges are what makes the one wait for the other; and a reducer of
        DistributedDataParallel's hears of gradients by them.
        """
        device = captured.inputs[0].device
        if (
            not serving()
            or not captured.leaves
            or torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
            or not self.layer.reducers_rest()
        ):
            return False
        if self.layer.reducers or self.layer.sending is not None:  # they hold what would look like somebody's hooks
            captured.gradients.watched = False
        return captured.gradients.direct()

    @property
    def warming(self) -> bool:
        """Whether calls like the latest are captured after some more of them."""
        key = self._latest
        return key not in self.captured and key not in self.failed and 0 < self.calls[key] <= WARM_CALLS

    def reasons(self) -> list[str]:
        """Why calls stay eager, the commonest first."""
        found = [*dict.fromkeys(self.failed.values()), *(reason for reason, _ in self.eager.most_common())]
        if not self.warming:
            return found
        due = f"it was called {self.calls[self._latest]} times, and is captured at call {WARM_CALLS + 1}"
        if self.dropped:
            what, times = self.dropped.most_common(1)[0]
            due = f"{what} was another by the next call, so its graph was dropped {times} times; since then {due}"
        return [*found, due]

    def free(self) -> None:
        """Give the graphs' memory back. A gradient that lies in a graph's pool is moved out first."""
        for captured in self.all():
            captured.gradients.keep()
        self.captured.clear()

    def all(self) -> list[Captured]:
        """Every captured graph."""
        return [captured for slots in self.captured.values() for captured in slots]


def _signature(arguments: Arguments, parameters: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """What a captured graph has frozen in: which parameters learn, inputs, and the flags by which libraries choose their kernels."""
    return (
        (
            torch.is_autocast_enabled("cuda"),
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            tf32.settings(),
        ),
        tuple([p.requires_grad for p in parameters]),
        arguments.frozen,
        *((a.shape, a.dtype, a.stride(), a.requires_grad) for a in arguments.tensors),
    )


def _what_is_sent(sending: Sending | None) -> Any:
    """As a graph has it frozen in."""
    return None if sending is None else (sending.buckets, sending.sent_as)


def unfit(module: torch.nn.Module, *, sends: bool = False) -> str:
    """Why this module cannot be graphed; empty when it can. `sends`: a graph may send gradients to other ranks."""
    if isinstance(module, torch.nn.DataParallel):
        return "DataParallel over several devices does work of its own around the forward"
    # One hears neither of a replay nor of its gradients, and sends none; but what stands at REPLICATED tells what it would send.
    if data_parallel(module) and not (sends and is_replicated(module)):
        return "DistributedDataParallel does work of its own around the forward"
    if next(module.parameters(), None) is None:
        return "it has no parameters"
    return hooks.unfit(module)


def told(error: BaseException) -> str:
    """What was raised in a capture, in one line, with the script's own line where it came from."""
    while "previous error during capture" in str(error) and error.__context__ is not None:
        error = error.__context__  # the end of a capture raises too, and says only that
    text = first_line(error)
    if "operation not permitted when stream is capturing" in text or "cudaErrorStreamCapture" in text:
        text = "it waits for the device, which a capture cannot"
    elif "Cannot copy between CPU and CUDA tensors" in text:
        text = "it copies between host and device, which a capture cannot"
    traceback, line = error.__traceback__, ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_script(code.co_filename):
            line = f"{os.path.relpath(code.co_filename) if len(code.co_filename) > 60 else code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return f"{text} ({line})" if line and line not in text else text


paused_now = False


@contextmanager
def paused() -> Iterator[None]:
    """Forwards run eagerly meanwhile, captured or not: a trace then shows the operators, which a replay hides."""
    global paused_now
    before, paused_now = paused_now, True
    try:
        yield
    finally:
        paused_now = before
