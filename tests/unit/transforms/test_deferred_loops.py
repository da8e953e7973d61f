"""Reads of a number in loops as published trainings have them: meters with windows, a check that ends the program, functions of one's own."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from loops import make_loop
from published import MetricLogger, SmoothedValue

from advisor.transforms import defer_sync, deferred
from advisor.transforms.defer_sync import DeferSync
from advisor.transforms.deferred import Deferred


class Slow:
    """A number that comes when it is waited for."""

    waits = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.number, self.here = tensor.tolist(), False

    def done(self) -> bool:
        return self.here

    def value(self) -> Any:
        Slow.waits += not self.here
        self.here = True
        return self.number


@pytest.fixture(autouse=True)
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "HostWrite", Slow)
    Slow.waits = 0


class Switch:
    """Called in each step, as the optimizer's hook would be; on from the third on."""

    def __init__(self, on: bool = True) -> None:
        self.loop, self.on = make_loop(steps=0), on
        self.plans: list[Any] = []
        self.undo: Any = None
        self.step = 0

    def __call__(self) -> None:
        self.step += 1
        if self.on and self.step == 3:
            self.plans = defer_sync.plans_for(sys._getframe(1))
            self.undo = DeferSync().apply(self.loop.training, {})
        self.loop.optimizer.step()

    def refused(self) -> str:
        return "; ".join(why for plan in self.plans for why in plan.refused.values())


def with_windows(switch: Switch, steps: int = 12, every: int = 4) -> list[str]:
    logger, told = MetricLogger(), []
    for i in range(steps):
        loss, hits = torch.tensor(0.3 * i), torch.tensor(float(i % 3))
        switch()
        loss_value = loss.item()
        logger.update(loss=loss_value, lr=0.1)
        logger.update(hits=hits)
        logger.meters["acc"].update(hits.item(), n=4)
        if i % every == every - 1:
            told.append(str(logger))
    told.append(str({name: [*meter.deque] for name, meter in logger.meters.items()}))
    return told


def test_meters_with_windows() -> None:
    expected = with_windows(Switch(on=False))
    switch = Switch()
    assert with_windows(switch) == expected
    count = defer_sync.counts["deferred"]
    assert count == 10 * 3
    assert not switch.refused()
    switch.undo.run()
    assert "__getattribute__" not in vars(SmoothedValue)


def test_what_is_in_a_window_stays_out_of_sight() -> None:
    switch = Switch()
    with_windows(switch, every=100)
    assert DeferSync().effect(switch.loop.training, None, None).passed
    meter = SmoothedValue()
    meter.deque.append(deferred.defer(torch.tensor(1.5)))
    assert all(type(value) is float for value in meter.deque)


def ends(switch: Switch, bad: int, steps: int = 8, every: int = 1) -> list[str]:
    told: list[str] = []
    total = 0.0
    for i in range(steps):
        loss = torch.tensor(math.nan if i == bad else 0.5 * i)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            told.append(f"at {i}")
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(7)
        told.append(f"backward {i}")
        total += loss_value
        if i % every == every - 1:
            switch()
            told.append(f"updated {i}")
    told.append(f"{total:.3f}")
    return told


