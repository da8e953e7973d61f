"""Whole networks with every kernel in place: a training step's gradients are as near to fp64 as PyTorch's own.

Capture, match and kernels together, on shapes that no case of a family lists; activation checkpoints recompute through them.
In fp32 the comparison is sharp. In bf16 the rounding of a deep network that is not trained yet can be as large as its
gradients, in PyTorch as in ours: there it shows that all kernels run and what they leave is of the right size.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import pipelines
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from advisor.bench import hosts
from advisor.ops import dispatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# network → arguments of its constructor
NETWORKS: dict[str, dict[str, object]] = {
    "resnet18": {},
    "resnext50_32x4d": {},
    "regnet_y_400mf": {},
    "mobilenet_v3_small": {},
    "efficientnet_b0": {},
    "convnext_tiny": {},
    "densenet121 memory_efficient": {"memory_efficient": True},
    "vgg11": {},
    "shufflenet_v2_x1_0": {},
    "resnet18 checkpointed": {},
}
BATCH, SIZE = 16, 128
# Of PyTorch's own error. Rounding differs from site to site; a wrong mask, scale or sum is several times as far off.
WORSE = 1.4
DRAWS = 3  # of one, a deep network that is not trained yet amplifies either's rounding by chance, up to ten times


class Checkpointed(nn.Module):
    """A network whose stages keep nothing: they run once more in the backward pass."""

    def __init__(self, inside: nn.Module, stages: tuple[str, ...], *, reentrant: bool) -> None:
        super().__init__()
        self.inside = inside
        for name in stages:
            stage = getattr(inside, name)
            forward = stage.forward
            stage.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def build(name: str) -> nn.Module:
    architecture, _, how = name.partition(" ")
    zoo = pipelines.package("torchvision.models")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(zoo, architecture)(**NETWORKS[name])
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0  # dropout and dropped paths draw other numbers where less is drawn beside them
    if how == "checkpointed":
        return Checkpointed(model, ("layer1", "layer2"), reentrant=False)
    return model


def step(model: nn.Module, images: torch.Tensor, targets: torch.Tensor, *, half: bool) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients as one vector in fp64."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = nn.functional.cross_entropy(model(images).float() if half else model(images), targets)
    loss.backward()
    gradients = [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def quadratic_mean(of: Sequence[float]) -> float:
    return (sum(value**2 for value in of) / len(of)) ** 0.5


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


def shift(found: torch.Tensor, reference: torch.Tensor) -> float:
    """As `distance`, of running means and variances: a mean may be what cancellation has left of values of size one."""
    return float((found - reference).norm() / (reference.norm() + found.numel() ** 0.5))


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_with_every_kernel_is_as_right_as_pytorchs(
    monkeypatch: pytest.MonkeyPatch, name: str, half: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()
    plain = build(name).cuda().to(memory_format=torch.channels_last).train()
    exact, ours = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    if " " in name:  # a copy's stages would go on calling the first one's
        exact, ours = build(name).cuda().double().train(), build(name).cuda().train()
        ours.to(memory_format=torch.channels_last).load_state_dict(plain.state_dict())
        exact.load_state_dict(plain.state_dict())
    dispatch.clear()
    undo = None
    errors, owns, losses = [], [], []
    for _ in range(DRAWS):
        images = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda").to(memory_format=torch.channels_last)
        targets = torch.randint(0, 1000, (BATCH,), device="cuda")
        loss, reference = step(exact, images.double(), targets, half=False)
        loss_plain, gradients_plain = step(plain, images, targets, half=half)
        with dispatch.everything():
            undo = undo or hosts.place(ours, name)
            loss_ours, gradients_ours = step(ours, images, targets, half=half)
        errors.append(distance(gradients_ours, reference))
        owns.append(distance(gradients_plain, reference))
        losses.append((abs(loss_ours - loss), abs(loss_plain - loss)))
    ran = {family: sum(counter.values()) for family, counter in dispatch.engaged.items() if counter}
    assert ran, "no kernel ran"
    error, own, loss_error, loss_own = (quadratic_mean(of) for of in (errors, owns, *zip(*losses, strict=True)))
    print(
        f"{name}: gradients off by {error:.2e}, PyTorch's by {own:.2e}; losses {loss_error:.2e}, {loss_own:.2e}; {ran}"
    )
    assert error <= WORSE * own + 1e-4
    assert loss_error <= WORSE * loss_own + (2e-2 if half else 1e-4)
    for (key, buffer), pytorchs, right in zip(ours.named_buffers(), plain.buffers(), exact.buffers(), strict=True):
        if buffer.is_floating_point():
            bound = WORSE * shift(pytorchs.double(), right) + (1e-2 if half else 1e-4)
            assert shift(buffer.double(), right) <= bound, key
    for change in reversed(undo or []):
        change.run()
