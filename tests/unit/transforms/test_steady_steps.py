"""Steps of fused optimizers with lists kept from the last one: the same numbers, and torch's own way where anything has changed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from advisor.transforms import steady_steps
from advisor.transforms.base import Undo

SHAPES = ((3, 4), (5,), (2, 3, 3), (1,))
Make = Callable[..., torch.optim.Optimizer]
KINDS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-2}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"weight_decay": 1e-2}),
    (torch.optim.Adam, {"amsgrad": True, "betas": (0.8, 0.9)}),
    (torch.optim.AdamW, {"eps": 1e-3}),
    (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
]
MOMENTUM = {"momentum": 0.9}


def made(
    kind: type[torch.optim.Optimizer] = torch.optim.SGD, device: str = "cpu", **options: Any
) -> torch.optim.Optimizer:
    """A fused optimizer of two groups."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in (*SHAPES, *SHAPES)]
    weights[-1].requires_grad_(False)
    groups = [{"params": weights[:4]}, {"params": weights[4:], "lr": 0.03}]
    return kind(groups, lr=0.1, fused=True, **options)


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step(optimizer: torch.optim.Optimizer, seed: int, *, without: int | None = None) -> None:
    """A step in which those that require them have gradients, but for one."""
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters(optimizer)):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None  # torch refuses one of another dtype as long as the old one is there
        if parameter.requires_grad and number != without:
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
    optimizer.step()


