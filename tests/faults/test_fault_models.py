"""Models that are written in every way, under every change that works without a GPU (numbers in catalogue.yaml)."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from advisor.core.transform_table import ROWS
from advisor.loop.training import RootModule, Training
from advisor.transforms.base import Undo
from advisor.transforms.registry import get

# Compiling takes seconds a model on a CPU and has tests of its own.
CHANGES = tuple(name for name, row in ROWS.items() if not row.cupy and not name.startswith("compile"))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        return self.fc(x.mean((2, 3)))


class OwnConv(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.5


def shared() -> nn.Module:
    model = Plain()
    model.tied = nn.Conv2d(8, 8, 3, padding=1)
    model.tied.weight = model.conv2.weight
    model.head = model.fc  # two names, one module
    model.bn2 = model.bn1
    return model


def parametrized() -> nn.Module:
    model = Plain()
    parametrizations.weight_norm(model.conv2)
    return model


def hooked() -> nn.Module:
    model = Plain()
    model.conv1.register_forward_hook(lambda module, inputs, output: output * 1.25)
    model.bn2.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    return model


def frozen() -> nn.Module:
    model = Plain()
    model.conv1.requires_grad_(False)
    model.bn1.eval()
    return model


def subclassed() -> nn.Module:
    model = Plain()
    model.conv2 = OwnConv(8, 8, 3, padding=1)
    return model


def without_affine() -> nn.Module:
    model = Plain()
    model.bn1 = nn.BatchNorm2d(8, affine=False, momentum=None)
    model.bn2 = nn.BatchNorm2d(8, track_running_stats=False)
    return model


def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "shared weights and modules": shared,
    "parametrized": parametrized,
    "hooked": hooked,
    "frozen": frozen,
    "subclassed": subclassed,
    "batch norm without parameters or statistics": without_affine,
    "scripted": scripted,
}


def make(name: str) -> tuple[Training, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS[name]()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-3)
    root = RootModule(module=model, name="model")
    training = Training(device=torch.device("cpu"), roots=[root], optimizers=[optimizer], batch_size=4)
    step(training, optimizer, torch.randn(4, 3, 8, 8))
    step(training, optimizer, torch.randn(4, 3, 8, 8))
    return training, optimizer


def step(training: Training, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    root = training.roots[0]
    optimizer.zero_grad()
    output = root.module(x)
    loss = output.float().square().mean()
    loss.backward()
    root.args, root.output = (x,), output
    optimizer.step()
    return loss.detach()


def fingerprint(training: Training, optimizer: torch.optim.Optimizer) -> str:
    """Everything that a change might leave behind: values, strides, identities, forwards, hooks, flags."""
    model = training.roots[0].module
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        digest.update(repr((name, id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())).encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    for name, module in model.named_modules(remove_duplicate=False):
        digest.update(
            repr((name, id(module), type(module).__name__, module.training, "forward" in vars(module))).encode()
        )
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            digest.update(repr([id(hook) for hook in getattr(module, kind, {}).values()]).encode())
    for group in optimizer.param_groups:
        digest.update(repr({key: value for key, value in group.items() if key != "params"}).encode())
    for state in optimizer.state.values():
        for key, value in sorted(state.items()):
            digest.update(key.encode())
            if isinstance(value, torch.Tensor):
                digest.update(repr((value.dtype, tuple(value.shape), value.stride())).encode())
                digest.update(value.contiguous().numpy().tobytes())
    digest.update(
        repr(
            (
                torch.backends.cudnn.benchmark,
                torch.get_float32_matmul_precision(),
                torch.is_autocast_enabled("cpu"),
                nn.Module.__call__,
                type(optimizer).step,
                torch.Tensor.item,
                torch.autograd.backward,
                torch.Tensor.backward,
            )
        ).encode()
    )
    return digest.hexdigest()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_undone_changes_leave_every_kind_of_model_as_it_was(name: str) -> None:
    training, optimizer = make(name)
    twin, twin_optimizer = make(name)
    tried = 0
    for change in CHANGES:
        transform = get(change)
        if not transform.match(training, {}).applies:
            continue
        tried += 1
        before = fingerprint(training, optimizer)
        undo = transform.apply(training, {})
        undo.run()
        transform.release(training)
        assert fingerprint(training, optimizer) == before, change
        x = torch.randn(4, 3, 8, 8)
        assert torch.equal(step(training, optimizer, x), step(twin, twin_optimizer, x)), change
    assert tried


def test_a_change_that_leaves_something_behind_is_seen() -> None:
    """The fingerprint itself, by planted remains."""
    for remain in (
        lambda model: model.conv1.weight.data.add_(1e-7),
        lambda model: setattr(model.conv1, "forward", model.conv1.forward),
        lambda model: model.conv1.weight.data.copy_(model.conv1.weight.data.flip(0)),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.bn1.register_forward_hook(lambda *_: None),
        lambda model: model.bn1.eval(),
    ):
        training, optimizer = make("plain")
        before = fingerprint(training, optimizer)
        remain(training.roots[0].module)
        assert fingerprint(training, optimizer) != before


@pytest.mark.parametrize("name", [name for name in MODELS if name != "scripted"])
def test_training_goes_on_through_other_shapes_and_modes(name: str) -> None:
    """A smaller last batch, another resolution, evaluation, gradients switched off, copies and checkpoints in between."""
    training, optimizer = make(name)
    twin, twin_optimizer = make(name)
    undo, on = Undo(), []
    for change in ("channels_last", "conv_bias", "fused_optimizer"):
        transform = get(change)
        if transform.match(training, {}).applies:
            undo.push(transform.apply(training, {}).run)
            on.append(change)
    assert on
    generator = torch.Generator().manual_seed(1)
    for shape in ((4, 3, 8, 8), (3, 3, 8, 8), (2, 3, 12, 10), (4, 3, 8, 8)):
        x = torch.randn(shape, generator=generator)
        assert torch.allclose(step(training, optimizer, x), step(twin, twin_optimizer, x), rtol=1e-4, atol=1e-6)
        ours, theirs = training.roots[0].module, twin.roots[0].module
        for module in (ours, theirs):
            module.eval()
        with torch.no_grad():
            assert torch.allclose(ours(x), theirs(x), rtol=1e-3, atol=1e-5)
        for module in (ours, theirs):
            module.train()
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(theirs.state_dict(), strict=True)
    leaf = torch.randn(2, 3, 8, 8, generator=generator, requires_grad=True)
    again = leaf.detach().clone().requires_grad_()
    for module, x in ((ours, leaf), (theirs, again)):  # a gradient penalty
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert leaf.grad is not None
    assert again.grad is not None
    assert torch.allclose(leaf.grad, again.grad, rtol=1e-3, atol=1e-5)
    undo.run()
    if name == "plain":
        copied = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
        assert "forward" not in vars(copied)
