"""How what autograd keeps grows and shrinks over one step: an entry for each storage that is kept first or let go of last.

Entries are the hooks' of held.py. What is kept is let go of when autograd drops the object that a hook has given it, on a CPU and on a
GPU alike. At most `MOST` entries are made; the GPU allocator's own number is read beside each.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

from advisor.core.held import ACTIVATION, OTHERS, OUTSIDE, CourseLayer, HeldRow, MemoryCourse

MOST = 50_000  # entries of a step; beyond them it has no course
READ = 2_000  # entries beside which the allocator is read; of later ones every tenth
POINTS = 240  # of a course
GROUPS = 8  # of modules that are told apart
TOO_MUCH = 0.4  # of all that modules keep
GRADIENT = "gradient"


class Kept:
    """What a hook gives autograd in a tensor's place; autograd lets go of it when the tensor is not needed any more."""

    __slots__ = ("_dropped", "address", "tensor")

    def __init__(self, tensor: torch.Tensor, address: int, dropped: Callable[[int], None]) -> None:
        self.tensor, self.address, self._dropped = tensor, address, dropped

    def __del__(self) -> None:
        self._dropped(self.address)


class Course:
    """Entries of one step. Backward's threads make them too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began_ns = time.perf_counter_ns()
        self._backward_ns = 0
        self._entries: list[tuple[int, str, int]] = []  # time, module or GRADIENT, change in bytes
        self._allocated: list[int] = []
        self._alive: dict[int, list[Any]] = {}  # storage → times kept, bytes, module
        self._lock = threading.RLock()  # the garbage collector may drop what was kept in the middle of an entry

    def keeps(self, address: int, nbytes: int, module: str) -> bool:
        """A storage is kept, once more or for the first time: True then."""
        with self._lock:
            known = self._alive.get(address)
            if known is not None:
                known[0] += 1
                return False
            self._alive[address] = [1, nbytes, module]
            self.enter(module, nbytes)
            return True

    def drops(self, address: int) -> None:
        """One that kept it needs it no more."""
        with self._lock:
            known = self._alive.get(address)
            if known is None:
                return
            known[0] -= 1
            if not known[0]:
                del self._alive[address]
                self.enter(known[2], -known[1])

    def enter(self, place: str, change: int) -> None:
        """One entry."""
        with self._lock:
            if len(self._entries) < MOST:
                self._entries.append((time.perf_counter_ns(), place, change))
                count = len(self._allocated)
                due = count < READ or count % 10 == 0
                self._allocated.append(_allocated(self._device) if due else self._allocated[-1])

    def backward(self) -> None:
        """Autograd asks for what it has kept."""
        self._backward_ns = self._backward_ns or time.perf_counter_ns()

    def result(self, lasting: Sequence[HeldRow]) -> MemoryCourse | None:
        """The course of the step that ends now; None where it had too many entries, or none."""
        ended = time.perf_counter_ns()
        entries = self._entries
        if not 0 < len(entries) < MOST:
            return None
        groups = grouped(entries)
        at, states, rows = _sampled(entries, groups, self._began_ns, ended)
        names = list(dict.fromkeys(groups.values()))
        layers = [
            CourseLayer(name=row.kind, kind=row.kind, nbytes=(row.nbytes,) * len(at))
            for row in lasting
            if row.kind != GRADIENT
        ]
        layers += [
            CourseLayer(
                name=name,
                kind=GRADIENT if name == GRADIENT else ACTIVATION,
                nbytes=tuple(max(0, state.get(name, 0)) for state in states),
            )
            for name in sorted(names, key=lambda name: (name != GRADIENT, name in (OTHERS, OUTSIDE)))
        ]
        return MemoryCourse(
            at_us=tuple(at),
            layers=tuple(layers),
            allocated_bytes=tuple(self._allocated[i] for i in rows) if any(self._allocated) else (),
            backward_us=(self._backward_ns - self._began_ns) / 1e3 if self._backward_ns else 0.0,
            length_us=(ended - self._began_ns) / 1e3,
        )


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def grouped(entries: Sequence[tuple[int, str, int]]) -> dict[str, str]:
    """Module → the group it is told under: a module that keeps `TOO_MUCH` is taken apart, and those that keep least are told together."""
    kept: dict[str, int] = {}
    for _, place, change in entries:
        kept[place] = kept.get(place, 0) + max(0, change)
    modules = [place for place in kept if place not in ("", GRADIENT)]
    groups = _parts(modules, 1)
    while groups:
        name, inside = max(groups.items(), key=lambda item: sum(kept[m] for m in item[1]))
        parts = _parts(inside, name.count(".") + 2)
        if list(parts) == [name] or sum(kept[m] for m in inside) <= TOO_MUCH * sum(kept[m] for m in modules):
            break
        del groups[name]
        groups |= parts
    shown = sorted(groups, key=lambda name: -sum(kept[m] for m in groups[name]))[:GROUPS]
    told = {m: name if name in shown else OTHERS for name, inside in groups.items() for m in inside}
    return {place: told.get(place, GRADIENT if place == GRADIENT else OUTSIDE) for place in kept}


def _parts(modules: Sequence[str], depth: int) -> dict[str, list[str]]:
    """Modules by the first `depth` names of their paths."""
    found: dict[str, list[str]] = {}
    for module in modules:
        found.setdefault(".".join(module.split(".")[:depth]), []).append(module)
    return found


def _sampled(
    entries: Sequence[tuple[int, str, int]], groups: dict[str, str], began: int, ended: int
) -> tuple[list[float], list[dict[str, int]], list[int]]:
    """Times, what each group holds at them, and the entries they stand behind: of each stretch of time the fullest moment, so that
    no peak is lost; and the start."""
    bounds = [began + (ended - began) * (i + 1) // POINTS for i in range(POINTS)]
    held: dict[str, int] = {}
    fullest: dict[int, tuple[int, int, dict[str, int]]] = {}  # stretch → bytes, entry, state
    for i, (at, place, change) in enumerate(entries):
        group = groups[place]
        held[group] = held.get(group, 0) + change
        total, stretch = sum(held.values()), bisect_right(bounds, at)
        if stretch not in fullest or total >= fullest[stretch][0]:
            fullest[stretch] = (total, i, dict(held))
    chosen = [fullest[stretch] for stretch in sorted(fullest)]
    rows = [0, *(i for _, i, _ in chosen), len(entries) - 1]
    times = [0.0, *((entries[i][0] - began) / 1e3 for _, i, _ in chosen), (ended - began) / 1e3]
    start: dict[str, int] = dict.fromkeys(groups.values(), 0)
    return times, [start, *(state for _, _, state in chosen), dict(held)], rows
