"""Memory of a step, to the byte: what it holds at its peak, what it leaves behind, and which lines allocated that.

A few steps run under the profiler's memory recording, which sees every block that torch's allocators hand out and take
back, on a CPU as on a GPU. Blocks from before the window are not seen when they are freed, so its first step only makes
blocks known; garbage in reference cycles is collected at both ends, so that what is counted as left behind is.

On a GPU growth and peak are the allocator's own numbers, whose peak begins anew with the window: torch 2.11 does not record
the blocks that Python frees between operators (seen on an H200), so that the record tells the lines, but not the level.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _profiler_enabled
from torch.autograd import profiler as autograd_profiler

from advisor.profiling.inside.annotate import LINE, STEP, Annotator, step_marker
from advisor.profiling.inside.kinetosession import quiet_kineto
from advisor.testing.live import LiveStep
from advisor.testing.quantities import HeldTo

STEPS = 4  # after the first one
_OWN_RANGES = "advisor:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """Means over the steps. `peak_bytes` is the most that was allocated at once: on a GPU of everything; on a CPU of what
    the step allocates, and the weights, gradients and optimizer state from before."""

    allocations: float
    growth_bytes: float
    peak_bytes: int
    growing: tuple[HeldTo, ...]
    peak: tuple[HeldTo, ...]


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Bytes that a GPU's allocator had handed out at both ends of the window, after its first step, and the most between."""

    first: int
    end: int
    peak: int


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block of memory that was handed out, or freed."""

    at: int
    pointer: int
    nbytes: int  # negative: freed
    source: str
    what: str


def watch(live: LiveStep) -> Allocations | None:
    """Run the step a few times and account for its memory. None when a profiler of the step's own is running, or nothing
    was seen. The profiler is off and the annotations are gone afterwards, also when the step raises."""
    if _profiler_enabled():
        return None
    annotator = Annotator(live.training.models)
    profile = autograd_profiler.profile(use_kineto=True, profile_memory=True)
    device = live.training.device
    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    with _only_new_garbage():
        results, level = _recorded(live, profile, annotator, device if on_gpu else None)
    events, marks = _read(results, device.type)
    if not events or len(marks) != STEPS + 2:
        return None
    if not on_gpu:
        events = own_blocks(events)
        before = _state_bytes(live, {event.pointer for event in events})
    return account(events, marks, before, level)


def _recorded(
    live: LiveStep, profile: Any, annotator: Annotator, gpu: torch.device | None
) -> tuple[Any, MemoryLevel | None]:
    """The profiler's results over the window's steps, and the level of the GPU's memory."""
    first = end = peak = 0
    with quiet_kineto():
        profile._prepare_trace()
    profile._start_trace()
    try:
        annotator.start(compiled=live.compiled)
        for index in range(STEPS + 1):
            if index == 1:
                gc.collect()
                if gpu is not None:
                    torch.cuda.reset_peak_memory_stats(gpu)
                    first = torch.cuda.memory_allocated(gpu)
            step_marker(index)
            live.call()
        gc.collect()
        step_marker(STEPS + 1)
        if gpu is not None:
            end, peak = torch.cuda.memory_allocated(gpu), torch.cuda.max_memory_allocated(gpu)
    finally:
        annotator.stop()
        with contextlib.suppress(Exception):  # tells torch's own hooks; not in every version
            autograd_profiler._run_on_profiler_stop()
        results = _disable_profiler()
    return results, MemoryLevel(first, end, peak) if gpu is not None else None


def own_blocks(events: list[BlockEvent]) -> list[BlockEvent]:
    """The events of blocks that were allocated inside the window.

    On a CPU torch knows a block's size only if it was allocated while a profiler recorded memory. A block from before whose
    address an earlier window has used is freed with that window's size: such events tell nothing.
    """
    alive: set[int] = set()
    found = []
    for event in events:
        if event.nbytes > 0:
            alive.add(event.pointer)
        elif event.pointer not in alive:
            continue
        else:
            alive.remove(event.pointer)
        found.append(event)
    return found


@contextlib.contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Collections inside look at objects made inside: those of a whole test run would take a second each time."""
    frozen = gc.get_freeze_count() == 0  # what is frozen already is somebody's own doing
    if frozen:
        gc.freeze()
    try:
        yield
    finally:
        if frozen:
            gc.unfreeze()


def _read(results: Any, device: str) -> tuple[list[BlockEvent], list[int]]:
    events: list[BlockEvent] = []
    marks: list[int] = []
    for node, source, what in _walk(results.experimental_event_tree()):
        fields = node.extra_fields
        if type(fields).__name__.endswith("Allocation"):
            if fields.device.type == device:
                events.append(BlockEvent(node.start_time_ns, fields.ptr, fields.alloc_size, source, what))
        elif node.name.startswith(STEP):
            marks.append(node.start_time_ns)
    events.sort(key=lambda event: event.at)
    return events, sorted(marks)


def _walk(roots: Iterable[Any]) -> Iterator[tuple[Any, str, str]]:
    """Every node with the source line and the outermost operator around it."""
    stack = [(node, "", "") for node in roots]
    while stack:
        node, source, what = stack.pop()
        yield node, source, what
        name = node.name
        if name.startswith(LINE):
            source = name.removeprefix(LINE)
        elif not name.startswith((_OWN_RANGES, "[memory]")):
            what = what or name
        stack.extend((child, source, what) for child in node.children)


def account(events: list[BlockEvent], marks: list[int], before: int, level: MemoryLevel | None = None) -> Allocations:
    """Args:
    marks: when each step began, and when the last one was over.
    before: bytes that were allocated when the window began.
    level: what the allocator says, on a GPU; else the events say it.
    """
    first, last, end = marks[1], marks[STEPS], marks[STEPS + 1]
    alive: dict[int, BlockEvent] = {}
    held, growth, requests, peak = before, 0, 0, 0
    at_peak: list[BlockEvent] = []
    for event in events:
        if event.at >= end:
            break
        change = event.nbytes
        known = alive.pop(event.pointer, None)
        if change > 0:
            alive[event.pointer] = event
            change -= known.nbytes if known is not None else 0  # handed out again: freed before, and not recorded
        held += change
        if event.at < first:
            continue
        growth += change
        requests += event.nbytes > 0
        if held > peak:
            peak, at_peak = held, list(alive.values())
    # What the last step holds may be replaced by the next one's; what earlier steps hold is not.
    left = [event for event in alive.values() if first <= event.at < last]
    if level is not None:
        growth, peak = level.end - level.first, level.peak
        left = left if growth > 0 else []
    return Allocations(
        allocations=requests / STEPS,
        growth_bytes=growth / STEPS,
        peak_bytes=peak,
        growing=_by_line(left, STEPS - 1),
        peak=_by_line(at_peak, 1),
    )


def _by_line(events: Iterable[BlockEvent], steps: int) -> tuple[HeldTo, ...]:
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        sums[event.source, event.what] += event.nbytes / steps
    found = [HeldTo(source=source, what=what or "memory", bytes=nbytes) for (source, what), nbytes in sums.items()]
    return tuple(sorted(found, key=lambda h: -h.bytes))


def _state_bytes(live: LiveStep, known: set[int]) -> int:
    """Bytes of parameters, buffers, gradients and optimizer state that were allocated before the window."""
    tensors: list[torch.Tensor] = []
    for root in live.training.roots:
        tensors += [*root.module.parameters(), *root.module.buffers()]
        tensors += [p.grad for p in root.module.parameters() if p.grad is not None]
    for optimizer in live.training.optimizers:
        tensors += [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == live.training.device.type
    }
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in known)
