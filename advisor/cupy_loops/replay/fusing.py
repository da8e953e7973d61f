"""Which calls of a segment run as one kernel, and in what order.

Calls are taken in their order. An elementwise call joins an earlier kernel over the same shape where nothing that it needs, and nothing that must
be done before it, comes later than that kernel. A call may join the kernel that writes what it reads, or reads what it writes, where both mean
the same element at the same place; else it has to come behind it. Kernels that do not need each other are one launch.

What only calls of its own kernel read is not written to memory at all (`dead`), as long as the script does not hold it while the segment is
launched: the recorder looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from advisor.cupy_loops.replay.calls import Cluster, Element, Entry, Program, Step
from advisor.cupy_loops.replay.elementwise import element
from advisor.cupy_loops.replay.memory import classes, samples
from advisor.cupy_loops.replay.pooled import pooled
from advisor.cupy_loops.replay.windows import Gathering, gathering, joined, padded

MOST_CALLS = 40  # of one kernel
MOST_ARRAYS = 24  # that one kernel reads and writes
MOST_TOGETHER = 16  # kernels of one launch
SMALL = 1 << 20  # elements; larger kernels fill a GPU by themselves


@dataclass(slots=True, eq=False)
class _Node:
    """A step while it is planned."""

    step: Step
    needs: set[int] = field(default_factory=set)  # nodes that come before it


def plan(
    program: Program, segments: list[tuple[int, int]], apart: Collection[str] = ()
) -> dict[tuple[int, int], list[Step]]:
    """For each segment its steps, in order. The program's recorded arrays must be there.

    Args:
        apart: names of calls that run by themselves.
    """
    arrays = samples(program)
    memory = classes(arrays)
    users = _users(program)
    return {segment: _Planner(program, arrays, memory, users, apart).steps(segment) for segment in segments}


def _users(program: Program) -> dict[int, set[int]]:
    """By place, the entries that take it or give it."""
    found: dict[int, set[int]] = {}
    for number, entry in enumerate(program.entries):
        for place in (*_takes(entry), *entry.gives):
            found.setdefault(place, set()).add(number)
    return found


def _takes(entry: Entry) -> Iterator[int]:
    for _, place in entry.arrays:
        yield place
    for _, items in entry.nested:
        for place, _ in items:
            if place >= 0:
                yield place


class _Planner:
    """Of one segment."""

    def __init__(
        self,
        program: Program,
        arrays: dict[int, Any],
        memory: dict[int, int],
        users: dict[int, set[int]],
        apart: Collection[str],
    ) -> None:
        self.apart = apart
        self.program, self.arrays, self.memory, self.users = program, arrays, memory, users
        self.together = Counter(memory.values())
        self.nodes: list[_Node] = []
        self.made: dict[int, int] = {}  # by place, the node that gives it
        self.wrote: dict[int, tuple[int, int]] = {}  # by memory, the last node that wrote it, and which place
        self.read: dict[int, list[tuple[int, int]]] = {}  # and those that have read it since
        self.gathered: dict[int, Gathering] = {}  # by memory, arrays of zeros that are added to
        self.first: list[int] = []  # views that need nothing of this segment

    def steps(self, segment: tuple[int, int]) -> list[Step]:
        """All steps of the segment."""
        for number in range(*segment):
            entry = self.program.entries[number]
            if entry.how == "run" and not entry.idle:
                self._add(number, entry)
        self._end(list(self.gathered))
        for node in self.nodes:
            for cluster in node.step.clusters:
                self._settle(cluster)
        return _together(self.nodes, self.first)

    def _add(self, number: int, entry: Entry) -> None:
        found = element(number, entry, self.arrays) or padded(number, entry, self.arrays)
        found = found or joined(number, entry, self.arrays) or pooled(number, entry, self.arrays)
        alone = entry.name in self.apart
        if found is not None and (alone or self._mixed(found)):
            found = None
        if found is None and self._is_view(entry):
            self._view(number, entry)
            return
        if not alone and (zeros := gathering(number, entry, self.arrays)):
            self.gathered[self.memory[zeros.place]] = zeros
            return
        takes = _read(found) if found else list(_takes(entry))
        writes = [found.place] if found else [*entry.changes, *(p for p in entry.gives if p not in takes)]
        if not found and not writes and entry.gives:
            return  # it gives back what it was given
        gathered = self.gathered.get(self.memory[writes[0]]) if writes else None
        others = [self.memory[place] for place in takes if place not in writes]
        self._end([memory for memory in others if memory in self.gathered])
        if (
            gathered is not None
            and not alone
            and (gathered.add(number, found, self.arrays) or gathered.put(number, entry, self.arrays))
        ):
            return
        self._end([m for m, g in self.gathered.items() if self._changed(m, g, writes)])
        self._node(number, entry, found, takes, writes)

    def _mixed(self, found: Element) -> bool:
        """Whether an element of the result lies where another of an operand does: CuPy copies that operand first."""
        own = self.memory[found.place]
        return any(self.memory[place] == own and place != found.place for place in _read(found))

    def _changed(self, memory: int, gathered: Gathering, writes: list[int]) -> bool:
        """Whether these writes go to an array that is added to, or to one that has been added to it."""
        touched = {memory, *(self.memory[window.place] for window in gathered.windows)}
        return any(self.memory[place] in touched for place in writes)

    def _end(self, memories: list[int]) -> None:
        """What was added to these arrays of zeros is all that will be."""
        for memory in memories:
            gathered = self.gathered.pop(memory)
            found = gathered.element() if gathered.windows else None
            self._node(gathered.number, self.program.entries[gathered.number], found, _read(found), [gathered.place])
            at = self.made[gathered.place]
            for number in gathered.views:
                self.made[self.program.entries[number].gives[0]] = at
            self.nodes[at].step.views += gathered.views

    def _node(self, number: int, entry: Entry, found: Element | None, takes: list[int], writes: list[int]) -> None:
        """Put the call where it belongs."""
        behind, beside = self._needs(takes, writes)
        at = self._join(found, behind, beside) if found and not found.moves else -1
        if at < 0:
            at = len(self.nodes)
            step = Step(clusters=[Cluster(found.shape)]) if found else Step(number=number)
            self.nodes.append(_Node(step))
        node = self.nodes[at]
        node.needs |= (behind | beside) - {at}
        if found is not None:
            _take(node.step.clusters[0], found)
        for place in takes:
            # A window is no element at its place: who changes that array comes behind.
            self.read.setdefault(self.memory[place], []).append((at, -1 if found and found.moves else place))
        for place in writes:
            self.wrote[self.memory[place]] = at, place
            self.read[self.memory[place]] = []
        for place in entry.gives:
            self.made.setdefault(place, at)

    def _is_view(self, entry: Entry) -> bool:
        """Whether the call only makes another array of memory that is there."""
        takes = list(_takes(entry))
        if len(takes) != 1 or len(entry.gives) != 1 or entry.changes or entry.run is not None:
            return False
        return entry.gives[0] not in takes and self.memory[entry.gives[0]] == self.memory[takes[0]]

    def _view(self, number: int, entry: Entry) -> None:
        gathered = self.gathered.get(self.memory[entry.gives[0]])
        if gathered is not None:
            gathered.views.append(number)
            return
        at = self.made.get(next(_takes(entry)), -1)
        self.made[entry.gives[0]] = at
        (self.nodes[at].step.views if at >= 0 else self.first).append(number)

    def _needs(self, takes: list[int], writes: list[int]) -> tuple[set[int], set[int]]:
        """Nodes that come before the call, and those that it may also be part of."""
        behind: set[int] = set()
        beside: set[int] = set()

        def need(at: int, place: int, own: int) -> None:
            (beside if place == own else behind).add(at)

        for place in takes:
            memory = self.memory[place]
            if memory in self.wrote:
                need(*self.wrote[memory], place)
            if self.made.get(place, -1) >= 0:  # before the first node are views of what comes in
                maker = self.made[place]
                given = any(place == e.place for c in self.nodes[maker].step.clusters for e in c.elements)
                (beside if given else behind).add(maker)
        for place in writes:
            memory = self.memory[place]
            if memory in self.wrote:
                need(*self.wrote[memory], place)
            for at, read in self.read.get(memory, ()):
                need(at, read, place)
        return behind, beside - behind

    def _join(self, found: Element, behind: set[int], beside: set[int]) -> int:
        """The node that the call can be part of; -1 for none. Best one that it shares arrays with."""
        lowest = max(max(behind, default=-1) + 1, max(beside, default=0))
        best, shared = -1, -1
        own = {*_read(found), found.place}
        for at in range(lowest, len(self.nodes)):
            clusters = self.nodes[at].step.clusters
            if not clusters or clusters[0].shape != found.shape or len(clusters[0].elements) >= MOST_CALLS:
                continue
            known = {op.place for e in clusters[0].elements for op in e.operands} | {
                e.place for e in clusters[0].elements
            }
            if len(known | own) > MOST_ARRAYS:
                continue
            if len(known & own) > shared:
                best, shared = at, len(known & own)
        return best

    def _settle(self, cluster: Cluster) -> None:
        """Which places of the kernel's go to memory, and which nobody else reads."""
        own = {number for e in cluster.elements for number in (e.number, *e.also)}
        for place in dict.fromkeys(e.place for e in cluster.elements):
            giver = self.program.results.get(place, -1)
            alone = self.users[place] <= own and self.together[self.memory[place]] == 1
            dead = giver in own and alone and giver not in self.program.alive
            (cluster.dead if dead else cluster.writes).append(place)