def assert_equal(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    for one, other in zip(parameters(a), parameters(b), strict=True):
        assert torch.equal(one, other)
        assert a.state.get(one, {}).keys() == b.state.get(other, {}).keys()
        for name, value in a.state.get(one, {}).items():
            assert torch.equal(value, b.state[other][name]), name


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups that torch has gathered, by class."""
    found: list[str] = []
    # AdamW inherits Adam's until Dynamo has been used once: it gives each class its own. Before Adam here, or one would be found twice.
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam):

        def watched(self: Any, group: Any, *lists: Any, plain: Any = kind._init_group) -> Any:
            found.append(type(self).__name__)
            return plain(self, group, *lists)

        monkeypatch.setattr(kind, "_init_group", watched)
    return found


def same_numbers(kind: type[torch.optim.Optimizer], options: dict[str, Any], device: str, gathered: list[str]) -> None:
    ours, plain = made(kind, device, **options), made(kind, device, **options)
    steady_steps.gather_once(ours, Undo())
    for number in range(4):
        step(plain, number)
    gathered.clear()
    for number in range(4):
        step(ours, number)
    # Its first step alone is torch's, and without momentum not even that: there is no state that it would have to make.
    assert gathered == ([] if kind is torch.optim.SGD and "momentum" not in options else [kind.__name__] * 2)
    assert_equal(ours, plain)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_numbers_are_those_of_torchs_own_step(kind, options, gathered) -> None:
    same_numbers(kind, options, "cpu", gathered)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_numbers_are_those_of_torchs_own_step_on_a_gpu(kind, options, gathered) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    same_numbers(kind, options, "cuda", gathered)


def _new_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _rate_in_a_tensor(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = torch.tensor(0.5)


def _no_momentum(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0


def _not_fused(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["fused"] = False
    optimizer.param_groups[0]["foreach"] = True


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    found = copy.deepcopy(optimizer.state_dict())
    for entry in found["state"].values():
        entry["momentum_buffer"] += 1.0
    optimizer.load_state_dict(found)


def _another_buffer(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[parameters(optimizer)[2]]["momentum_buffer"] = torch.ones(SHAPES[2])


def _another_entry(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[parameters(optimizer)[5]] = {"momentum_buffer": torch.ones(SHAPES[1])}


def _no_state(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _a_state_less(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[parameters(optimizer)[6]]


def _another_parameter(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(SHAPES[1]))


def _a_parameter_less(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"].pop()


def _another_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def _a_group_less(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]


def _double(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        weight = group["params"][0]
        weight.data, entry = weight.data.double(), optimizer.state[weight]
        entry.update({name: value.double() for name, value in entry.items() if name != "step"})


def _unfrozen(optimizer: torch.optim.Optimizer) -> None:
    parameters(optimizer)[7].requires_grad_(True)


SGDS = [
    _new_rate, _rate_in_a_tensor, _no_momentum, _not_fused, _loaded, _another_buffer, _another_entry, _no_state, _another_group,
    _a_group_less, _a_parameter_less, _double,
]  # fmt: skip
# Not `_unfrozen`: torch's own fused SGD refuses a group of which some parameters only have momentum (test_fused_optimizer.py has it).
ADAMS = [
    _new_rate, _no_state, _a_state_less, _another_parameter, _another_group, _a_group_less, _a_parameter_less, _double, _unfrozen,
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind"), [(c, torch.optim.SGD) for c in SGDS] + [(c, torch.optim.Adam) for c in ADAMS]
)
def test_what_is_changed_between_two_steps_counts_in_the_next(change, kind) -> None:
    ours, plain = (made(kind, **(MOMENTUM if kind is torch.optim.SGD else {})) for _ in range(2))
    steady_steps.gather_once(ours, Undo())
    before = [parameters(optimizer) for optimizer in (ours, plain)]
    for optimizer in (ours, plain):
        for number in range(3):
            step(optimizer, number)
        change(optimizer)
        for number in range(3):
            step(optimizer, number)
    assert_equal(ours, plain)
    assert all(map(torch.equal, *before))


def test_which_parameters_have_gradients_may_change_from_step_to_step() -> None:
    ours, plain = made(torch.optim.Adam), made(torch.optim.Adam)
    steady_steps.gather_once(ours, Undo())
    for optimizer in (ours, plain):
        for number, without in enumerate((None, None, None, 2, 2, 6, None, None)):
            step(optimizer, number, without=without)
    assert_equal(ours, plain)


def _scaled(optimizer: Any) -> None:
    optimizer.grad_scale = torch.tensor(4.0)


def _overflowed(optimizer: Any) -> None:
    optimizer.found_inf = torch.tensor(1.0)


@pytest.mark.parametrize("change", [_scaled, _overflowed, _rate_in_a_tensor, _double])
def test_what_torch_alone_knows_is_left_to_it(change, gathered: list[str]) -> None:
    ours, plain = made(**MOMENTUM), made(**MOMENTUM)
    steady_steps.gather_once(ours, Undo())
    for optimizer in (ours, plain):
        for number in range(3):
            step(optimizer, number)
        change(optimizer)
        gathered.clear()
        step(optimizer, 3)
        assert gathered == ["SGD"] * (2 if optimizer is plain or change is not _rate_in_a_tensor else 1)
    assert_equal(ours, plain)


def test_a_compiled_step_updates_once() -> None:
    """Dynamo calls `_init_group` itself while it traces."""
    ours, plain = made(**MOMENTUM), made(**MOMENTUM)
    steady_steps.gather_once(ours, Undo())
    for number in range(3):
        step(ours, number)
        step(plain, number)
    compiled = torch.compile(ours.step, backend="eager")
    for number in range(3):
        step(plain, number)
        for parameter, other in zip(parameters(ours), parameters(plain), strict=True):
            parameter.grad = None if other.grad is None else other.grad.clone()
        compiled()
    for one, other in zip(parameters(ours), parameters(plain), strict=True):
        torch.testing.assert_close(one, other)


def test_hooks_and_schedulers_see_every_step() -> None:
    optimizer = made(**MOMENTUM)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    undo = Undo()
    steady_steps.gather_once(optimizer, undo)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for number in range(3):
        step(optimizer, number)
        before.step()
    assert seen == ["before", "after"] * 3
    assert optimizer.param_groups[0]["lr"] == 0.1 / 8


def test_it_keeps_neither_an_optimizer_nor_the_state_that_was_replaced() -> None:
    class Forgotten(Undo):  # the tests' own remember what they are to take back
        def push(self, step: object) -> None:
            pass

    optimizer = made(**MOMENTUM)
    steady_steps.gather_once(optimizer, Forgotten())
    for number in range(3):
        step(optimizer, number)
    momentum = weakref.ref(optimizer.state[parameters(optimizer)[0]]["momentum_buffer"])
    gc.disable()
    try:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert momentum() is None
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_undo_gives_torchs_own_back(gathered: list[str]) -> None:
    optimizer = made(**MOMENTUM)
    undo = Undo()
    steady_steps.gather_once(optimizer, undo)
    step(optimizer, 0)
    undo.run()
    assert "_init_group" not in vars(optimizer)
    gathered.clear()
    step(optimizer, 1)
    assert len(gathered) == 2


def test_a_copy_of_the_optimizer_is_torchs_own() -> None:
    optimizer = made(**MOMENTUM)
    steady_steps.gather_once(optimizer, Undo())
    step(optimizer, 0)
    twin = copy.deepcopy(optimizer)
    assert "_init_group" not in vars(twin)
    for number in range(2):
        step(optimizer, number)
        step(twin, number)
    assert_equal(optimizer, twin)


def test_other_optimizers_stay_as_they_are() -> None:
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))], fused=True)
    steady_steps.gather_once(optimizer, Undo())
    assert "_init_group" not in vars(optimizer)
