"""What a GPU would hold, and what a step would take, where several train one model: by who holds what, foretold from one GPU's step.

Each of `n` GPUs has the batch that was watched. P, G and S are the bytes of parameters, gradients and the optimizer's state.

    DDP      holds G once more, in the buckets that are sent (where an allocator tells: on a CPU they are not seen); sends G to all by a ring, beside the backward
    ZeRO-1   as DDP with S / n; behind the step each rank sends the parameters that it has updated
    FSDP2    (P + G + S) / n and two gathered blocks; gathers P forward and backward, and sends G to its owners
    hybrid   FSDP2 over half of the GPUs, and a sum of its shares with the other half
    pipeline layers in stages, for the batch of all n; all of P, G and S. 2 n parts of the batch are in flight: idle for (n - 1) / 2 n of the
             step, and by how uneven the stages are. With batch norms over the whole batch it is one part, and stages wait for each other
    spatial  each sample of the batch that was watched cut in n, where there are fewer samples than GPUs: all of P, G and S, and an n-th of
             what the backward needs, beside the rows at the cuts that neighbours send each other at each convolution (not counted)

A ring over n sends (n - 1) / n of what it gathers, and twice that of what it sums. `low`: all that can hide behind computation does; `high`:
nothing does. Sources: Rajbhandari and others 2020 (ZeRO); Zhao and others 2023 (FSDP); Narayanan and others 2021 (1F1B).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from advisor.analysis.activations import MemoryAlternative
from advisor.analysis.scaling import Link
from advisor.core.held import ACTIVATION, MemoryLook, ModuleCost

BACKWARD = 2 / 3  # of a step, in which gradients can be sent
PARTS = 2  # of the batch, for each stage of a pipeline (distributed/stages.py)
APPLIED = "--shard {}"


def ways(look: MemoryLook, ranks: int, link: Link) -> list[MemoryAlternative]:
    """The alternatives, in the order of what they hold usually; nothing without several ranks or a timed step."""
    if ranks < 2 or not look.step_us:
        return []
    weights, gradients, state = look.of("parameter"), look.of("gradient"), look.of("optimizer")
    step, peak, buckets = look.step_us, look.most_bytes, gradients if look.peak_bytes else 0
    summed, gathered = link.reduce_us(gradients, ranks), link.reduce_us(weights, ranks) / 2

    def row(
        name: str, nbytes: float, hidden_us: float, exposed_us: float, room_us: float, note: str
    ) -> MemoryAlternative:
        low = 1 + (max(0.0, hidden_us - room_us) + exposed_us) / step
        return MemoryAlternative(
            name=name, nbytes=max(0, round(nbytes)), step=(low, 1 + (hidden_us + exposed_us) / step), note=note
        )

    def sharded(over: int) -> float:
        return peak - (weights + gradients + state) * (1 - 1 / over) + 3 * _block(look)

    found = [
        row(f"DDP on {ranks}", peak + buckets, summed, 0.0, BACKWARD * step, ""),
        row(
            f"ZeRO-1 on {ranks}",
            peak + buckets - state * (1 - 1 / ranks),
            summed,
            gathered,
            BACKWARD * step,
            APPLIED.format("zero1"),
        ),
        row(f"FSDP2 on {ranks}", sharded(ranks), 2 * gathered + summed / 2, 0.0, step, APPLIED.format("fsdp2")),
    ]
    if ranks >= 4 and ranks % 2 == 0:
        half = ranks // 2
        inside = link.reduce_us(weights, half) + link.reduce_us(gradients, half) / 2
        across = link.reduce_us(gradients / half, 2)
        found.append(row(halves(ranks), sharded(half), inside + across, 0.0, step, APPLIED.format("hybrid")))
    stages = split(look.modules, ranks)
    if stages is not None:
        found.append(_pipeline(look, ranks, stages))
    if 0 < look.batch_size < ranks:
        rest = look.most_bytes - look.of(ACTIVATION)
        found.append(
            MemoryAlternative(
                name=f"spatial on {ranks}",
                nbytes=rest + buckets + look.of(ACTIVATION) // ranks,
                step=(1 / ranks, 1.0),
                note=f"shown, not applied: each sample cut in {ranks}, as ShardTensor of PhysicsNeMo does",
            )
        )
    return found


def halves(ranks: int) -> str:
    """The row's name of FSDP2 over each half of so many."""
    return f"FSDP2 on {ranks // 2} × 2"


def split(modules: Sequence[ModuleCost], stages: int) -> tuple[tuple[ModuleCost, ...], ...] | None:
    """Modules that are called one after the other, in stages whose longest forward is as short as it gets; None where there are too few."""
    units = _units(modules, stages)
    if len(units) < stages:
        return None
    times = [unit.forward_us for unit in units]
    best: list[list[tuple[float, int]]] = [[(sum(times[: end + 1]), 0) for end in range(len(times))]]
    for number in range(1, stages):
        before, now = best[-1], []
        for end in range(len(times)):
            choices = [(max(before[cut - 1][0], sum(times[cut : end + 1])), cut) for cut in range(number, end + 1)] or [
                (float("inf"), 0)
            ]
            now.append(min(choices))
        best.append(now)
    cuts, end = [], len(times)
    for number in range(stages - 1, 0, -1):
        end = best[number][end - 1][1]
        cuts.append(end)
    bounds = [0, *reversed(cuts), len(times)]
    return tuple(tuple(units[a:b]) for a, b in pairwise(bounds))


def _units(modules: Sequence[ModuleCost], wanted: int) -> list[ModuleCost]:
    """Of the tree of modules those that a pipeline could cut between: the largest are opened until there are enough."""
    roots = [cost for cost in modules if not any(cost.module.startswith(f"{other.module}.") for other in modules)]
    units = roots[:1]
    while len(units) < 4 * wanted:
        largest = max(units, key=lambda unit: unit.forward_us, default=None)
        inside = [m for m in modules if largest and m.module.rpartition(".")[0] == largest.module and m.calls == 1]
        if largest is None or len(inside) < 2:
            break
        at = units.index(largest)
        units[at : at + 1] = inside
    return units


def _pipeline(look: MemoryLook, ranks: int, stages: Sequence[Sequence[ModuleCost]]) -> MemoryAlternative:
    times = [sum(unit.forward_us for unit in stage) for stage in stages]
    uneven = max(times) * ranks / sum(times) if sum(times) else 1.0
    most = max(sum(unit.held_bytes for unit in stage) for stage in stages) * ranks
    rest = look.most_bytes - look.of(ACTIVATION)
    idle = (ranks - 1) / (PARTS * ranks)
    where = ", ".join(stage[0].module.rpartition(".")[2] for stage in stages[1:])
    return MemoryAlternative(
        name=f"pipeline of {ranks}",
        nbytes=max(0, round(most + rest)),
        step=(uneven, uneven + idle),
        note=f"{APPLIED.format('pipeline')}; cut before {where}; with batch norms {ranks} × as long",
    )


def _block(look: MemoryLook) -> int:
    """Bytes of the largest module's weights that FSDP2 gathers at a time: a quarter of all, or a leaf's where that is more."""
    leaves = [cost.weight_bytes for cost in look.modules if not cost.submodules]
    return min(look.of("parameter"), max(max(leaves, default=0), look.of("parameter") // 4))
