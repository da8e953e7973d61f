"""From the program of a step to the arenas that it is replayed in: what cannot be in a graph, and why calls run one by one, is found by trying."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from advisor.cupy_loops.replay import checked, fusing
from advisor.cupy_loops.replay.arena import Arena
from advisor.cupy_loops.replay.calls import CannotCapture, CannotFuse, NotAStep, Program
from advisor.cupy_loops.replay.memory import alike, samples

MOST_REFUSED = 24  # calls that a graph cannot hold
MOST_APART = 3  # calls that a graph may get wrong, one by one, before nothing is fused


@dataclass(slots=True, eq=False)
class Made:
    """Two arenas of a program, and the stretches of calls that are launched as one."""

    arenas: list[Arena]
    segments: list[tuple[int, int]]
    refused: list[str]  # calls that a graph cannot hold, and why
    unfused: str  # why calls of a graph run one by one; "" where many are one kernel


def make(program: Program, module: Any, backend: Any, unfused: str, apart: Collection[str] = ()) -> Made:
    """Arenas, with what a graph cannot hold made as ever.

    Args:
        backend: what builds and launches them. unfused: why calls are to run one by one; "" for nothing known. apart: names of those that
            are, of the others.

    Raises:
        NotAStep: too much of the step cannot be in a graph.
    """
    refused: list[str] = []
    while len(refused) < MOST_REFUSED:
        segments = program.segments()
        program.plans = {} if unfused else fusing.plan(program, segments, apart)
        try:
            arenas = [_arena(program, module, backend, segments) for _ in range(2)]
        except CannotFuse as error:
            if unfused:
                raise
            unfused = str(error)
            continue
        except CannotCapture as error:
            entry = program.entries[error.number]
            if entry.how != "run":
                raise
            if (
                not entry.name.startswith("RawKernel:") or entry.run is None
            ):  # the script's own kernel may do where ours does not
                entry.how = "made"
            entry.run, entry.takes = None, None
            refused.append(str(error))
            continue
        program.forget(arenas[0].at)
        for arena in arenas:
            arena.settle()
        return Made(arenas, segments, refused, unfused)
    raise NotAStep(f"a graph holds too little of the step: {refused[-1]}")


def set_apart(wrong: str, apart: set[str]) -> bool:
    """Have the call that a graph got wrong run by itself from now on; False where none is named, it does already, or too many do."""
    name = wrong.partition(checked.OTHER_VALUES)[2]
    if not name or name in apart or len(apart) >= MOST_APART:
        return False
    apart.add(name)
    return True


def _arena(program: Program, module: Any, backend: Any, segments: list[tuple[int, int]]) -> Arena:
    arena: Arena = backend.build(program, module, segments)
    there = {place: value for place, value in enumerate(arena.at) if value is not None}
    if program.plans and not alike(samples(program), there):
        raise CannotFuse("what shares memory in a recorded step does not in a replayed one")
    return arena
