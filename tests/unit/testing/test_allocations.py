"""Memory of a step to the byte, by source line."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from advisor.loop.training import Training
from advisor.testing import allocations
from advisor.testing.live import LiveStep

MIB = 2**20


def watch(step: Callable[[], object]) -> allocations.Allocations:
    step()
    found = allocations.watch(LiveStep(call=step, training=Training(device=torch.device("cpu"))))
    assert found is not None
    return found


def test_what_a_step_leaves_behind_is_counted_to_the_byte() -> None:
    kept: list[torch.Tensor] = []
    found = watch(lambda: kept.append(torch.empty(MIB, dtype=torch.int8)))
    assert found.growth_bytes == MIB
    (line,) = found.growing
    assert line.bytes == MIB
    assert "test_allocations.py:" in line.source


def test_the_peak_is_what_is_alive_at_once() -> None:
    def step() -> None:
        first = torch.empty(3 * MIB, dtype=torch.int8)
        second = torch.empty(2 * MIB, dtype=torch.int8)
        del first
        third = torch.empty(MIB, dtype=torch.int8)
        del second, third

    found = watch(step)
    assert found.peak_bytes == 5 * MIB
    assert [held.bytes for held in found.peak] == [3 * MIB, 2 * MIB]
    assert found.growth_bytes == 0
    assert found.growing == ()
    assert found.allocations == 3


def test_what_the_next_step_replaces_is_no_growth() -> None:
    held: list[torch.Tensor] = [torch.empty(0)]

    def step() -> None:
        held[0] = torch.empty(MIB, dtype=torch.int8)

    found = watch(step)
    assert found.growth_bytes == 0
    assert found.growing == ()


def test_garbage_in_cycles_is_no_growth() -> None:
    def step() -> None:
        cycle: list[object] = [torch.empty(MIB, dtype=torch.int8)]
        cycle.append(cycle)

    enabled = gc.isenabled()
    gc.disable()  # so that nothing collects it by chance
    try:
        assert watch(step).growth_bytes == 0
    finally:
        gc.enable() if enabled else gc.disable()
        gc.collect()


def test_state_from_before_counts_once() -> None:
    model = torch.nn.Linear(256, 1024, bias=False)  # 1 MiB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(1, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    step()
    from advisor.loop.training import RootModule

    training = Training(device=torch.device("cpu"), roots=[RootModule(model, "Linear")], optimizers=[optimizer])
    found = allocations.watch(LiveStep(call=step, training=training))
    assert found is not None
    # Weights and momentum from before, the gradient of the step.
    assert found.peak_bytes == pytest.approx(3 * MIB, rel=0.02)


def test_blocks_from_before_the_window_are_passed_over_when_they_are_freed() -> None:
    def event(pointer: int, nbytes: int) -> allocations.BlockEvent:
        return allocations.BlockEvent(0, pointer, nbytes, "", "")

    stale, new, freed, reused = event(1, -500), event(2, 100), event(2, -100), event(1, 50)
    assert allocations.own_blocks([stale, new, freed, reused, stale, stale]) == [new, freed, reused, stale]


def test_a_block_handed_out_again_was_freed_though_nobody_recorded_it() -> None:
    """torch 2.11 on a GPU does not record what Python frees between operators; the allocator knows the level."""
    blocks = [allocations.BlockEvent(10 * step + 5, 7, MIB, "train.py:3", "aten::relu") for step in range(5)]
    marks = [10 * step for step in range(6)]
    found = allocations.account(blocks, marks, before=MIB)
    assert (found.peak_bytes, found.growth_bytes, found.growing) == (2 * MIB, 0, ())
    level = allocations.MemoryLevel(first=3 * MIB, end=3 * MIB, peak=5 * MIB)
    found = allocations.account(blocks, marks, MIB, level)
    assert (found.peak_bytes, found.growth_bytes, found.growing) == (5 * MIB, 0, ())
    leak = [allocations.BlockEvent(10 * step + 5, 7 + step, MIB, "train.py:3", "aten::relu") for step in range(5)]
    found = allocations.account(leak, marks, MIB, allocations.MemoryLevel(first=0, end=4 * MIB, peak=5 * MIB))
    assert found.growth_bytes == MIB
    assert [held.bytes for held in found.growing] == [MIB]


def test_a_profiler_of_the_steps_own_is_left_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        live = LiveStep(call=lambda: torch.ones(3), training=Training(device=torch.device("cpu")))
        assert allocations.watch(live) is None
