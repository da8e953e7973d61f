"""Memory over a step: what is kept rises in the forward, falls in the backward, and nothing is held longer than without the watching."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from advisor.core.held import OTHERS, OUTSIDE, MemoryCourse, MemoryLook
from advisor.loop.training import RootModule, Training
from advisor.profiling.inside import course
from advisor.profiling.inside.held import Look


def net(wide: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Sigmoid())
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Sigmoid(), block, nn.Flatten(), nn.Linear(8 * wide, 2))


def watched(model: nn.Module, step, optimizers=()) -> MemoryLook:
    training = Training(torch.device("cpu"), roots=[RootModule(model, "Net")], optimizers=list(optimizers))
    look = Look(training)
    look.begin()
    step()
    look.end()
    return look.result(step_us=1.0, steps=1, applied=())


def layer(found: MemoryCourse, name: str) -> tuple[int, ...]:
    return next(one.nbytes for one in found.layers if one.name == name)


def test_activations_rise_in_the_forward_and_are_gone_behind_the_backward():
    model, images = net(), torch.randn(4, 3, 8, 8)
    found = watched(model, lambda: model(images).square().sum().backward())
    assert found.course is not None
    activations = [one for one in found.course.layers if one.kind == "activation"]
    assert {"Net.0", "Net.1", "Net.2", OUTSIDE} == {one.name for one in activations}
    sizes = {one.name: max(one.nbytes) for one in activations}
    assert sizes["Net.0"] == images.untyped_storage().nbytes()
    assert sizes["Net.2"] == 4 * 8 * 64 * 4  # the sigmoid's output; the convolution's input is the first sigmoid's
    assert all(one.nbytes[0] == one.nbytes[-1] == 0 for one in activations)
    at_most = max(range(len(found.course.at_us)), key=lambda i: sum(one.nbytes[i] for one in activations))
    assert found.course.at_us[at_most] <= found.course.backward_us <= found.course.length_us
    assert layer(found.course, "gradient")[0] == 0
    assert layer(found.course, "gradient")[-1] == sum(4 * p.numel() for p in model.parameters())


def test_gradients_that_the_script_drops_before_its_backward_are_gone_for_a_while():
    model, images = net(), torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        loss = model(images).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    gradients = layer(watched(model, step, [optimizer]).course, "gradient")
    held = sum(4 * p.numel() for p in model.parameters())
    assert gradients[0] == 0  # the first entry is that they are there
    assert gradients[1] == gradients[-1] == held
    assert min(gradients[1:]) == 0


def test_nothing_is_held_longer_than_autograd_holds_it():
    model, images = net(), torch.randn(4, 3, 8, 8)
    seen: list[StorageWeakRef] = []
    model[1].register_forward_hook(lambda module, given, out: seen.append(StorageWeakRef(out.untyped_storage())))
    gone = []

    def step():
        loss = model(images).square().sum()
        gone.append(seen[-1].expired())
        loss.backward()
        gone.append(seen[-1].expired())

    watched(model, step)
    assert gone == [False, True]


def test_a_step_with_functions_that_refuse_hooks_goes_on():
    model, images = net(), torch.randn(4, 3, 8, 8)
    disable = torch._C._autograd._saved_tensors_hooks_disable
    given = []

    def step():
        model(images).square().sum().backward()
        given.append(torch.func.grad(lambda x: (x**2).sum())(torch.ones(3)))

    found = watched(model, step)
    assert torch.equal(given[0], torch.full((3,), 2.0))
    assert found.course is not None
    assert torch._C._autograd._saved_tensors_hooks_disable is disable
    model(images).square().sum().backward()  # no hook is left


def test_a_step_of_too_many_entries_has_no_course(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(course, "MOST", 3)
    model, images = net(), torch.randn(4, 3, 8, 8)
    assert watched(model, lambda: model(images).square().sum().backward()).course is None


def test_modules_are_told_apart_where_most_is_kept_and_together_where_little_is():
    def entries(**kept: int) -> list[tuple[int, str, int]]:
        return [(0, name.replace("_", "."), nbytes) for name, nbytes in kept.items()]

    found = course.grouped(entries(Net=1, Net_a=10, Net_b_0=60, Net_b_1=50, Net_c=5))
    assert found == {"Net": "Net", "Net.a": "Net.a", "Net.b.0": "Net.b.0", "Net.b.1": "Net.b.1", "Net.c": "Net.c"}
    many = course.grouped(entries(**{f"Net_{i}": 10 + i for i in range(12)}))
    assert sorted(m for m, group in many.items() if group == OTHERS) == ["Net.0", "Net.1", "Net.2", "Net.3"]
    assert course.grouped(entries(Net=100, Net_a=1))["Net"] == "Net"  # and it comes to an end
    assert course.grouped([(0, "", 5), (0, "gradient", 7)]) == {"": OUTSIDE, "gradient": "gradient"}
