"""Dropped instead of zeroed gradients: bit-equal training."""

from __future__ import annotations

import pytest
import torch
from loops import Loop, assert_equal, check_undo_is_exact, make_loop, twins, values
from torch import nn

from advisor.transforms import set_to_none
from advisor.transforms.set_to_none import SetToNone

FILE = __file__


@pytest.fixture(autouse=True)
def _the_script_reads_no_gradients(monkeypatch) -> None:
    monkeypatch.setattr(set_to_none, "grad_readers", lambda training: [])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_is_bit_equal(optimizer) -> None:
    loop, plain = twins(optimizer=optimizer, zero_to_none=False, steps=5)
    transform = SetToNone()
    assert transform.match(loop.training, {}).applies
    expected = plain.run(3)
    undo = transform.apply(loop.training, {})
    assert transform.effect(loop.training, None, None).passed is False
    assert loop.run(3) == expected
    assert_equal(values(loop), values(plain))
    assert transform.effect(loop.training, None, None).passed
    loop.optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    undo.run()
    assert all(parameter.grad is not None for parameter in loop.model.parameters())


def test_undo_is_exact() -> None:
    loop, plain = twins(zero_to_none=False, steps=5)
    check_undo_is_exact(SetToNone(), loop, plain)


class Alternating(nn.Module):
    """One of two branches a step: the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3 * 64, 5), nn.Linear(3 * 64, 5)])
        self.turn = 0

    def forward(self, x):
        self.turn ^= 1
        return self.branches[self.turn](x.flatten(1))


def test_parameters_without_a_gradient_still_decay() -> None:
    loop, plain = twins(model=Alternating, zero_to_none=False, steps=6)
    plain.run(3)
    SetToNone().apply(loop.training, {})
    loop.run(3)
    assert_equal(values(loop), values(plain))


def test_module_zero_grad_counts_too() -> None:
    loop = make_loop(zero_to_none=False, steps=5)
    SetToNone().apply(loop.training, {}).push(lambda: None)
    loop.model.zero_grad(set_to_none=False)
    assert next(loop.model.parameters()).grad is None


def test_it_refuses_scripts_that_drop_already() -> None:
    assert "not zeroed" in SetToNone().match(make_loop(steps=5).training, {}).reason


def test_it_refuses_scripts_that_read_gradients(monkeypatch) -> None:
    monkeypatch.undo()
    loop: Loop = make_loop(model=Reader, zero_to_none=False, steps=12)
    match = SetToNone().match(loop.training, {})
    assert not match.applies
    assert any(line.startswith(FILE) for line in match.unmatched)


def test_it_looks_for_readers_where_the_step_runs(monkeypatch, tmp_path) -> None:
    monkeypatch.undo()
    engine = tmp_path / "engine.py"
    engine.write_text("def train(step, p):\n    match = step()\n    print(p.grad)\n    return match\n")
    names: dict = {}
    exec(compile(engine.read_text(), str(engine), "exec"), names)
    loop = make_loop(zero_to_none=False, steps=5)
    match = names["train"](lambda: SetToNone().match(loop.training, {}), loop.model.head.weight)
    assert f"{engine}:3" in match.unmatched


@pytest.mark.parametrize("by_module", [False, True])
def test_another_optimizer_keeps_its_zeros(by_module: bool) -> None:
    """It goes on with weight decay and momentum where a parameter gets no gradient."""
    other, plain = twins(zero_to_none=False, steps=5)
    undo = SetToNone().apply(make_loop(zero_to_none=False, steps=5).training, {})
    other.model.head.requires_grad_(False)
    for _ in range(3):
        if by_module:
            other.model.zero_grad(set_to_none=False)
        other.run(1)
    undo.run()
    plain.model.head.requires_grad_(False)
    plain.run(3)
    assert_equal(values(other), values(plain))


class Reader(Alternating):
    def norm(self):
        return sum(parameter.grad.norm() for parameter in self.parameters())


def test_gradients_that_create_graph_makes_anew_are_zeroed_all_the_same() -> None:
    """Their versions stay low: what zero_grad was seen to leave tells, and then who reads them is the reason."""
    loop: Loop = make_loop(zero_to_none=True, steps=5)
    assert "not zeroed" in SetToNone().match(loop.training, {}).reason
    loop.training.zeroes_gradients = True
    assert SetToNone().match(loop.training, {}).applies


def test_a_reader_is_the_reason_where_create_graph_hides_the_zeros(monkeypatch) -> None:
    monkeypatch.undo()
    loop: Loop = make_loop(model=Reader, zero_to_none=True, steps=5)
    loop.training.zeroes_gradients = True
    match = SetToNone().match(loop.training, {})
    assert "reads .grad itself" in match.reason
