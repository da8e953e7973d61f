"""Which modules to compute again in the backward, by what each costs for a byte; and what else would change a step's memory.

A module that is recomputed keeps its inputs and no more, until its backward: then all it holds is there again, one module at a time. So
small modules whose forward is short for what they keep come first (Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory
Cost", 2016, by equal segments; here by measured bytes and times).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core.held import ACTIVATION, MemoryLook, ModuleCost

NORM_AND_ACTIVATION = (
    1.7  # of a norm's forward, which reads twice and writes once: with an activation, which reads and writes once
)
LEAST_SHARE, MOST_SHARE = 0.002, 0.34  # of all activations, that one module may hold to be worth it, or to be no gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Modules to recompute: bytes fewer at the peak, and µs more a step."""

    modules: tuple[str, ...] = ()
    saved_bytes: int = 0
    added_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAlternative:
    """One way to train the same model, foretold: bytes a GPU at the peak, the step's time against the plain one's (low, high)."""

    name: str
    nbytes: int
    step: tuple[float, float]
    note: str = ""


def recompute(look: MemoryLook, wanted_bytes: int) -> Recomputation:
    """The modules that save `wanted_bytes` for the least time, or as much as any do."""
    whole = look.of(ACTIVATION)
    candidates = [
        cost
        for cost in look.modules
        if cost.submodules >= 2
        and cost.calls == 1
        and cost.forward_us > 0
        and LEAST_SHARE * whole <= _saves(cost) <= MOST_SHARE * whole
    ]
    candidates.sort(key=lambda cost: cost.forward_us / _saves(cost))
    chosen: list[ModuleCost] = []
    for cost in candidates:
        if any(_overlap(cost.module, other.module) for other in chosen):
            continue
        chosen.append(cost)
        if _net(chosen) >= wanted_bytes:
            break
    if not chosen or _net(chosen) <= 0:
        return Recomputation()
    return Recomputation(
        modules=tuple(sorted(cost.module for cost in chosen)),
        saved_bytes=_net(chosen),
        added_us=sum(cost.forward_us for cost in chosen),
    )


def renewed(look: MemoryLook, wanted_bytes: int) -> Recomputation:
    """The norms whose outputs, made again, save `wanted_bytes`, or as much as all do: the largest first, for each costs by its bytes."""
    candidates = sorted(
        (cost for cost in look.modules if cost.renewed_bytes and cost.calls == 1), key=lambda cost: -cost.renewed_bytes
    )
    chosen: list[ModuleCost] = []
    for cost in candidates:
        chosen.append(cost)
        if sum(one.renewed_bytes for one in chosen) - chosen[0].renewed_bytes >= wanted_bytes:
            break
    saved = sum(one.renewed_bytes for one in chosen) - (
        chosen[0].renewed_bytes if chosen else 0
    )  # one is there at a time
    if saved <= 0:
        return Recomputation()
    return Recomputation(
        modules=tuple(sorted(cost.module for cost in chosen)),
        saved_bytes=saved,
        added_us=sum(NORM_AND_ACTIVATION * cost.forward_us for cost in chosen),
    )


def alternatives(look: MemoryLook) -> list[MemoryAlternative]:
    """What one GPU would hold, and what a step would take, with modules recomputed. Of several GPUs: sharing.py."""
    peak = look.most_bytes
    found = [MemoryAlternative(name="as it is", nbytes=peak, step=(1.0, 1.0))]
    for share in (0.3, 0.5):
        plan = renewed(look, int(share * peak))
        name = f"outputs of {len(plan.modules)} norms again"
        if plan.modules and look.step_us and name not in {one.name for one in found}:
            found.append(_of(plan, name, look))
    for share in (0.15, 0.3, 0.5):
        plan = recompute(look, int(share * peak))
        if plan.modules and look.step_us:
            found.append(_of(plan, f"{len(plan.modules)} modules recomputed", look))
    return found


def _of(plan: Recomputation, name: str, look: MemoryLook) -> MemoryAlternative:
    return MemoryAlternative(
        name=name,
        nbytes=look.most_bytes - plan.saved_bytes,
        step=(1.0, 1 + plan.added_us / look.step_us),
        note="apply --goal memory",
    )


def largest_batch(look: MemoryLook, memory_bytes: int) -> int:
    """Samples a step that would fit, if activations and the batch grow with them and the rest stays; 0 where that is not known."""
    grows = look.of(ACTIVATION) + look.of("batch")
    fixed = look.most_bytes - grows
    if not (look.batch_size and grows > 0):
        return 0
    return max(0, int((0.95 * memory_bytes - fixed) / (grows / look.batch_size)))


def _saves(cost: ModuleCost) -> int:
    return max(1, cost.held_bytes - cost.input_bytes)


def _net(chosen: Sequence[ModuleCost]) -> int:
    """What all save, with the largest of them there again while its backward runs."""
    return sum(_saves(cost) for cost in chosen) - max(cost.held_bytes for cost in chosen)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
