"""Scripts that train nothing, and trainings that must not be taken for one; each loop is real, small, in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from advisor.loop import interval, modelcalls, steps, stop
from advisor.loop.attach import Attached, attach_training
from advisor.loop.session import Session
from advisor.loop.steps import StepWatcher

PLAIN = nn.Module.__call__
Attach = Callable[..., StepWatcher]


@pytest.fixture
def attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    gc.collect()  # optimizers of earlier tests are waited for as long as they live
    monkeypatch.setattr(steps, "living_optimizers", list)
    made: list[StepWatcher] = []

    def begin(**options: object) -> StepWatcher:
        session = Session(mode="profile", run_dir=str(tmp_path), script="x", **options)
        made.append(attach_training(session)[1])
        return made[-1]

    yield begin
    for watcher in made:
        watcher.detach()
        watcher.training.roots.clear()
    Attached.training = Attached.watcher = Attached.discovery = None
    stop.forget()
    assert nn.Module.__call__ is PLAIN


def infer(model: nn.Module, count: int, batch: int = 4) -> None:
    with torch.no_grad():
        for _ in range(count):
            model(torch.randn(batch, 3))


def test_each_call_of_the_model_is_a_step_once_training_is_ruled_out(attach: Attach) -> None:
    watcher = attach()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    infer(model, modelcalls.FORWARD_PATIENCE - 1)
    assert (watcher.kind, watcher.seen, watcher.forward_steps) == ("none", 0, modelcalls.FORWARD_PATIENCE - 1)
    infer(model, 11)
    assert (watcher.kind, watcher.seen) == (steps.FORWARD, 11)
    assert [root.name for root in watcher.training.roots] == ["Sequential"]
    assert watcher.training.batch_size == 4
    assert watcher.patches.fault is None
    assert nn.Module.__call__ is PLAIN  # from now on only the models themselves are observed
    assert not watcher.interval.marks


def test_a_script_known_to_infer_is_not_waited_for(attach: Attach) -> None:
    watcher = attach(infers=True)
    infer(nn.Linear(3, 2), 6)
    assert (watcher.kind, watcher.seen) == (steps.FORWARD, 5)


def test_slow_calls_are_not_waited_for_either(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelcalls, "FORWARD_PATIENCE_S", -1.0)
    watcher = attach()
    infer(nn.Linear(3, 2), modelcalls.FORWARD_LEAST + 2)
    assert (watcher.kind, watcher.seen) == (steps.FORWARD, 3)


def test_several_models_make_one_step(attach: Attach) -> None:
    watcher = attach(infers=True)
    encoder, decoder = nn.Linear(3, 2), nn.Linear(2, 3)
    with torch.inference_mode():
        for _ in range(8):
            decoder(encoder(torch.randn(4, 3)))
    # Taken for steps of one call each only until the second model is seen for the first time.
    assert watcher.pattern_length == 2
    assert watcher.seen == 7
    assert watcher.training.batch_size == 4


def test_a_smaller_last_batch_is_left_out(attach: Attach) -> None:
    watcher = attach(infers=True)
    events = []
    watcher.training.on_step.append(events.append)
    model = nn.Linear(3, 2)
    for _ in range(2):
        infer(model, 9)
        infer(model, 1, batch=2)
    assert [event.reason for event in events[1:] if event.reason in (interval.SHAPES, interval.EVALUATION)] == [
        interval.SHAPES
    ] * 2


def test_an_optimizer_that_is_made_first_leaves_everything_unobserved(attach: Attach) -> None:
    watcher = attach()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    infer(model.eval(), modelcalls.FORWARD_PATIENCE + 4)  # an evaluation before the training
    assert (watcher.kind, watcher.forward_steps) == ("none", 0)
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert (watcher.kind, watcher.seen) == ("optimizer", 3)


def test_an_evaluation_before_the_optimizer_is_made_counts_for_nothing(attach: Attach) -> None:
    watcher = attach()
    model = nn.Linear(3, 2)
    infer(model.eval(), 20)
    assert watcher.forward_steps == 20
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert (watcher.kind, watcher.seen, watcher.forward_steps) == ("optimizer", 4, 0)
    assert [root.name for root in watcher.training.roots] == ["Linear"]


def test_training_that_begins_late_takes_over(attach: Attach) -> None:
    watcher = attach(infers=True)
    model = nn.Linear(3, 2)
    infer(model.eval(), 6)
    assert watcher.kind == steps.FORWARD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert (watcher.kind, watcher.seen) == (
        "optimizer",
        5 + 1 + 4,
    )  # its first call is not yet known to be of a training


def test_what_torch_does_without_gradients_is_no_hint(attach: Attach) -> None:
    attach()
    for _ in range(3):
        nn.Linear(3, 2)  # its initial values are drawn without gradients
    assert nn.Module.__call__ is PLAIN
    with torch.no_grad():
        assert nn.Module.__call__ is not PLAIN


def test_compiled_models_are_seen_and_traced_without_our_hooks(attach: Attach) -> None:
    watcher = attach(infers=True)
    inside = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    infer(torch.compile(inside, backend="eager", fullgraph=True).eval(), 6)
    assert (watcher.kind, watcher.patches.fault) == (steps.FORWARD, None)
    assert watcher.seen == 5
    from torch._dynamo.utils import counters

    assert counters["stats"]["unique_graphs"] == 1


def test_a_fault_of_ours_takes_the_hooks_back_and_the_call_goes_through(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = attach(infers=True)
    monkeypatch.setattr(StepWatcher, "model_called", lambda self, *args: 1 / 0)
    with torch.no_grad():
        assert nn.Linear(3, 2)(torch.zeros(1, 3)).shape == (1, 2)
    assert isinstance(watcher.patches.fault, ZeroDivisionError)
    assert nn.Module.__call__ is PLAIN
    assert "switched off" in capsys.readouterr().err