@pytest.mark.parametrize("every", [1, 2])
def test_a_check_that_ends_the_program_is_made_before_the_update(
    every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    switch = Switch()
    assert ends(Switch(on=False), bad=-1, every=every) == ends(switch, bad=-1, every=every)
    assert Slow.waits <= 8
    plan = next(plan for plan in switch.plans if plan.code is ends.__code__)
    assert len(plan.guards) == 1
    assert not plan.refused
    switch.undo.run()
    assert Deferred.guards == {}


@pytest.mark.parametrize("bad", [1, 5])
def test_a_number_that_is_not_finite_ends_it_before_any_weight_changes(
    bad: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: steps.append(1))
    for on in (False, True):
        switch = Switch(on)
        with pytest.raises(SystemExit) as ended:
            ends(switch, bad)
        assert ended.value.code == 7
        assert capsys.readouterr().out == "Loss is nan, stopping training\n"
        steps.append(-1)
    at = steps.index(-1)
    assert steps[at + 1 : -1] == steps[:at]  # as many updates as in the plain run


def test_the_check_is_real_where_no_update_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is shown before the next update: then it is known, and so is what it decides."""

    def loop(switch: Switch) -> float:
        best = 0.0
        for i in range(6):
            value = torch.tensor(math.inf if i == 4 else 1.0).item()
            if math.isinf(value):
                raise FloatingPointError(f"loss {value}")
            best += value
            if i < 4:
                switch()
        return best * 1.0

    for on in (False, True):
        with pytest.raises(FloatingPointError, match="loss inf"):
            loop(Switch(on))


def caught(switch: Switch) -> int:
    skipped = 0
    for i in range(6):
        try:
            value = torch.tensor(math.nan if i == 4 else 1.0).item()
            if not math.isfinite(value):
                raise FloatingPointError
            switch()
        except FloatingPointError:
            skipped += 1
    return skipped


def test_a_check_whose_end_is_caught_is_left_alone() -> None:
    switch = Switch()
    assert caught(switch) == caught(Switch(on=False)) == 1
    assert not [plan for plan in switch.plans if plan.guards]  # it is waited for there


class Trainer:
    """Reads in methods of its own: of each gradient for a norm, and of what the step has returned."""

    def __init__(self, switch: Switch) -> None:
        self.switch, self.norms = switch, []
        self.weights = [torch.full((3,), float(i), requires_grad=True) for i in range(20)]

    def run(self, steps: int) -> list[float]:
        for i in range(steps):
            self.step(i)
        return self.norms

    def step(self, i: int) -> None:
        for weight in self.weights:
            weight.grad = weight.detach() * (i + 1)
        self.log_norm()
        self.switch()

    def log_norm(self) -> None:
        squares = 0.0
        for weight in self.weights:
            squares += (weight.grad**2).sum().item()
        self.norms.append(float(np.sqrt(squares)))


def test_a_norm_of_gradients_is_read_once() -> None:
    expected = Trainer(Switch(on=False)).run(6)
    waits = []
    trainer = Trainer(Switch())
    for i in range(6):
        before = deferred.waits()
        trainer.step(i)
        waits.append(deferred.waits() - before)
    assert trainer.norms == expected
    assert waits[3:] == [1, 1, 1]
    assert defer_sync.counts["deferred"] == 3 * 20


def copies(switch: Switch) -> int:
    right = 0
    for _ in range(4):
        switch()
        predicted = torch.tensor([1, 2]).cpu().numpy()
        right += int(predicted[0])
    return right


def test_a_copy_to_the_host_is_told_with_its_line() -> None:
    switch = Switch()
    copies(switch)
    plan = next(plan for plan in switch.plans if plan.code is copies.__code__)
    assert plan.refused == {
        copies.__code__.co_firstlineno
        + 4: "copies a tensor to the host, which waits; what is done with it there needs it"
    }


def kept(switch: Switch, steps: int = 8) -> list[Any]:
    losses, told = [], []
    for i in range(steps):
        switch()
        losses.append(torch.tensor(0.3 * i).item())
        if i % 4 == 3:
            told.append((float(np.mean(losses)), sum(losses) / len(losses), float(np.std(losses[-3:]))))
    return told


def given_on(switch: Switch, steps: int = 8) -> list[float]:
    losses = []
    for i in range(steps):
        switch()
        losses.append(torch.tensor(0.3 * i).item())
    return losses


def test_a_list_of_which_a_mean_is_made() -> None:
    switch, expected = Switch(), kept(Switch(on=False))
    assert kept(switch) == expected
    assert defer_sync.counts["deferred"] == 6
    assert DeferSync().effect(switch.loop.training, None, None).numbers["waited"] <= 6
    switch.undo.run()
    switch = Switch()
    assert given_on(switch) == given_on(Switch(on=False))
    assert "needed at once" in switch.refused()


def test_numbers_in_a_list_give_their_places_back() -> None:
    deferred.coming.clear()
    numbers = [deferred.defer(torch.tensor(float(i))) for i in range(50)]
    for number in numbers[:40]:
        number._write.here = True
    last = deferred.defer(torch.tensor(1.0))
    assert [number._write is None for number in numbers] == [True] * 40 + [False] * 10
    assert last is not None


class Stepper:
    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def train_step(self, i: int) -> float:
        loss = torch.tensor(0.3 * i)
        self.switch()
        return loss.item()

    def doubled(self, i: int) -> float:
        value = torch.tensor(0.3 * i).item()
        self.switch()
        return value


@pytest.mark.parametrize("name", ["train_step", "doubled"])
def test_what_a_step_returns_is_deferred_where_its_caller_adds_it_up(name: str) -> None:
    def loop(stepper: Stepper, steps: int = 10) -> list[float]:
        total, told = 0.0, []
        for i in range(steps):
            if name == "doubled":
                total += stepper.doubled(i) * 2
            else:
                total += stepper.train_step(i)
            if i % 5 == 4:
                told.append(total / 5)
        told.append(stepper.train_step(3))  # another caller, which keeps it
        return told

    switch, expected = Switch(), loop(Stepper(Switch(on=False)))
    found = loop(Stepper(switch))
    assert found == expected
    assert all(type(value) is float for value in found)
    assert defer_sync.counts["deferred"] >= 7
    assert defer_sync.counts["deferred"] <= 8


def test_what_a_step_returns_to_a_caller_that_keeps_it_is_read_at_once() -> None:
    def loop(stepper: Stepper) -> dict[str, float]:
        history = {}
        for i in range(6):
            history[str(i)] = stepper.train_step(i)
        return history

    switch = Switch()
    found = loop(Stepper(switch))
    assert all(type(value) is float for value in found.values())
    assert "needed at once, or leaves the function" in switch.refused()


def by_name(switch: Switch, steps: int = 9) -> list[Any]:
    totals, told = {"loss": 0.0, "hits": 0}, []
    for i in range(steps):
        switch()
        totals["loss"] += torch.tensor(0.3 * i).item() * 2
        hits = torch.tensor(i).item()
        totals["hits"] += hits
        if i % 4 == 3:
            told.append(f"{totals['loss'] / 4:.4f} {totals['hits']}")
            totals["loss"] = 0.0
    told.append(totals["loss"] / 4)
    return told


def given_away(switch: Switch, steps: int = 5) -> dict[str, float]:
    totals = {"loss": 0.0}
    for i in range(steps):
        switch()
        totals["loss"] += torch.tensor(0.3 * i).item()
    return totals


def test_sums_in_a_dictionary() -> None:
    switch, expected = Switch(), by_name(Switch(on=False))
    assert by_name(switch) == expected
    assert defer_sync.counts["deferred"] == 14
    assert (
        DeferSync().effect(switch.loop.training, None, None).numbers["waited"] == 5
    )  # two are shown twice, one at the end
    switch.undo.run()
    switch, plain = Switch(), given_away(Switch(on=False))
    found = given_away(switch)
    assert found == plain
    assert type(found["loss"]) is float
