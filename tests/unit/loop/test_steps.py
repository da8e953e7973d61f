"""Steps found in loops as people write them; each loop is real, small and in this process."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.hooks import RemovableHandle

from advisor.loop import hooks, interval, steps, stop
from advisor.loop.attach import Attached, attach_training
from advisor.loop.period import smallest_period
from advisor.loop.session import Session
from advisor.loop.steps import StepWatcher
from advisor.loop.training import StepEvent, Training


class Loop:
    """What hooks have seen of a loop run in a test."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.training: Training
        self.watcher: StepWatcher
        self.training, self.watcher = attach_training(Session(mode="search", run_dir=str(folder), script="x"))
        self.events: list[StepEvent] = []
        self.training.on_step.append(self.events.append)

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events]


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    gc.collect()  # optimizers of earlier tests are waited for as long as they live
    loop = Loop(tmp_path)
    yield loop
    loop.watcher.detach()
    # Dynamo keeps functions it has once looked up, our wrappers among them.
    loop.training.optimizers.clear()
    loop.training.roots.clear()
    Attached.training = Attached.watcher = Attached.discovery = None
    stop.forget()


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.01)


def train(steps: int | Iterator[int]) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for _ in range(steps) if isinstance(steps, int) else steps:
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_threads(*trainings: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=train, args=(steps,)) for steps in trainings]
    for thread in threads:
        thread.start()
    return threads


@pytest.fixture
def where(loop: Loop) -> list[int]:
    """The thread of each boundary."""
    idents: list[int] = []
    loop.training.on_step.append(lambda _: idents.append(threading.get_ident()))
    return idents


def test_steps_are_those_of_one_of_several_threads(loop: Loop, where: list[int]) -> None:
    """A profiler that one thread has started is not another's to stop."""
    known, over = threading.Event(), threading.Event()

    def while_others_train() -> Iterator[int]:
        for number in itertools.count():
            if number == 20:
                known.set()
            if number > 20 and over.is_set():
                return
            yield number

    first = threading.Thread(target=train, args=(while_others_train(),))
    first.start()
    known.wait()
    for thread in in_threads(100, 100):
        thread.join()
    over.set()
    first.join()
    assert set(where) == {first.ident}
    assert loop.watcher.patches.fault is None
    assert loop.watcher.usual.backwards == 1
    assert len(loop.training.optimizers) == 1


def test_the_next_thread_is_watched_once_the_first_has_ended(where: list[int]) -> None:
    for _ in range(2):
        (thread,) = in_threads(20)
        thread.join()
    assert len(where) >= 39  # another optimizer: a step may go by before that is seen to be one


def test_a_thread_that_has_trained_nothing_in_earnest_gives_way(where: list[int]) -> None:
    nn.Linear(3, 2)(torch.randn(4, 3)).sum().backward()
    (thread,) = in_threads(40)
    thread.join()
    assert set(where) == {thread.ident}
    assert len(where) > 20


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # SystemExit ends a thread in silence, but for pytest
def test_a_stop_ends_all_threads_that_train(loop: Loop, tmp_path: Path) -> None:
    session = Session(mode="search", run_dir=str(tmp_path), script="x")
    loop.training.on_step.append(lambda step: stop.stop(session, "done") if step.index == 10 else None)
    other = threading.Thread(target=train, args=(10**7,), daemon=True)

    def first() -> None:
        try:
            train(10**7)
        finally:
            other.join()  # alive until the other has ended

    threads = [threading.Thread(target=first, daemon=True), other]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # for ever, where one goes on


