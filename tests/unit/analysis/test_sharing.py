"""What each of several GPUs would hold, and what its step would take."""

from __future__ import annotations

import pytest

from advisor.analysis import sharing
from advisor.analysis.scaling import Link
from advisor.core.held import HeldRow, MemoryLook, ModuleCost

LINK = Link(name="x", latency_us=1.0, gbps=1e-3, basis="")  # a byte a microsecond
P = G = 400


def cost(name: str, us: float, weight: int, held: int = 100, submodules: int = 0) -> ModuleCost:
    return ModuleCost(
        module=name, forward_us=us, held_bytes=held, input_bytes=0, submodules=submodules, weight_bytes=weight
    )


NET = (
    cost("Net", 100, 400, 400, 5),
    cost("Net.a", 10, 100),
    cost("Net.b", 20, 100),
    cost("Net.c", 60, 100, 100, 2),
    cost("Net.c.0", 30, 50),
    cost("Net.c.1", 30, 50),
    cost("Net.d", 10, 100),
)


def look(modules: tuple[ModuleCost, ...] = NET, peak_bytes: int = 0) -> MemoryLook:
    rows = (
        HeldRow(kind="activation", nbytes=400),
        HeldRow(kind="parameter", nbytes=P),
        HeldRow(kind="gradient", nbytes=G),
        HeldRow(kind="optimizer", nbytes=800),
    )
    return MemoryLook(rows=rows, modules=modules, step_us=3000.0, batch_size=4, peak_bytes=peak_bytes)


def test_who_holds_what_and_sends_what() -> None:
    found = {one.name: one for one in sharing.ways(look(), 2, LINK)}
    assert found["DDP on 2"].nbytes == 2000
    assert found["ZeRO-1 on 2"].nbytes == 2000 - 400
    assert found["FSDP2 on 2"].nbytes == 2000 - (P + G + 800) // 2 + 3 * 100
    summed = 2 * 1.0 + G  # of which the backward, two thirds of 3000 us, hides all
    assert found["DDP on 2"].step == (1.0, pytest.approx(1 + summed / 3000))
    assert found["ZeRO-1 on 2"].step == (pytest.approx(1 + 201 / 3000), pytest.approx(1 + (201 + summed) / 3000))
    assert found["FSDP2 on 2"].step[1] == pytest.approx(1 + (2 * 201 + summed / 2) / 3000)
    assert "FSDP2 on 1 × 2" not in found
    assert {one.name: one for one in sharing.ways(look(peak_bytes=2000), 2, LINK)}["DDP on 2"].nbytes == 2400
    assert "FSDP2 on 2 × 2" in {one.name for one in sharing.ways(look(), 4, LINK)}
    assert sharing.ways(look(), 1, LINK) == []


def test_stages_are_as_even_as_their_modules_allow() -> None:
    stages = sharing.split(NET, 2)
    assert stages is not None
    assert [[unit.module for unit in stage] for stage in stages] == [
        ["Net.a", "Net.b", "Net.c.0"],
        ["Net.c.1", "Net.d"],
    ]
    (pipeline,) = [one for one in sharing.ways(look(), 2, LINK) if one.name.startswith("pipeline")]
    assert pipeline.step == (1.2, pytest.approx(1.2 + 1 / 4))
    assert "cut before 1" in pipeline.note
    assert sharing.split(NET[:1], 2) is None


def test_samples_are_cut_only_where_there_are_too_few_for_each_gpu() -> None:
    def spatial(ranks: int) -> list[object]:
        return [row for row in sharing.ways(look(), ranks, LINK) if row.name.startswith("spatial")]

    assert spatial(4) == []
    (row,) = spatial(8)
    assert row.nbytes == P + G + 800 + 400 // 8
    assert row.step == (1 / 8, 1.0)
    assert "not applied" in row.note
