"""Lines that average or update weights are found by what they do: other names, lines and loop styles, in a traced window of real calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from advisor.loop.training import RootModule, Training
from advisor.profiling.inside import annotate
from advisor.profiling.inside.annotate import Annotator

Update = Callable[[nn.Module, Any], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))


def state_dict_loop(model: nn.Module, second: nn.Module) -> None:
    live = model.state_dict()
    for name, value in second.state_dict().items():
        if value.dtype.is_floating_point:
            value *= 0.99
            value += (1 - 0.99) * live[name].detach()


def zipped(model: nn.Module, second: nn.Module) -> None:
    with torch.no_grad():
        for slow, fast in zip(second.parameters(), model.parameters(), strict=True):
            slow.mul_(0.99).add_(fast, alpha=0.01)


def through_data(model: nn.Module, second: nn.Module) -> None:
    for slow, fast in zip(second.parameters(), model.parameters(), strict=True):
        slow.data = slow.data * 0.99 + fast.data * 0.01


def lerped(model: nn.Module, second: nn.Module) -> None:
    for slow, (_, fast) in zip(second.parameters(), model.named_parameters(), strict=True):
        slow.lerp_(fast.detach(), 0.01)


def copied(model: nn.Module, second: nn.Module) -> None:
    fast = dict(model.named_parameters())
    for name, slow in second.named_parameters():
        fresh = 0.99 * slow.detach() + 0.01 * fast[name].detach()
        slow.data.copy_(fresh)


def sub_style(model: nn.Module, second: nn.Module) -> None:
    for slow, fast in zip(second.parameters(), model.parameters(), strict=True):
        slow.sub_((1 - 0.99) * (slow - fast.detach()))


def into_out(model: nn.Module, second: nn.Module) -> None:
    for slow, fast in zip(second.parameters(), model.parameters(), strict=True):
        torch.lerp(slow.data, fast.data, 0.01, out=slow.data)


def many_at_once(model: nn.Module, second: nn.Module) -> None:
    slow, fast = list(second.parameters()), [p.detach() for p in model.parameters()]
    torch._foreach_mul_(slow, 0.99)
    torch._foreach_add_(slow, fast, alpha=0.01)


def put_in_its_place(model: nn.Module, shadow: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        fresh = (1.0 - 0.99) * parameter.data + 0.99 * shadow[name]
        shadow[name] = fresh.clone()


def swa_utils(model: nn.Module, second: torch.optim.swa_utils.AveragedModel) -> None:
    second.update_parameters(model)


STYLES: list[Update] = [
    state_dict_loop,
    zipped,
    through_data,
    lerped,
    copied,
    sub_style,
    into_out,
    many_at_once,
    put_in_its_place,
    swa_utils,
]


def by_hand(model: nn.Module, velocity: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def with_momentum(model: nn.Module, velocity: list[torch.Tensor]) -> None:
    for parameter, held in zip(model.parameters(), velocity, strict=True):
        change = parameter.grad.add(parameter.data, alpha=1e-4)
        held.mul_(0.9).add_(change)
        parameter.data.add_(held, alpha=-0.1)


def assigned(model: nn.Module, velocity: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data - 0.1 * parameter.grad


def clamped(model: nn.Module, second: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-1, 1)


def clipped(model: nn.Module, second: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def kept_at_best(model: nn.Module, second: nn.Module) -> None:
    for slow, fast in zip(second.parameters(), model.parameters(), strict=True):
        slow.data.copy_(fast.data)


def distance_logged(model: nn.Module, second: nn.Module) -> None:
    with torch.no_grad():
        float(sum((p - q).norm() for p, q in zip(model.parameters(), second.parameters(), strict=True)))


def accumulated(model: nn.Module, sums: list[torch.Tensor]) -> None:
    for total, parameter in zip(sums, model.parameters(), strict=True):
        total.add_(parameter.grad)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    call = nn.Module.__call__
    yield
    assert nn.Module.__call__ is call
    assert torch._C._len_torch_function_stack() == 0


def roles(update: Update, second: Any, *, optimizer: bool = True, every: int = 1) -> dict[str, str]:
    """What a window of four steps says of the lines of `update`, numbered from its first."""
    model = net()
    given = second(model) if callable(second) else second
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net")])
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer else None
    if made is not None:
        training.optimizers.append(made)
    annotator = Annotator(training.models, training)
    annotator.start(compiled=False)
    try:
        for step in range(4):
            if made is not None:
                made.zero_grad()
            loss = model(torch.randn(2, 3, 8, 8)).square().mean()
            loss.backward()
            if made is not None:
                annotator.open_optimizer(made)
                made.step()
                annotator.close_optimizer()
            annotator.settle()
            if step % every == 0:
                update(model, given)
    finally:
        annotator.stop()
    first = inspect.getsourcelines(update)[1]
    return {str(int(line.partition(" ")[0].rpartition(":")[2]) - first): role for line, role in annotator.roles.items()}


def second_of(update: Update) -> Callable[[nn.Module], Any]:
    if update is put_in_its_place:
        return lambda model: {name: p.data.clone() for name, p in model.named_parameters()}
    if update is swa_utils:
        average = torch.optim.swa_utils.get_ema_avg_fn(0.99)
        return lambda model: torch.optim.swa_utils.AveragedModel(model, avg_fn=average)
    return lambda model: copy.deepcopy(model).requires_grad_(False)


WRITING = {
    "state_dict_loop": {"4", "5"},
    "zipped": {"3"},
    "through_data": {"2"},
    "lerped": {"2"},
    "copied": {"3", "4"},
    "sub_style": {"2"},
    "into_out": {"2"},
    "many_at_once": {"2", "3"},
    "put_in_its_place": {"2", "3"},
    "swa_utils": {"1"},
}


@pytest.mark.parametrize("update", STYLES, ids=lambda update: update.__name__)
@pytest.mark.parametrize("every", [1, 2])
def test_an_average_is_found_by_what_it_does(update: Update, every: int) -> None:
    assert roles(update, second_of(update), every=every) == dict.fromkeys(WRITING[update.__name__], "average")


@pytest.mark.parametrize("update", [by_hand, with_momentum, assigned], ids=lambda update: update.__name__)
def test_an_update_by_hand_is_the_optimizers_work(update: Update) -> None:
    found = roles(update, lambda model: [torch.zeros_like(p) for p in model.parameters()], optimizer=False)
    assert set(found.values()) == {"optimizer"}
    assert max(found, key=int) == str(len(inspect.getsource(update).splitlines()) - 1)


@pytest.mark.parametrize("update", [clamped, clipped, kept_at_best, distance_logged], ids=lambda u: u.__name__)
def test_what_is_no_average_and_no_update_is_not_told_as_one(update: Update) -> None:
    assert roles(update, lambda model: copy.deepcopy(model).requires_grad_(False)) == {}


def test_sums_of_gradients_are_no_average() -> None:
    assert roles(accumulated, lambda model: [torch.zeros_like(p) for p in model.parameters()]) == {}


def test_a_tensor_of_a_strange_kind_ends_the_search_and_not_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no address")

    monkeypatch.setattr(annotate.WeightLines, "saw", broken)
    assert roles(zipped, second_of(zipped)) == {}


def test_the_scripts_own_function_mode_sees_every_call() -> None:
    seen = []

    class Own(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Own():
        assert set(roles(lerped, second_of(lerped)).values()) == {"average"}
    assert seen.count("lerp_") == 4 * len(list(net().parameters()))