def test_one_optimizer_each_call_is_a_step(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    losses = []
    for _ in range(6):
        loss = model(torch.randn(4, 3)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [event.index for event in loop.events] == list(range(6))
    assert loop.reasons[0] == interval.FIRST
    assert [event.loss.item() for event in loop.events if event.loss is not None] == losses
    assert loop.watcher.kind == "optimizer"
    assert loop.watcher.usual.backwards == 1
    assert loop.training.optimizers == [optimizer]


def test_at_a_boundary_the_optimizers_range_is_closed(loop: Loop, monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(hooks.updates, "optimizer_begins", lambda optimizer: told.append(type(optimizer).__name__))
    monkeypatch.setattr(hooks.updates, "optimizer_ends", lambda: told.append("ended"))
    loop.training.on_step.append(lambda event: told.append("boundary"))
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert told == ["SGD", "ended", "boundary"] * 2


def test_accumulation_counts_backwards_not_steps(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for number in range(20):
        model(torch.randn(4, 3)).sum().backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    assert len(loop.events) == 5
    assert loop.watcher.usual.backwards == 4
    assert loop.training.batch_size == 16


class _Inside(torch.autograd.Function):
    """A backward with one inside of it, as a replayed graph gives its gradients to the parameters, and a checkpoint runs its layers again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.autograd.backward([ctx.weight], [torch.ones_like(ctx.weight)])
        return gradients[0], None


def test_a_backward_inside_of_another_is_none_of_the_scripts(loop: Loop) -> None:
    """Of a graph that is new some steps have one, and no block of its trial had clean steps (ResNets on an H200)."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(24):
        optimizer.zero_grad()
        y = net(torch.randn(2, 4))
        y = _Inside.apply(y, net.weight) if 8 <= step < 16 else y
        y.square().mean().backward()
        optimizer.step()
    assert loop.reasons[4:] == [""] * (len(loop.reasons) - 4)


def test_a_round_with_another_number_of_backwards_is_not_clean(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for number in range(8):
        for _ in range(1 if number == 6 else 2):
            model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert loop.reasons[6] in (interval.BACKWARDS, interval.SHAPES)
    assert not loop.events[6].clean
    assert loop.events[7].reason in ("", interval.OWN)


@pytest.mark.parametrize("critics", [1, 2, 5])
def test_a_gan_steps_once_a_round(loop: Loop, critics: int) -> None:
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    for_generator, for_critic = sgd(generator), sgd(critic)
    ends = []
    for _ in range(5):
        for _ in range(critics):
            for_critic.zero_grad()
            critic(torch.randn(4, 3)).sum().backward()
            critic(generator(torch.randn(4, 2)).detach()).sum().backward()
            for_critic.step()
        for_generator.zero_grad()
        critic(generator(torch.randn(4, 2))).sum().backward()
        before = len(loop.events)
        for_generator.step()
        ends.append(len(loop.events) - before)
    # Two rounds show the period; from then on each round ends with the generator's update and nowhere else.
    assert ends == [0, 1, 1, 1, 1]
    assert len(loop.events) == 4
    assert loop.watcher.pattern_length == critics + 1
    assert loop.watcher.usual.backwards == 2 * critics + 1
    assert loop.training.fixed_shapes
    assert loop.training.batch_size == 4
    assert {root.name for root in loop.training.roots} == {"Linear", "Linear#2"}


def test_what_steps_are_like_is_learnt_anew_where_another_pattern_is_found(loop: Loop) -> None:
    """A WGAN whose short epochs end in the middle of a round: no period lasts, and each update of the critic becomes a step. Most of
    these have one backward pass; those with six are the past.
    """
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    for_generator, for_critic = sgd(generator), sgd(critic)
    for batch in [number for _ in range(6) for number in range(58)]:
        for_critic.zero_grad()
        critic(torch.randn(4, 3)).sum().backward()
        for_critic.step()
        if batch % 5 == 0:
            for_generator.zero_grad()
            critic(generator(torch.randn(4, 2))).sum().backward()
            for_generator.step()
    assert loop.watcher.pattern_length == 1
    assert loop.watcher.usual.backwards == 1
    reasons = [event.reason for event in loop.events]
    since = reasons[len(reasons) - reasons[::-1].index(interval.PATTERN) :]
    assert len(since) > 20
    assert 4 * since.count(interval.BACKWARDS) <= len(since)  # one in five: the critic's update behind the generator's


def test_regularisation_in_some_rounds_does_not_keep_steps_from_being_found(loop: Loop) -> None:
    """StyleGAN2: a further update of G in every fourth round and of D in every sixteenth; the period has 37 calls."""
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 2)
    for_generator, for_critic = sgd(generator), sgd(critic)
    for number in range(64):
        for model, optimizer, every in ((generator, for_generator, 4), (critic, for_critic, 16)):
            for _ in range(2 if number % every == 0 else 1):
                optimizer.zero_grad()
                model(torch.randn(4, 2)).sum().backward()
                optimizer.step()
    assert loop.reasons.count(interval.PATTERN) <= steps.BROKEN + 1
    assert interval.PATTERN not in loop.reasons[-40:]
    assert sum(event.clean or event.reason == interval.OWN for event in loop.events[-40:]) >= 20
    assert loop.watcher.usual.backwards == 2
    assert set(loop.training.optimizers) == {for_generator, for_critic}


@pytest.mark.parametrize("every", [15, 20, 30])
def test_an_optimizer_stepped_now_and_then_does_not_end_the_finding_of_steps(loop: Loop, every: int) -> None:
    model, centres = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, seldom = sgd(model), sgd(centres)

    def train(count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
            if number % every == every - 1:
                seldom.zero_grad()
                centres(torch.randn(4, 2)).sum().backward()
                seldom.step()

    train(steps.BROKEN * 2 * every)
    before = len(loop.events)
    train(2 * every)
    assert len(loop.events) - before >= 2 * every - 2
    assert interval.PATTERN not in loop.reasons[before:]
    # The next model is followed all the same.
    model = nn.Linear(2, 2)
    optimizer, before = sgd(model), len(loop.events)
    train(every - 1)
    for _ in range(steps.UNSETTLED + 16):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    assert len(loop.events) - before >= 8
    assert optimizer in loop.training.optimizers


def test_an_optimizer_for_each_parameter_stepped_in_backward(loop: Loop) -> None:
    """PyTorch's tutorial on fusing the update into backward, to save the gradients' memory."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(30)))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    inside: list[bool] = []
    loop.training.on_step.append(lambda event: inside.append(loop.watcher.in_backward))
    hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    for _ in range(12):
        model(torch.randn(4, 2)).sum().backward()
    for hook in hooks:
        hook.remove()  # Python does not collect what a tensor's hooks hold
    assert len(loop.events) == 11  # one round shows which optimizer comes again
    assert {event.reason for event in loop.events[2:]} <= {"", interval.OWN}
    assert inside == [False] * 11
    assert [root.module for root in loop.training.roots] == [model]
    assert len(loop.training.optimizers) == 60


def test_a_second_optimizer_that_appears_later_changes_the_pattern(loop: Loop) -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = sgd(first)
    for _ in range(4):
        first(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    other = sgd(second)
    for _ in range(6):
        first(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        second(torch.randn(4, 2)).sum().backward()
        other.step()
    assert loop.watcher.pattern_length == 2
    changed = [event for event in loop.events if event.reason == interval.PATTERN]
    assert len(changed) == 1
    assert len(loop.training.optimizers) == 2


def test_an_optimizer_that_is_never_stepped_does_not_hide_the_steps(loop: Loop) -> None:
    model, idle = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, unused = sgd(model), sgd(idle)
    for _ in range(20):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    assert len(loop.events) >= 7
    assert loop.watcher.pattern_length == 1
    assert unused not in loop.training.optimizers


def test_optimizers_of_an_earlier_model_are_let_go(loop: Loop) -> None:
    for _ in range(2):
        model = nn.Linear(2, 2)
        optimizer = sgd(model)
        for _ in range(16):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
    assert loop.training.optimizers == [optimizer]
    assert [root.module for root in loop.training.roots] == [model]


def test_evaluation_and_new_epochs_are_left_out(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    data = TensorDataset(torch.randn(40, 3))
    train, test = DataLoader(data, batch_size=8), DataLoader(data, batch_size=20)
    for _ in range(3):
        model.train()
        for (x,) in train:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for (x,) in test:
                model(x)
    unclean = {event.index: event.reason for event in loop.events if not event.clean and event.reason != interval.OWN}
    assert set(unclean) == {0, 5, 10}
    assert unclean[5] in (interval.EVALUATION, interval.EPOCH)
    assert loop.training.loaders == [train]
    assert loop.training.batch_size == 8
    assert loop.training.fixed_shapes


def test_the_smaller_last_batch_is_left_out_and_shapes_stay_fixed(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for _ in range(3):
        for x in torch.randn(44, 3).split(8):
            model(x).sum().backward()
            optimizer.step()
    shapes = [event.index for event in loop.events if event.reason == interval.SHAPES]
    assert shapes == [5, 11, 17]
    assert loop.training.fixed_shapes
    assert loop.training.batch_size == 8


def test_shapes_that_always_vary_are_no_reason(loop: Loop) -> None:
    model = nn.Conv2d(1, 1, 3)
    optimizer = sgd(model)
    for number in range(24):
        model(torch.randn(2, 1, 8 + number % 6, 8)).sum().backward()
        optimizer.step()
    assert not loop.training.fixed_shapes
    late = loop.events[12:]
    assert not any(event.reason == interval.SHAPES for event in late)


@pytest.mark.parametrize(("every", "fixed"), [(0, True), (40, True), (5, False)])
def test_an_odd_step_leaves_shapes_fixed(loop: Loop, every: int, fixed: bool) -> None:
    """A GAN's first step, which sizes a net by its data with forwards more; a look at a larger image now and then. Not each fifth one."""
    model = nn.Conv2d(1, 1, 3)
    optimizer = sgd(model)
    for number in range(90):
        odd = number == 0 if every == 0 else number % every == every - 1
        for size in (16, 16) if odd else (8, 8, 12):
            model(torch.randn(2, 1, size, 8)).sum().backward()
        optimizer.step()
    assert loop.training.fixed_shapes is fixed


def test_a_new_iterator_each_step_is_part_of_the_step(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    loader = DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=8)
    for _ in range(12):
        (x,) = next(iter(loader))
        model(x).sum().backward()
        optimizer.step()
    assert not any(event.reason == interval.EPOCH for event in loop.events[interval.MIN_INTERVALS :])


def test_a_skipped_update_ends_the_step(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(8):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().sum()
        scaler.scale(loss * (float("inf") if number == 5 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if number == 3:
            assert loop.events[3].loss is not None
            assert loop.events[3].loss.item() == loss.item()  # the loss, not the scaled one
    assert len(loop.events) == 8
    assert loop.reasons[5] == interval.SKIPPED
    assert loop.training.scalers == [scaler]


def test_a_disabled_scaler_counts_each_step_once(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(5):
        scaler.scale(model(torch.randn(4, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(loop.events) == 5


def test_a_closure_may_run_backward_as_often_as_it_likes(loop: Loop) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    x, y = torch.randn(16, 3), torch.randn(16, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)
    assert len(loop.events) == 8
    assert not {interval.BACKWARDS, interval.SHAPES} & set(loop.reasons)
    assert loop.training.batch_size == 16


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an Optimizer by its class alone, which torch's hooks do not reach."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        self.inside = inside

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.inside.param_groups

    def step(self, closure: object = None) -> None:
        self.inside.step()


def test_a_wrapped_optimizers_first_step_is_one(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = Wrapper(sgd(model))
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert len(loop.events) == 3


def test_a_closure_that_runs_once_is_a_step_like_any_other(loop: Loop) -> None:
    """As Lightning does: the whole step runs inside `Optimizer.step`, and the batches before it outside."""
    model = nn.Linear(3, 1)
    optimizer = sgd(model)

    def step_of(rows: int, last: bool) -> None:
        def closure() -> torch.Tensor:
            loss = model(torch.randn(rows, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        if last:
            optimizer.step(closure=closure)
        else:
            closure()

    for _ in range(10):
        for batch in range(3):
            step_of(8, last=batch == 2)
    step_of(5, last=True)
    assert len(loop.events) == 11
    assert not loop.watcher.usual.closure_steps
    assert loop.watcher.usual.backwards == 3
    assert loop.reasons[-1] == interval.BACKWARDS
    assert loop.training.batch_size == 24


def test_the_scripts_own_marker_overrides(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for _ in range(6):
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        loop.watcher.mark()
    assert loop.watcher.kind == "marker"
    marked = loop.events[2:]  # the first round's two updates came before the first mark
    assert len(marked) == 6
    assert loop.watcher.usual.backwards == 2


def test_without_an_optimizer_the_period_of_backward_passes_serves(loop: Loop) -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    for _ in range(10):
        (torch.randn(4, 3) @ weight).square().sum().backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight -= 0.01 * weight.grad
            weight.grad = None
    assert loop.watcher.kind == "period"
    assert len(loop.events) >= 7
    assert loop.watcher.pattern_length == 1


def test_backward_passes_are_not_taken_for_steps_while_an_optimizer_exists(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    for _ in range(2):
        for _ in range(40):
            model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert loop.watcher.kind == "optimizer"
    assert len(loop.events) == 2


def test_a_gradient_penalty_is_no_backward_pass_of_its_own(loop: Loop) -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    for _ in range(5):
        x = torch.randn(4, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
        optimizer.step()
    assert loop.watcher.usual.backwards == 1


def test_a_failing_listener_switches_advisor_off_and_the_loop_goes_on(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)

    def listener(event: StepEvent) -> None:
        if event.index == 2:
            raise ZeroDivisionError("planted")

    loop.training.on_step.append(listener)
    call, backward = nn.Module.__call__, torch.autograd.backward
    for _ in range(6):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert len(loop.events) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "ZeroDivisionError: planted" in lines[0]
    assert torch.autograd.backward is not backward
    assert "advisor" not in torch.autograd.backward.__code__.co_filename
    assert "advisor" not in nn.Module.__call__.__code__.co_filename
    del call


def test_a_stop_passes_through_the_users_optimizer_call(loop: Loop, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    session = Session(mode="profile", run_dir=str(tmp_path), script="x")
    loop.training.on_step.append(lambda event: stop.stop(session, "measured") if event.index == 1 else None)

    def train() -> None:
        for _ in range(4):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 0
    assert len(loop.events) == 2
    assert '"stopped"' in (tmp_path / "progress.jsonl").read_text()


def test_the_users_errors_and_results_pass_unchanged(loop: Loop) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        model(torch.randn(4, 3)).backward()
    assert not loop.watcher.in_backward
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(outputs=x.square().sum(), inputs=x)
    assert grad.tolist() == [2.0, 2.0]


def test_detach_leaves_torch_as_it_was() -> None:
    names = [
        (nn.Module, "__call__"),
        (torch.optim.Optimizer, "__init__"),
        (torch.autograd, "backward"),
        (torch.autograd, "grad"),
        (torch.amp.grad_scaler.GradScaler, "step"),
        (torch.amp.grad_scaler.GradScaler, "scale"),
        (DataLoader, "__iter__"),
        (torch.optim.Optimizer, "zero_grad"),
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.Tensor, "to"),
    ]
    before = [(owner, name, vars(owner).get(name)) for owner, name in names]
    _, watcher = attach_training(Session(mode="search", run_dir="unused", script="x"))
    sgd(nn.Linear(1, 1))  # the close look begins with the first optimizer
    assert vars(nn.Module)["__call__"] is not before[0][2]
    watcher.detach()
    assert [(owner, name, vars(owner).get(name)) for owner, name in names] == before


@pytest.mark.parametrize("ours_is_last", [False, True])
def test_measuring_ends_inside_a_step_that_calls_anothers_hooks_too(tmp_path: Path, ours_is_last: bool) -> None:
    """Torch is walking through the hooks as ours ends the measuring: to take one out there would end the user's step in an error."""
    gc.collect()
    called: Counter[str] = Counter()

    def another(name: str) -> Callable[..., None]:
        return lambda *_: called.update([name])

    def register() -> list[RemovableHandle]:
        return [
            register_optimizer_step_pre_hook(another("before")),
            register_optimizer_step_post_hook(another("after")),
        ]

    handles = register() if ours_is_last else []
    training, watcher = attach_training(Session(mode="search", run_dir=str(tmp_path), script="x"))
    handles += [] if ours_is_last else register()
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    seen = []
    training.on_step.append(lambda event: (seen.append(event.index), watcher.detach()))
    try:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
        training.optimizers.clear()
        training.roots.clear()
        Attached.training = Attached.watcher = Attached.discovery = None
        stop.forget()
    assert seen == [0]
    assert called == {"before": 3, "after": 3}
    attach_training(Session(mode="search", run_dir=str(tmp_path), script="x"))[1].detach()
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


@pytest.mark.parametrize(
    ("sequence", "covering", "period"),
    [
        ("aaaa", "", 1),
        ("abab", "", 2),
        ("aabaab", "ab", 3),
        ("aaaaa", "ab", 0),
        ("aab", "", 0),
        ("xaaaabaaaab", "ab", 5),
        ("abcabd", "", 0),
    ],
)
def test_smallest_period(sequence: str, covering: str, period: int) -> None:
    assert smallest_period(sequence, covering=frozenset(covering)) == period


def test_nothing_of_a_boundary_is_compiled_with_an_optimizers_step(
    loop: Loop, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Linear(2, 3)
    optimizer = sgd(model)
    torch._dynamo.reset()
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(str(graph.code))
        return graph.forward

    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(4):
        model(torch.randn(4, 2)).sum().backward()
        step()
    assert len(loop.events) == 4
    assert len(compiled) == 1
    assert not [str(w.message) for w in recwarn if "does not know how to trace" in str(w.message)]
    torch._dynamo.reset()


def test_an_update_inside_a_compiled_function_is_known(loop: Loop) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = torch.compile(lambda: optimizer.step(), backend="eager")
    for compiled in (False, True):
        model(torch.randn(4, 3)).square().sum().backward()
        assert not loop.training.updates_compiled
        update() if compiled else optimizer.step()
    assert loop.training.updates_compiled