def _read(found: Element | None) -> list[int]:
    """Places that an element reads."""
    if found is None:
        return []
    return [op.place for op in found.operands if op.place >= 0] + found.looked_through


def _take(cluster: Cluster, found: Element) -> None:
    written = {e.place for e in cluster.elements}
    for operand in found.operands:
        if operand.place >= 0 and operand.place not in written and operand.place not in cluster.reads:
            cluster.reads.append(operand.place)
    cluster.elements.append(found)


def _together(nodes: list[_Node], first: list[int]) -> list[Step]:
    """The nodes' steps, with small kernels that do not need each other in one."""
    steps: list[Step] = [Step(views=first)] if first else []
    where: dict[int, int] = {}
    for at, node in enumerate(nodes):
        lowest = max((where[need] + 1 for need in node.needs), default=0)
        place = _room(steps, lowest, node.step)
        if place < 0:
            place = len(steps)
            steps.append(Step(number=node.step.number))
        steps[place].clusters += node.step.clusters
        steps[place].views += node.step.views
        where[at] = place
    return steps


def _room(steps: list[Step], lowest: int, step: Step) -> int:
    """The first launch from `lowest` on that this kernel can be part of; -1 for none."""
    if not step.clusters or _size(step.clusters[0]) > SMALL:
        return -1
    for place in range(lowest, len(steps)):
        beside = steps[place].clusters
        if beside and len(beside) < MOST_TOGETHER and all(_size(cluster) <= SMALL for cluster in beside):
            return place
    return -1


def _size(cluster: Cluster) -> int:
    size = 1
    for length in cluster.shape:
        size *= length
    return size
