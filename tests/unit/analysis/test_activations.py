"""Which modules to recompute, and what else would change a step's memory."""

from __future__ import annotations

from advisor.analysis import activations
from advisor.core.held import HeldRow, MemoryLook, ModuleCost
from advisor.reporting import held


def cost(name: str, us: float, nbytes: int, inputs: int = 0, submodules: int = 2) -> ModuleCost:
    return ModuleCost(module=name, forward_us=us, held_bytes=nbytes, input_bytes=inputs, submodules=submodules)


def look(*modules: ModuleCost, **facts: object) -> MemoryLook:
    rows = (
        HeldRow(kind="activation", module="Net.a", source="net.py:3", nbytes=1000, count=10),
        HeldRow(kind="parameter", nbytes=100),
        HeldRow(kind="gradient", nbytes=100),
        HeldRow(kind="optimizer", nbytes=200),
    )
    return MemoryLook(rows=rows, modules=modules, step_us=1000.0, batch_size=10, **facts)


BLOCKS = (cost("Net.a", 50, 200), cost("Net.b", 10, 200), cost("Net.c", 10, 200, inputs=150), cost("Net.d", 30, 200))


def test_the_cheapest_bytes_come_first_and_no_more_than_asked_for() -> None:
    found = activations.recompute(look(*BLOCKS), 100)
    assert found.modules == ("Net.b", "Net.d")  # one of them is there again while its backward runs
    assert (found.saved_bytes, found.added_us) == (200, 40)
    assert activations.recompute(look(*BLOCKS), 10**6).modules == ("Net.a", "Net.b", "Net.c", "Net.d")


def test_a_module_in_another_is_not_computed_again_twice() -> None:
    found = activations.recompute(look(cost("Net.a", 10, 250), cost("Net.a.x", 1, 100), cost("Net.b", 20, 200)), 10**6)
    assert found.modules == ("Net.a.x", "Net.b")


def test_single_layers_the_whole_and_what_is_small_are_left_alone() -> None:
    found = look(cost("Net", 90, 1000), cost("Net.relu", 1, 200, submodules=0), cost("Net.small", 1, 1))
    assert activations.recompute(found, 500) == activations.Recomputation()


def test_what_others_would_hold_and_how_large_a_batch_fits() -> None:
    found = {one.name: one.nbytes for one in activations.alternatives(look(*BLOCKS))}
    assert found["as it is"] == 1400
    assert activations.largest_batch(look(), 2800) == int((0.95 * 2800 - 400) / 100)
    assert activations.largest_batch(MemoryLook(), 2800) == 0
    page = held.text(look(*BLOCKS), activations.alternatives(look(*BLOCKS)), batch=22, memory_bytes=1300)
    assert "net.py:3" in page
    assert "does not fit" in page
    assert "about 22 samples" in page


def test_norms_are_made_again_from_the_largest_on_and_one_is_there_at_a_time() -> None:
    norms = [
        ModuleCost(
            module=f"Net.n{size}", forward_us=10, held_bytes=0, input_bytes=size, submodules=0, renewed_bytes=size
        )
        for size in (50, 200, 100)
    ]
    found = activations.renewed(look(*norms), 90)
    assert (found.modules, found.saved_bytes) == (("Net.n100", "Net.n200"), 100)
    assert activations.renewed(look(*norms), 10**6).saved_bytes == 150
    assert activations.renewed(look(*BLOCKS), 90) == activations.Recomputation()
